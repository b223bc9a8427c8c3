"""Every gate of recorded states: it lets right ones pass, and each kind of damage trips it."""

from pathlib import Path

import pytest
import torch

from eagle3.gates import HEAD_ROWS, ROWS_PER_SAMPLE, Agreement, Problem, check_shard, head_agreement, row_faults
from eagle3.hidden_states import require_agreement
from eagle3.params import ExtractParams
from eagle3.shards import Sample, Shard, open_shard, write_shard
from eagle3.verifier import HeadWeights
from tests.test_shards import metadata

LAYER_IDS, HIDDEN, VOCABULARY, PROMPT = (2, 4, 5), 8, 50, 6
SAMPLES, LENGTH = 12, 40


@pytest.fixture(scope="module")
def head() -> HeadWeights:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    return HeadWeights(weights, torch.rand(HIDDEN, generator=generator) * 3 + 0.1, weights, 1e-5)


def explained_sample(head: HeadWeights, seed: int, *, temperature: float = 0.0) -> Sample:
    """Random states, and ids that the head gives for them (or draws from what it gives)."""
    generator = torch.Generator().manual_seed(seed)
    last = torch.randn(LENGTH, HIDDEN, generator=generator)
    logits = head.logits(last)
    if temperature:
        following = torch.multinomial((logits / temperature).softmax(1), 1, generator=generator).flatten()
    else:
        following = logits.argmax(1)
    ids = torch.cat([torch.zeros(1, dtype=torch.int64), following[:-1]]).to(torch.int32)
    aux = torch.randn(LENGTH, len(LAYER_IDS) * HIDDEN, generator=generator)
    return Sample(ids, torch.arange(LENGTH) >= PROMPT, aux, last)


@pytest.fixture
def samples(head: HeadWeights) -> list[Sample]:
    return [explained_sample(head, seed) for seed in range(SAMPLES)]


@pytest.fixture
def states(tmp_path: Path, samples: list[Sample], head: HeadWeights) -> tuple[Path, list[Sample], HeadWeights]:
    """A folder, right samples, and the head that explains them."""
    return tmp_path, samples, head


def shard_of(folder: Path, samples: list[Sample]) -> Shard:
    write_shard(folder / "a.safetensors", samples, metadata("float32"))
    return open_shard(folder / "a.safetensors")


def check(
    folder: Path, samples: list[Sample], head: HeadWeights, greedy: bool = True
) -> tuple[dict[int, Problem], Agreement]:
    return check_shard(shard_of(folder, samples), [greedy] * len(samples), {}, LAYER_IDS, head, SAMPLES)


def extract_params(minimum: float) -> ExtractParams:
    return ExtractParams(
        shard_min_mib=1,
        shard_max_mib=2,
        max_pending_mib=1,
        agreement_samples=SAMPLES,
        min_head_agreement=minimum,
        max_rejected_share=0,
        stall_timeout_s=1,
    )


def test_right_states_pass(tmp_path: Path, samples: list[Sample], head: HeadWeights) -> None:
    problems, agreement = check(tmp_path, samples, head)
    assert problems == {}
    assert agreement.share == 1
    assert agreement.rows == SAMPLES * ROWS_PER_SAMPLE
    require_agreement("k", problems, agreement, extract_params(0.95))


@pytest.mark.parametrize(
    ("value", "reason"),
    [(float("nan"), "not-finite"), (float("inf"), "not-finite"), (0.0, "zero-row"), (3.0, "constant-row")],
)
@pytest.mark.parametrize("layer", [0, 2, 3])
def test_a_bad_row_in_any_layer_is_quarantined_and_named(
    states: tuple[Path, list[Sample], HeadWeights], value: float, reason: str, layer: int
) -> None:
    tmp_path, samples, head = states
    bad = samples[4]
    rows = bad.last_hidden_states if layer == 3 else bad.aux_hidden_states
    start = 0 if layer == 3 else layer * HIDDEN
    rows[17, start : start + HIDDEN] = value
    problems, _ = check(tmp_path, samples, head)
    name = "the last layer" if layer == 3 else f"layer {LAYER_IDS[layer]}"
    assert problems == {4: Problem(reason, f"token 17, {name}")}


