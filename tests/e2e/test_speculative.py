"""The draft that was trained is the one that vLLM runs: same tokens as our own draft, lossless in float32."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from eagle3.acceptance import (
    Answer,
    Decoded,
    Prompt,
    Setting,
    Step,
    count_steps,
    identical,
    require_counters,
    summarise,
)
from eagle3.draft.export import export_draft, load_draft
from eagle3.draft.model import DraftModel, choose_sizes, initialise
from eagle3.draft.replay import replay
from eagle3.draft.vocab import DraftVocabulary
from eagle3.params import EngineParams, EvaluateParams, TrainParams, load_params
from eagle3.reconciliation import Reconciliation, is_large
from eagle3.serving.speculative import Decoder, decode_turns, turns
from eagle3.shards import Sample
from eagle3.speed import step_seconds, worth_of_tokens
from eagle3.verifier import identify_verifier
from eagle3.verifier_head import load_head
from tests.draft_data import verifier_params
from tests.draft_parity import equal_drafts

pytestmark = pytest.mark.slow

DEFAULT = load_params(Path(__file__).parents[2] / "params.yaml")
ENGINE: EngineParams = DEFAULT.engine.model_copy(update={"cpu_kv_cache_gib": 0.25})
STEPS = 3


def make_draft(
    verifier: Path,
    out: Path,
    train: TrainParams = DEFAULT.train,
    aux_layer_ids: list[int] | None = None,
    every: int = 5,
) -> Path:
    """A draft of random weights with a strong tie to the verifier's states, so that some drafts are accepted.

    Its vocabulary is every id but each fifth (neither a prefix nor everything), or each `every`th; 0 = all.
    """
    identity = identify_verifier(verifier_params(verifier, aux_layer_ids), DEFAULT.reasoning)
    head = load_head(verifier)
    ids = torch.tensor([i for i in range(identity.vocab_size) if not every or i % every])
    vocabulary = DraftVocabulary(ids, identity.vocab_size, 1.0)
    config = AutoConfig.from_pretrained(verifier).to_dict()
    layers = len(identity.aux_layer_ids)
    sizes = choose_sizes(config, layers, len(ids), identity.max_position_embeddings, train)
    draft = DraftModel(sizes)
    initialise(draft, head.lm_head[ids].float(), head.norm.float(), seed=1, spread=0.05)
    with torch.no_grad():
        draft.fc.weight[:, -sizes.hidden_size :] += torch.eye(sizes.hidden_size)
        if not train.freeze_lm_head:
            draft.lm_head.weight += 0.05 * torch.randn(draft.lm_head.weight.shape)
    export_draft(out, draft, vocabulary, identity, "float32")
    return out


def prompts(verifier: Path, count: int) -> list[Prompt]:
    tokenizer = AutoTokenizer.from_pretrained(verifier)
    texts = ["How many apples are left?", "Write a short letter.", "Paris is the capital of", "def add(a, b):"]
    return [
        Prompt(
            f"p{number}", "c", "s", tokenizer(f"{number} {texts[number % 4]}", add_special_tokens=False)["input_ids"]
        )
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def draft(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_draft(tiny_verifier, tmp_path_factory.mktemp("draft") / "draft")


OWN: EvaluateParams = DEFAULT.evaluate.model_copy(
    update={"max_new_tokens": 32, "batch_size": [3, 12], "num_speculative_tokens": [STEPS, 1]}
)


@pytest.fixture(scope="module")
def decoded(tiny_verifier: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Decoded]]:
    """Greedy float32 answers of both arms to 12 prompts, three at a time and all at once, with 3 tokens and with 1."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE3_WORK_DIR", str(tmp_path_factory.mktemp("work")))

        def make(tokens: int) -> Decoder:
            used = draft if tokens else None
            return Decoder(verifier_params(tiny_verifier), ENGINE, tiny_verifier, used, tokens)

        todo = turns(prompts(tiny_verifier, 12), OWN)
        yield [batch for _, pair in decode_turns(todo, make, OWN, 256) for batch in pair]


