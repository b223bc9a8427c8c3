"""The model card: metadata as Hugging Face reads it, numbers, and foreign text that stays text."""

import re
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from eagle3.card import base_of, markdown, model_card
from eagle3.lineage import GitState, Imported, Lineage
from tests.draft_data import verifier_params
from tests.test_lineage import LINEAGE

EVALUATION = {
    "acceptance_length": 1.9234,
    "speedup": 1.5,
    "num_prompts": 16,
    "acceptance_rate_1": 0.5,
    "acceptance_rate_2": 0.25,
    "by_category": {"code": {"acceptance_length": 2.5}},
}


def test_hugging_face_reads_its_metadata() -> None:
    card = ModelCard(model_card(LINEAGE, None, 3))
    assert card.data.to_dict() == {
        "base_model": "Qwen/Qwen3-8B",
        "license": "apache-2.0",
        "library_name": "vllm",
        "pipeline_tag": "text-generation",
        "tags": ["eagle3", "speculative-decoding"],
    }
    unknown = ModelCard(model_card(replace(LINEAGE, base_model=None, license=None), None, 3)).data.to_dict()
    assert "base_model" not in unknown and "license" not in unknown


def test_it_says_what_the_draft_was_made_of() -> None:
    told = model_card(LINEAGE, None, 5)
    for value in (LINEAGE.verifier.digest, "b" * 64, "c" * 64, LINEAGE.tokens.digest, LINEAGE.prompts.digest, "f" * 40):
        assert value in told
    assert '"num_speculative_tokens": 5' in told and "vllm serve Qwen/Qwen3-8B" in told
    assert "| `expected_acceptance_length` | 1.5 |" in told and "with 1 uncommitted files" in told


def test_numbers_of_the_evaluation_come_when_they_are_there() -> None:
    assert "`eagle3 card` prints this card with the numbers" in model_card(LINEAGE, None, 3)
    told = model_card(LINEAGE, EVALUATION, 3)
    for line in ("| `acceptance_length` | 1.923 |", "| `acceptance_rate_2` | 0.25 |", "| code | 2.5 |"):
        assert line in told
    assert "Not measured" not in told


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, "what the verifier itself writes, thinking and answers, by"),
        ({"reference_share": 0.25}, "itself writes, thinking and answers, and on the answers of people to 25% of the"),
        ({"reference_share": 1.0}, "answers of people"),
    ],
)
def test_it_says_whose_answers_taught_it(change: dict[str, Any], told: str) -> None:
    assert LINEAGE.origin is not None
    params = {"generate": LINEAGE.origin.params["generate"] | change}
    assert told in model_card(replace(LINEAGE, origin=replace(LINEAGE.origin, params=params)), None, 3)


def test_an_imported_draft_says_so() -> None:
    imported = replace(
        LINEAGE, hidden_states=None, tokens=None, prompts=None, train=None, training=None, origin=None,
        imported=Imported("speculators", {"model.safetensors": "9" * 64}),
    )  # fmt: skip
    told = model_card(imported, None, 3)
    assert "Imported from a checkpoint" in told and "9" * 64 in told and "## Training" not in told


def hostile(evil: str) -> Lineage:
    assert LINEAGE.origin is not None
    return replace(
        LINEAGE,
        base_model=evil,
        license=evil,
        draft={evil: evil},
        verifier=replace(LINEAGE.verifier, name=evil, digest=evil, engine=evil, dtype=evil),
        origin=replace(LINEAGE.origin, packages={evil: evil}, git=GitState(evil, (evil,))),
        training={"steps": 1},
    )


@pytest.mark.parametrize(
    "evil",
    [
        "x\n---\nlicense: mit\nx: |\n",
        "<script>alert(1)</script>",
        "![x](http://evil.example/x.png) [a](javascript:b)",
        "`code` | cell | <img src=x onerror=y>",
        "\x1b]0;x\x07\u202e\ud800",
        "no",
        "# heading",
        "'; rm -rf / #",
    ],
)
def test_hostile_text_stays_text(evil: str) -> None:
    """Once escaped signs and code are taken out, the signs of the page are those of one with harmless names."""
    told, plain = (
        model_card(hostile(name), EVALUATION | {"by_category": {name: {"acceptance_length": 1.0}}}, 3)
        for name in (evil, "harmless")
    )
    told.encode()
    assert not {"\x1b", "\x07", "\u202e"} & set(told)
    assert signs(told) == signs(plain)
    license_name = ModelCard(told).data.to_dict().get("license")
    assert license_name is None or license_name == evil


def signs(card: str) -> str:
    """All that is markup in a card, and its line ends."""
    text = "\n".join(line for line in card.split("\n") if not line.startswith(("    ", "license:")))
    text = re.sub(r"\\[!-/:-@\[-`{-~]|`[^`\n]*`", "", text)
    return "".join(sign for sign in text if sign in string.punctuation + "\n")


def test_markdown_is_escaped_to_the_last_sign() -> None:
    assert markdown("<b>|`*_[x](y)") == r"\<b\>\|\`\*\_\[x\]\(y\)"
    assert markdown("a\nb") == r"a\\nb"


def test_base_model_and_licence_of_a_verifier(tmp_path: Path) -> None:
    local = verifier_params(tmp_path)
    assert base_of(local, tmp_path) == (None, None)
    assert base_of(local.model_copy(update={"model": "bundled:smollm2-135m-think"}), tmp_path) == (
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "apache-2.0",
    )
    on_hub = local.model_copy(update={"model": "Qwen/Qwen3-8B", "revision": "a" * 40})
    assert base_of(on_hub, tmp_path) == ("Qwen/Qwen3-8B", None)
    for text, found in (
        ("---\nlicense: llama3.1\ntags: [a]\n---\n# x\n", "llama3.1"),
        ("---\nlicense: [mit, other]\n---\n", None),
        ("---\nlicense: 'a\\nb: c'\n---\n", None),
        ("---\n: [\n---\n", None),
        ("# no metadata\nlicense: mit\n", None),
        ("---\n- a\n---\n", None),
    ):
        (tmp_path / "README.md").write_text(text)
        assert base_of(on_hub, tmp_path) == ("Qwen/Qwen3-8B", found), text
    (tmp_path / "README.md").write_bytes(b"---\nlicense: \xff\n---\n")
    assert base_of(on_hub, tmp_path)[1] is None
