"""Folders that nothing can be written to, told before any engine starts: read-only mounts, which hold for root too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.extract_runs import contents, finish, make_rows, prepare
from tests.test_extract import FAKE, Run
from tests.test_full_disk import namespace
from tests.token_tables import PROJECT

pytestmark = pytest.mark.skipif(namespace() is None, reason="this system lets nobody mount a read-only folder")

STAGE = (
    f"import sys; from eagle3.serving import recorder; recorder.ENGINE = {FAKE!r};"
    "from eagle3.stage import run_stage; from stages.extract import extract; run_stage(extract)"
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return prepare(tmp_path, monkeypatch, make_rows(20))


def extract_with_read_only(run: Run, folder: Path, out: Path) -> "subprocess.CompletedProcess[str]":
    """Run the stage where `folder` is mounted read-only."""
    folder.mkdir(parents=True, exist_ok=True)
    wrapper = namespace()
    assert wrapper is not None
    script = f'mount --bind {folder} {folder} && mount -o remount,bind,ro {folder} && exec "$@"'
    tokens, identity, _, metrics, params = run.arguments()
    command = [sys.executable, "-c", STAGE, *map(str, (tokens, identity, out, metrics, params))]
    return subprocess.run(
        [*wrapper, "sh", "-c", script, "sh", *command],
        cwd=run.folder,
        env=os.environ | {"PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("place", ["work", "outs", ".dvc/cache"])
def test_e14_a_read_only_folder_is_named_before_the_engine_starts(run: Run, place: str) -> None:
    """The work store, the folder of the out, DVC's cache."""
    out = run.folder / "outs" / "hidden_states"
    if place == ".dvc/cache":
        subprocess.run(["dvc", "init", "--no-scm", "--quiet"], cwd=run.folder, check=True)
    done = extract_with_read_only(run, run.folder / place, out)
    assert done.returncode == 1
    [told] = done.stderr.strip().splitlines()
    assert told.startswith("error: ")
    assert str(run.folder / place) in told or place in told
    assert "make it writable" in told
    assert run.requests() == []
    assert not out.exists()
    finish(run)
    assert len(contents(run.out)) > 3
