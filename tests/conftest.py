"""Fixtures shared by all tests."""

from pathlib import Path

import pytest
from hypothesis import settings

import tests.pinning  # noqa: F401 - before anything that imports torch
from tests.tiny_verifiers import build_tiny_verifier

settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")


@pytest.fixture(scope="session")
def tiny_verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny random Llama verifier with tokenizer and chat template (float32, 512 positions)."""
    return build_tiny_verifier(tmp_path_factory.mktemp("verifier") / "tiny-llama")


@pytest.fixture(autouse=True)
def own_work_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has a work store of its own; none touches the project's."""
    monkeypatch.setenv("EAGLE3_WORK_DIR", str(tmp_path / "work"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones first, so that the workers end together."""
    items.sort(key=lambda item: "e2e" not in item.path.parts)
