"""A draft knows its verifier, and damage or a wrong verifier is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3.lineage import check_draft, write_lineage
from eagle3.params import load_params
from tests.test_tokens import IDENTITY

PARAMS = load_params(Path(__file__).parent.parent / "params.yaml").train


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "index.parquet").write_bytes(b"index")
    write_lineage(
        folder, IDENTITY, tmp_path / "index.parquet", PARAMS, {"train_samples": 3, "expected_acceptance_length": 1.5}
    )
    return folder


def test_a_draft_fits_its_own_verifier(draft: Path) -> None:
    check_draft(draft, IDENTITY)
    lineage = json.loads((draft / "lineage.json").read_text())
    assert lineage["train"]["ttt_steps"] == PARAMS.ttt_steps
    card = (draft / "README.md").read_text()
    assert card.startswith("---\n")
    assert IDENTITY.digest in card
    assert "| expected_acceptance_length | 1.5 |" in card


def test_another_verifier_is_refused(draft: Path) -> None:
    with pytest.raises(ValueError, match="was trained for verifier dddddd"):
        check_draft(draft, replace(IDENTITY, digest="f" * 64))


def test_changed_weights_are_refused(draft: Path) -> None:
    (draft / "model.safetensors").write_bytes(b"Weights")
    with pytest.raises(ValueError, match="differs from its lineage"):
        check_draft(draft, IDENTITY)


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"verifier": 3}'])
def test_a_missing_or_foreign_lineage_is_named(draft: Path, content: str | None) -> None:
    (draft / "lineage.json").unlink()
    if content is not None:
        (draft / "lineage.json").write_text(content)
    with pytest.raises(ValueError, match=r"lineage\.json"):
        check_draft(draft, IDENTITY)