def test_one_infinite_value_is_enough(samples: list[Sample]) -> None:
    states = samples[0].last_hidden_states.unsqueeze(1)
    states[3, 0, 2] = -float("inf")
    assert row_faults(states)["not-finite"].nonzero().tolist() == [[3, 0]]


def test_an_all_nan_sample_and_a_zero_sample(tmp_path: Path, samples: list[Sample], head: HeadWeights) -> None:
    samples[0].aux_hidden_states.fill_(float("nan"))
    samples[11].last_hidden_states.zero_()
    problems, agreement = check(tmp_path, samples, head)
    assert {position: problem.reason for position, problem in problems.items()} == {0: "not-finite", 11: "zero-row"}
    assert agreement.share == 1  # over the others


def refuses(folder: Path, samples: list[Sample], head: HeadWeights) -> dict[int, Problem]:
    problems, agreement = check(folder, samples, head)
    with pytest.raises(ValueError, match=r"shard k: the verifier's head gives .*Likely causes"):
        require_agreement("k", problems, agreement, extract_params(0.95))
    return problems


def test_shifted_rows_fail(tmp_path: Path, samples: list[Sample], head: HeadWeights) -> None:
    for sample in samples:
        sample.last_hidden_states.copy_(sample.last_hidden_states.roll(1, 0))
    refuses(tmp_path, samples, head)


def test_states_of_another_layer_fail(tmp_path: Path, samples: list[Sample], head: HeadWeights) -> None:
    for sample in samples:
        sample.last_hidden_states.copy_(sample.aux_hidden_states[:, -HIDDEN:])
    refuses(tmp_path, samples, head)


def test_states_after_the_final_norm_fail(tmp_path: Path, samples: list[Sample], head: HeadWeights) -> None:
    for sample in samples:
        states = sample.last_hidden_states
        states.copy_(states * states.square().mean(-1, keepdim=True).rsqrt() * head.norm)
    refuses(tmp_path, samples, head)


def test_head_without_its_norm_fails(tmp_path: Path, samples: list[Sample], head: HeadWeights) -> None:
    without = HeadWeights(head.embed_tokens, torch.ones(HIDDEN), head.lm_head, head.rms_norm_eps)
    refuses(tmp_path, samples, without)


def test_swapped_samples_fail_and_are_named(tmp_path: Path, samples: list[Sample], head: HeadWeights) -> None:
    kept = samples[3].last_hidden_states.clone()
    samples[3].last_hidden_states.copy_(samples[8].last_hidden_states)
    samples[8].last_hidden_states.copy_(kept)
    problems = refuses(tmp_path, samples, head)
    assert {position: problem.reason for position, problem in problems.items()} == dict.fromkeys(
        (3, 8), "head-disagreement"
    )


def test_sampled_tokens_are_judged_by_rank(head: HeadWeights) -> None:
    sampled = [(explained_sample(head, seed, temperature=1.0), False) for seed in range(20)]
    as_greedy = sum(head_agreement([(sample, True) for sample, _ in sampled], head), Agreement())
    assert as_greedy.share < 0.9  # judged as greedy they would fail
    assert sum(head_agreement(sampled, head), Agreement()).share > 0.95
    for sample, _ in sampled:
        sample.last_hidden_states.copy_(sample.last_hidden_states.roll(1, 0))
    assert sum(head_agreement(sampled, head), Agreement()).share < 0.9


def test_few_generated_tokens_do_not_condemn_a_sample(tmp_path: Path, samples: list[Sample], head: HeadWeights) -> None:
    samples[2].loss_mask[:-2] = False
    samples[2].input_ids[-2:] = 0
    problems, agreement = check(tmp_path, samples, head)
    assert problems == {}
    assert agreement.share > 0.97


def test_nothing_generated_means_nothing_to_say(tmp_path: Path, samples: list[Sample], head: HeadWeights) -> None:
    for sample in samples:
        sample.loss_mask.fill_(False)
    problems, agreement = check(tmp_path, samples, head)
    assert (problems, agreement) == ({}, Agreement())
    assert agreement.share == 1


def test_more_rows_than_one_pass_of_the_head(head: HeadWeights) -> None:
    many = [(explained_sample(head, seed), True) for seed in range(140)]
    assert len(many) * ROWS_PER_SAMPLE > 2 * HEAD_ROWS
    found = head_agreement(many, head)
    assert [agreement.hits for agreement in found] == [float(ROWS_PER_SAMPLE)] * 140
