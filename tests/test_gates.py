"""Every gate of recorded states: it lets right ones pass, and each kind of damage trips it."""

from pathlib import Path

import pytest
import torch

from eagle3.gates import (
    HEAD_ROWS,
    ROWS_PER_SAMPLE,
    Agreement,
    Problem,
    check_shard,
    head_agreement,
    judged_rows,
    row_faults,
)
from eagle3.hidden_states import require_agreement
from eagle3.params import ExtractParams, load_params
from eagle3.shards import Sample, Shard, open_shard, write_shard
from eagle3.verifier_head import HeadWeights
from tests.test_shards import metadata
from tests.token_tables import PROJECT

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
    params = load_params(PROJECT / "params.yaml").extract
    return params.model_copy(update={"agreement_samples": SAMPLES, "min_head_agreement": minimum})


def test_right_states_pass(tmp_path: Path, samples: list[Sample], head: HeadWeights) -> None:
    problems, agreement = check(tmp_path, samples, head)
    assert problems == {}
    assert agreement.share == 1
    assert agreement.rows == SAMPLES * ROWS_PER_SAMPLE
    require_agreement("shard k", problems, agreement, extract_params(0.95))


@pytest.mark.parametrize(("rows", "enough"), [(32, 25), (512, 467), (5000, 4691)])
def test_few_rows_may_fall_short_by_chance_and_many_may_not(rows: int, enough: int) -> None:
    """At 95 %: 2 misses of 32 are no reason to throw away a shard of a verifier that agrees at 99 %."""
    assert not Agreement(enough, rows, rows).falls_short(0.95)
    assert Agreement(enough - 1, rows, rows).falls_short(0.95)
    assert not Agreement(rows, rows, rows).falls_short(1.0) and Agreement(rows - 1, rows, rows).falls_short(1.0)
    assert not Agreement(0, rows, rows).falls_short(0.0)
    assert Agreement(0, rows, rows).falls_short(0.95)


def test_where_the_verifier_is_unsure_no_hit_in_eight_rows_is_no_proof() -> None:
    """Sampled rows whose 20 likeliest tokens have a quarter of the probability: 0 of 8 happens once in ten."""
    assert not Agreement(0, 2.0, 8).falls_short(0.95)
    assert Agreement(0, 20.0, 80).falls_short(0.95)
    assert Agreement(0, 7.8, 8).falls_short(0.95)


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
        require_agreement("shard k", problems, agreement, extract_params(0.95))
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


# -- text that the verifier did not write


def foreign_sample(seed: int) -> Sample:
    """Random states and random ids: the head explains none of them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (LENGTH,), generator=generator, dtype=torch.int32)
    states = [torch.randn(LENGTH, layers * HIDDEN, generator=generator) for layers in (len(LAYER_IDS), 1)]
    return Sample(ids, torch.arange(LENGTH) >= PROMPT, *states)


@pytest.fixture
def foreign(head: HeadWeights) -> tuple[list[Sample], dict[int, list[int]]]:
    """Samples, and what the engine that recorded them says it would have chosen."""
    samples = [foreign_sample(seed) for seed in range(SAMPLES)]
    chosen = [head.logits(s.last_hidden_states[judged_rows(s.loss_mask)]).argmax(1).tolist() for s in samples]
    return samples, dict(enumerate(chosen))


def judge(
    folder: Path, samples: list[Sample], choices: dict[int, list[int]], head: HeadWeights
) -> tuple[dict[int, Problem], Agreement]:
    shard = shard_of(folder, samples)
    return check_shard(shard, [False] * len(samples), choices, LAYER_IDS, head, SAMPLES)


def test_human_text_passes_by_the_engines_own_choices(
    tmp_path: Path, foreign: tuple[list[Sample], dict[int, list[int]]], head: HeadWeights
) -> None:
    samples, choices = foreign
    problems, agreement = judge(tmp_path, samples, choices, head)
    assert (problems, agreement.share, agreement.rows) == ({}, 1, SAMPLES * ROWS_PER_SAMPLE)
    as_if_written = judge(tmp_path, samples, {}, head)[1]
    assert as_if_written.share < 0.6  # judged by the text, right states would fail


def test_human_text_that_was_not_judged_says_nothing(
    tmp_path: Path, foreign: tuple[list[Sample], dict[int, list[int]]], head: HeadWeights
) -> None:
    samples, choices = foreign
    told = {position: tokens if position % 2 else [] for position, tokens in choices.items()}
    problems, agreement = judge(tmp_path, samples, told, head)
    assert (problems, agreement.rows) == ({}, SAMPLES // 2 * ROWS_PER_SAMPLE)


def test_both_kinds_in_one_shard(
    tmp_path: Path, samples: list[Sample], foreign: tuple[list[Sample], dict[int, list[int]]], head: HeadWeights
) -> None:
    others, choices = foreign
    told = {SAMPLES + position: tokens for position, tokens in choices.items()}
    shard = shard_of(tmp_path, [*samples, *others])
    problems, agreement = check_shard(shard, [True] * 2 * SAMPLES, told, LAYER_IDS, head, SAMPLES)
    assert (problems, agreement.share, agreement.rows) == ({}, 1, 2 * SAMPLES * ROWS_PER_SAMPLE)


@pytest.mark.parametrize("fault", ["shifted", "shifted back", "another layer", "after the norm", "no norm", "swapped"])
def test_faults_under_human_text_are_caught(
    tmp_path: Path, foreign: tuple[list[Sample], dict[int, list[int]]], head: HeadWeights, fault: str
) -> None:
    samples, choices = foreign
    used = head
    for sample in samples:
        states = sample.last_hidden_states
        match fault:
            case "shifted":
                states.copy_(states.roll(1, 0))
            case "shifted back":
                states.copy_(states.roll(-1, 0))
            case "another layer":
                states.copy_(sample.aux_hidden_states[:, -HIDDEN:])
            case "after the norm":
                states.copy_(states * states.square().mean(-1, keepdim=True).rsqrt() * head.norm)
    if fault == "no norm":
        used = HeadWeights(head.embed_tokens, torch.ones(HIDDEN), head.lm_head, head.rms_norm_eps)
    if fault == "swapped":
        kept = samples[3].last_hidden_states.clone()
        samples[3].last_hidden_states.copy_(samples[8].last_hidden_states)
        samples[8].last_hidden_states.copy_(kept)
    problems, agreement = judge(tmp_path, samples, choices, used)
    with pytest.raises(ValueError, match="the verifier's head gives"):
        require_agreement("shard k", problems, agreement, extract_params(0.95))
    if fault == "swapped":
        assert set(problems) == {3, 8}


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
