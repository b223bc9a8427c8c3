"""kill -9 of the engine, of `extract` and of dvc at random moments: the same bytes, nothing finished is done again.

What "finished" means: the shard has its final name. A shard on its way is recorded again, all of it.
"""

import random
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.project import Project
from eagle3.digests import canonical_json
from eagle3.tables import Row
from tests.extract_runs import (
    SIZES,
    asked,
    contents,
    engines,
    enter,
    finish,
    make_rows,
    names_by_ids,
    prepare,
    start,
)
from tests.stage_runs import wait_until
from tests.test_extract import FAKE, Run
from tests.token_tables import write_params

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

KILLS, DVC_KILLS = 15, 2
REAL_ENGINE = '"eagle3.serving.connector:run_engine"'


@pytest.fixture
def rows() -> list[Row]:
    return make_rows(120)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Row]) -> Run:
    (tmp_path / "project").mkdir()
    return prepare(tmp_path / "project", monkeypatch, rows)


@pytest.fixture
def expected(tmp_path: Path, rows: list[Row]) -> tuple[dict[str, str], dict[str, str]]:
    """The out of a run that nobody disturbs, and the shard of each sample by the digest of its ids."""
    (tmp_path / "calm").mkdir()
    with pytest.MonkeyPatch.context() as monkeypatch:
        calm = prepare(tmp_path / "calm", monkeypatch, rows)
        finish(calm)
        return contents(calm.out), names_by_ids(calm, rows)


class Account:
    """What was finished at each kill, and what was asked for after it."""

    def __init__(self, run: Run, shard_of: dict[str, str]):
        self._run, self._shard_of = run, shard_of
        self._finished: dict[str, int] = {}
        self.kills = 0

    def settle(self) -> None:
        """Nothing that was finished before has been asked for or written since."""
        requests = [self._shard_of[ids] for ids in self._run.requests()]
        assert self._finished.keys().isdisjoint(requests)
        shards = self._run.shards()
        assert self._finished.items() <= shards.items()
        self._finished = shards

    def note_kill(self) -> None:
        self.settle()
        self.kills += 1


@pytest.mark.parametrize("victim", ["stage", "engine"])
def test_at_random_moments(run: Run, expected: tuple[dict[str, str], dict[str, str]], victim: str) -> None:
    bytes_expected, shard_of = expected
    account, dice = Account(run, shard_of), random.Random(victim)
    while account.kills < KILLS:
        process = start(run, seconds_each=0.01)
        moment = time.monotonic() + dice.random() * 1.5
        while process.is_alive() and asked(run) < 25:
            if time.monotonic() > moment and (victim == "stage" or engines(process)):
                break
            time.sleep(0.002)
        children = engines(process)
        if victim == "stage":
            process.kill()
        for child in children if victim == "engine" else []:
            child.kill()
        process.join()
        assert psutil.wait_procs(children, 5)[1] == []
        if process.exitcode == 0:
            break
        if victim == "engine":
            told = (run.folder / "stage.log").read_text().splitlines()[-1]
            assert process.exitcode == 1
            assert told.startswith(
                "error: recording engine: ended unexpectedly (killed by SIGKILL), as the system does"
            )
            assert "log: " in told and told.endswith("finished shards are kept, run again to go on")
        assert not run.out.exists()
        account.note_kill()
    finish(run)
    account.settle()
    assert account.kills > 5
    assert contents(run.out) == bytes_expected


class DvcProject:
    """What the stages before extract would have made, in a project whose code names the fake engine."""

    def __init__(self, run: Run, monkeypatch: pytest.MonkeyPatch):
        self.project = Project(run.folder.parent / "dvc")
        data = self.project.folder / "data"
        run.folder.rename(data)
        write_params(self.project.folder / "params.yaml", data / "verifier", **SIZES)
        (data / "check.txt").write_text("checked\n")
        code = self.project.folder / "eagle3/serving/recorder.py"
        assert REAL_ENGINE in code.read_text()
        code.write_text(code.read_text().replace(REAL_ENGINE, f'"{FAKE}"'))
        self.project.commit("settings")
        self.run = enter(data, monkeypatch)
        self._environment = self.project.environment() | {
            "EAGLE3_WORK_DIR": str(data / "work"),
            "PYTHONPATH": str(Path(__file__).parent.parent),
        }

    def repro(self, seconds_each: float = 0) -> "subprocess.Popen[bytes]":
        """Start `dvc repro`; it writes to a file, which an orphan can still write to."""
        environment = self._environment | {"EAGLE3_FAKE": canonical_json({"seconds_each": seconds_each})}
        with (self.project.folder / "dvc.log").open("wb") as log:
            return subprocess.Popen(
                ["dvc", "repro", "--single-item", "extract"],
                cwd=self.project.folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def told(self) -> str:
        return (self.project.folder / "dvc.log").read_text()

    def kill_after(self, samples: int, seconds_each: float) -> list[psutil.Process]:
        """Start dvc, kill it when the engine has recorded some samples; what it leaves running."""
        dvc = self.repro(seconds_each)
        wait_until(lambda: asked(self.run) >= samples or dvc.poll() is not None)
        assert dvc.poll() is None, self.told()
        orphans = psutil.Process(dvc.pid).children(recursive=True)
        dvc.send_signal(signal.SIGKILL)
        dvc.wait()
        return orphans


def test_of_dvc(run: Run, expected: tuple[dict[str, str], dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dvc the stage goes on and keeps the work store to itself; it is ended too, or comes to its end."""
    bytes_expected, shard_of = expected
    made = DvcProject(run, monkeypatch)
    account, dice = Account(made.run, shard_of), random.Random("dvc")
    for number in range(DVC_KILLS):
        orphans = made.kill_after(2 if number == 0 else dice.randrange(20, 60), 1 if number == 0 else 0.05)
        if number == 0:  # beside an orphan that has two minutes of work to do
            assert made.repro().wait() != 0
            assert re.search("is in use by process .* wait for it or end it, then run again", made.told()), made.told()
        for orphan in orphans:
            orphan.kill()
        assert psutil.wait_procs(orphans, 5)[1] == []
        account.note_kill()
    orphans = made.kill_after(1, 0.05)
    assert psutil.wait_procs(orphans, 120)[1] == []
    assert contents(made.run.out) == bytes_expected
    account.settle()
    assert made.repro().wait() == 0, made.told()
    assert made.run.requests() == []  # the orphan had finished all
    assert contents(made.run.out) == bytes_expected
