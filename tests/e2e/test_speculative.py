"""The draft that was trained is the one that vLLM runs: same tokens as our own draft, lossless in float32."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from eagle3.acceptance import Answer, Prompt, identical, summarise
from eagle3.draft.export import export_draft
from eagle3.draft.model import DraftModel, choose_sizes, initialise
from eagle3.draft.vocab import DraftVocabulary
from eagle3.params import EngineParams, EvaluateParams, TrainParams, load_params
from eagle3.serving.speculative import Decoder, decode_pairs
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
        Prompt(f"p{number}", "c", tokenizer(f"{number} {texts[number % 4]}", add_special_tokens=False)["input_ids"])
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def draft(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_draft(tiny_verifier, tmp_path_factory.mktemp("draft") / "draft")


@pytest.fixture(scope="module")
def answers(tiny_verifier: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Answer]]:
    """Greedy float32 answers of both arms to 12 prompts, decoded three at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE3_WORK_DIR", str(tmp_path_factory.mktemp("work")))
        own: EvaluateParams = DEFAULT.evaluate.model_copy(update={"max_new_tokens": 32, "batch_size": 3})

        def make(arm: str) -> Decoder:
            used = draft if arm == "draft" else None
            return Decoder(verifier_params(tiny_verifier), ENGINE, tiny_verifier, used, STEPS)

        yield [a for batch in decode_pairs(prompts(tiny_verifier, 12), make, own, 256) for a in batch]


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
    found = summarise(answers, STEPS)
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


def test_a_draft_directory_that_is_none_is_an_error_that_names_the_log(tiny_verifier: Path, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    with (
        pytest.raises(ValueError, match=r"evaluate \(draft engine, float32\).*log: .*evaluate-draft-float32\.log"),
        Decoder(verifier_params(tiny_verifier), ENGINE, tiny_verifier, tmp_path / "nothing", STEPS) as decoder,
    ):
        decoder.wait_until_ready()