@pytest.fixture(scope="module")
def answers(decoded: list[Decoded]) -> list[Answer]:
    """Those of the first setting."""
    return [answer for batch in decoded if batch.setting == Setting(STEPS, 3) for answer in batch.answers]


def test_every_setting_decodes_every_prompt_in_pairs(decoded: list[Decoded]) -> None:
    found = [(batch.setting, batch.arm, answer.prompt.prompt_id) for batch in decoded for answer in batch.answers]
    assert len(found) == len(set(found)) == 12 * 2 * 4
    assert len(found) == sum(turn.answers for turn in turns(prompts_of(decoded), OWN))
    pairs = [decoded[place : place + 2] for place in range(0, len(decoded), 2)]
    assert all({batch.arm for batch in pair} == {"plain", "draft"} for pair in pairs)
    assert [pair[0].arm for pair in pairs][:4] == ["plain", "draft", "plain", "draft"]


def prompts_of(decoded: list[Decoded]) -> list[Prompt]:
    return list({answer.prompt.prompt_id: answer.prompt for batch in decoded for answer in batch.answers}.values())


def test_the_recorded_steps_add_up_to_the_counters_of_vllm(decoded: list[Decoded]) -> None:
    """Exactly, also when twelve requests are decoded together."""
    counters = require_counters(decoded)
    assert counters["drafts"] > 200
    assert 0 < counters["accepted_tokens"] < counters["draft_tokens"]


def test_the_engine_s_own_steps_are_timed(decoded: list[Decoded]) -> None:
    for size in (3, 12):
        for batch in (batch for batch in decoded if batch.setting.batch_size == size):
            tokens = batch.setting.num_speculative_tokens if batch.arm == "draft" else 0
            assert step_seconds([batch], size, tokens) is not None, batch.setting
            assert sum(forward.seconds for forward in batch.forwards) <= batch.answers[0].seconds
    worth = worth_of_tokens(decoded, count_steps(draft_answers(decoded), STEPS), [3, 12])
    assert set(worth) == {3, 12}
    assert all(set(row) == {1, 2, 3} for row in worth.values())


def draft_answers(decoded: list[Decoded]) -> list[Answer]:
    return [a for batch in decoded if batch.setting == Setting(STEPS, 3) for a in batch.answers]


def test_fewer_tokens_are_a_prefix_of_more(decoded: list[Decoded]) -> None:
    """In float32 the first token that is drafted after the same text is the same, however many follow it."""
    first: dict[tuple[str, int], set[int]] = {}
    for batch in decoded:
        for answer in batch.answers:
            for step in answer.steps:
                first.setdefault((answer.prompt.prompt_id, step.position), set()).add(step.drafted[0])
    assert sum(len(found) == 1 for found in first.values()) >= 0.99 * len(first)


def test_speculation_changes_no_token_in_float32(answers: list[Answer]) -> None:
    assert identical(answers) == {"share": 1.0, "shared_prefix": 1.0, "compared": 12}


def test_steps_add_up_to_the_answer(answers: list[Answer]) -> None:
    for answer in answers:
        if answer.arm == "plain":
            assert not answer.steps
            continue
        assert [step.position for step in answer.steps] == sorted({step.position for step in answer.steps})
        first = answer.steps[0].position  # tokens before the first judged draft come from the prefill
        assert first + sum(step.emitted for step in answer.steps) == len(answer.output_ids)
        for step in answer.steps:
            assert len(step.drafted) <= STEPS
            emitted = answer.output_ids[step.position : step.position + step.emitted]
            assert step.drafted[: step.accepted][: step.emitted] == emitted[: step.accepted]
            assert step.emitted <= step.accepted + 1


