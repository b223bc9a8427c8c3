"""The stage `extract` with the fake engine as a process of its own: to be killed, stopped and looked into."""

import json
import multiprocessing
import os
import random
import sys
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path

import psutil
import pytest

from eagle3.console import guarded
from eagle3.digests import digest_file
from eagle3.serving import recorder
from eagle3.serving.recorder import digest_ids
from eagle3.tables import Row
from eagle3.verifier import write_identity
from stages.extract import extract
from tests.dvc_project import write_verifier
from tests.test_extract import FAKE, IDENTITY, Run, make_row
from tests.token_tables import write_params, write_tokens

SIZES = {"extract__shard_min_mib": 0.2, "extract__shard_max_mib": 0.6}  # 6 to 20 samples


def make_rows(count: int = 60) -> list[Row]:
    """Samples that the fake verifier wrote, always the same."""
    choice = random.Random(0)
    return [make_row(choice) for _ in range(count)]


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Row]) -> Run:
    """All that the stage reads, in `folder`."""
    write_verifier(folder / "verifier")
    write_tokens(folder / "tokens", rows)
    write_identity(IDENTITY, folder / "verifier.json")
    write_params(folder / "params.yaml", folder / "verifier", **SIZES)
    return enter(folder, monkeypatch)


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A folder that was prepared, or a copy of one, with a work store of its own."""
    monkeypatch.setenv("EAGLE3_WORK_DIR", str(folder / "work"))
    monkeypatch.setenv("EAGLE3_FAKE_REQUESTS", str(folder / "requests.log"))
    monkeypatch.setenv("EAGLE3_FAKE", "{}")
    monkeypatch.setattr(recorder, "ENGINE", FAKE)
    return Run(folder, monkeypatch)


def start(run: Run, log: str = "stage.log", before: Callable[[], None] = lambda: None, **faults: object) -> ForkProcess:
    """The stage as a copy of this process, which has everything imported. What it says goes to a file of the folder.

    before: called in the copy, to change it.
    """
    run.monkeypatch.setenv("EAGLE3_FAKE", json.dumps(faults))
    process = multiprocessing.get_context("fork").Process(target=_run, args=(run, log, before))
    process.start()
    return process


def _run(run: Run, log: str, before: Callable[[], None]) -> None:
    sys.stderr = (run.folder / log).open("w", buffering=1)
    before()
    guarded(extract)(*run.arguments())


def finish(run: Run, **faults: object) -> dict[str, float]:
    """Run the stage to its end; returns its metrics."""
    process = start(run, **faults)
    process.join()
    assert process.exitcode == 0, (run.folder / "stage.log").read_text()
    found: dict[str, float] = json.loads((run.folder / "metrics.json").read_text())
    return found


def engines(process: ForkProcess) -> list[psutil.Process]:
    """The stage's children."""
    assert process.pid is not None
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def contents(folder: Path) -> dict[str, str]:
    """The digest of every file."""
    return {path.name: digest_file(path) for path in folder.iterdir()}


def asked(run: Run) -> int:
    """Samples that the engine has recorded since `run.requests()`."""
    log = run.folder / "requests.log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def names_by_ids(run: Run, rows: list[Row]) -> dict[str, str]:
    """The shard of each sample, by the digest of its ids, as the requests have it. Needs a finished out."""
    return {digest_ids(row["input_ids"]): entry["shard"] for row, entry in zip(rows, run.index(), strict=True)}


def die() -> None:
    """As kill -9 from inside."""
    os.kill(os.getpid(), 9)
