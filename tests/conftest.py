"""Fixtures shared by all tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.pinning import on_cores  # isort: skip - it chooses this process's cores before anything imports torch

import torch

from tests.draft_data import generate_texts, make_states
from tests.tiny_kimi import build_tiny_kimi
from tests.tiny_reasoner import trained_reasoner
from tests.tiny_verifiers import build_tiny_verifier

settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")


@pytest.fixture(scope="session")
def tiny_verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny random Llama verifier with tokenizer and chat template (float32, 512 positions)."""
    return build_tiny_verifier(tmp_path_factory.mktemp("verifier") / "tiny-llama")


@pytest.fixture(scope="session")
def recorded(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with hidden_states and verifier.json: the tiny verifier's own answers and states."""
    root = tmp_path_factory.mktemp("recorded")
    make_states(tiny_verifier, root, generate_texts(tiny_verifier, 24))
    return root


@pytest.fixture(scope="session")
def tiny_reasoner(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a trained reasoner whose think markers are single tokens; the first use trains it, for a minute."""
    return trained_reasoner(pytestconfig, tmp_path_factory.mktemp("verifier") / "reasoner", single_markers=True)


@pytest.fixture(scope="session")
def tiny_reasoner_split(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with think markers of three ordinary tokens each."""
    return trained_reasoner(pytestconfig, tmp_path_factory.mktemp("verifier") / "reasoner", single_markers=False)


@pytest.fixture(scope="session")
def tiny_kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny verifier with Kimi-K2.5's vocabulary and ids: its prompt opens the thinking."""
    return build_tiny_kimi(tmp_path_factory.mktemp("verifier") / "kimi", "k2.5")


@pytest.fixture(scope="session")
def tiny_kimi_thinking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in the style of Kimi-K2-Thinking: the model opens the thinking itself."""
    return build_tiny_kimi(tmp_path_factory.mktemp("verifier") / "kimi", "k2-thinking")


@pytest.fixture(scope="module")
def one_core() -> Iterator[None]:
    """For tiny models: threads that wait for each other on a busy machine take minutes."""
    with on_cores({min(os.sched_getaffinity(0))}):
        yield


@pytest.fixture(scope="module")
def all_cores() -> Iterator[None]:
    """For several engines, which need a core each."""
    with on_cores(range(os.cpu_count() or 1)):
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def own_work_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has a work store of its own; none touches the project's."""
    monkeypatch.setenv("EAGLE3_WORK_DIR", str(tmp_path / "work"))


#: Files that take minutes, longest first. A run ends with a list of its slowest tests.
LONGEST = (
    "test_bundled",
    "test_dvc",
    "test_executors",
    "test_crews",
    "test_draft_distributed",
    "test_generate",
    "test_reasoners",
    "test_recording",
    "test_probe",
    "test_remotes",
    "test_experiments",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files first, then those with real engines, so that the workers end together."""

    def place(item: pytest.Item) -> tuple[int, bool]:
        name = item.path.stem
        return LONGEST.index(name) if name in LONGEST else len(LONGEST), "e2e" not in item.path.parts

    items.sort(key=place)