def test_the_summary_is_finite_and_has_every_number(answers: list[Answer]) -> None:
    found = summarise(answers)
    assert found["num_prompts"] == 12
    assert found["num_drafts"] > 50
    assert 1 <= found["acceptance_length"] <= STEPS + 1
    assert {"acceptance_rate_1", "acceptance_rate_3", "speedup", "tokens_per_second_plain"} <= found.keys()


def test_vllm_drafts_what_our_own_draft_proposes(tiny_verifier: Path, draft: Path, answers: list[Answer]) -> None:
    """First proposals and every later one, on the same inputs, in float32: at least 99 % equal."""
    layers = identify_verifier(verifier_params(tiny_verifier), DEFAULT.reasoning).aux_layer_ids
    same = equal_drafts(tiny_verifier, draft, answers, layers, STEPS)
    assert same[0][1] > 50
    for place, (equal, compared) in enumerate(same):
        assert equal / compared >= 0.99, f"position {place + 1}: {equal} of {compared}"


@torch.no_grad()
def test_a_replay_proposes_what_vllm_drafted(tiny_verifier: Path, draft: Path, answers: list[Answer]) -> None:
    """In float32: with what vLLM drafted as the answer every token of it is accepted; up to a changed one otherwise."""
    layers = identify_verifier(verifier_params(tiny_verifier), DEFAULT.reasoning).aux_layer_ids
    model, vocabulary = load_draft(draft)
    embed_tokens = load_head(tiny_verifier).embed_tokens
    reference = AutoModelForCausalLM.from_pretrained(tiny_verifier, dtype=torch.float32).eval()

    def accepted(prompt: list[int], output: list[int], place: int) -> int:
        ids = torch.tensor(prompt + output)
        states = reference(ids[None], output_hidden_states=True).hidden_states
        aux = torch.cat([states[layer][0] for layer in layers], dim=-1)
        sample = Sample(ids.int(), torch.arange(len(ids)) >= len(prompt), aux, states[-1][0])
        return int(replay(model, vocabulary, embed_tokens, sample, STEPS)[0][place - 1])

    whole = changed = steps = 0
    for answer in answers:
        for step in answer.steps[::4]:
            before = answer.output_ids[: step.position]
            first, second, third = step.drafted
            whole += accepted(answer.prompt.ids, [*before, first, second, third], step.position) == 3
            other = (second + 1) % len(embed_tokens)
            changed += accepted(answer.prompt.ids, [*before, first, other, third], step.position) == 1
            steps += 1
    assert steps > 40
    assert min(whole, changed) >= 0.97 * steps, (whole, changed, steps)


def test_estimate_and_measurement_differ_by_where_serving_asks() -> None:
    found = Reconciliation(2)
    replayed = np.array([2, 0, 1, 0]), np.array([2, 2, 2, 1])  # after 1, 2, 3 and 4 tokens of an answer of 5
    found.add(replayed, [Step(1, [7, 7], 2, 3), Step(4, [7, 7], 0, 1)])
    numbers = found.metrics()
    assert numbers["everywhere"] == 1 + 2 / 4 + 1 / 3
    assert numbers["at_steps"] == numbers["measured"] == 2
    assert (numbers["equal_steps"], numbers["steps"]) == (1, 2)
    assert not is_large(numbers)
    found.add(replayed, [Step(1, [7, 7], 0, 1), Step(2, [7, 7], 1, 2), Step(3, [7, 7], 0, 1)])
    assert is_large(found.metrics())
    assert found.metrics()["equal_steps"] == 2 / 5


def test_a_draft_directory_that_is_none_is_an_error_that_names_the_log(tiny_verifier: Path, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    with (
        pytest.raises(ValueError, match=r"evaluate \(draft engine, float32\).*log: .*evaluate-draft-float32\.log"),
        Decoder(verifier_params(tiny_verifier), ENGINE, tiny_verifier, tmp_path / "nothing", STEPS) as decoder,
    ):
        decoder.wait_until_ready()
