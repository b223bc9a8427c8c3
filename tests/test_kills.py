"""kill -9 of the stage, of dvc and of the server, ten times each: the same rows, and nothing finished is asked again.

What "finished" means: the answer is in the work store, which has it as soon as the client has read it. An answer that
was still on its way through a socket when the process died is asked for again; there are never more of those than
requests in flight.
"""

import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from benchmarks.project import Project
from eagle3 import schemas
from eagle3.tables import read_parts
from tests.stage_runs import ServerProcess, Stage, settings, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

KILLS = 10
CONCURRENCY = 16
TEXTS = [f"{i} question" for i in range(600)]


def undisturbed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """The rows of a run that nobody kills, with a work store of its own."""
    with monkeypatch.context() as patch, ServerProcess(folder) as server:
        patch.setenv("EAGLE3_WORK_DIR", str(folder / "calm-work"))
        stage = Stage(folder / "calm", server.url, TEXTS, concurrency=CONCURRENCY)
        stage.run()
        server.log.unlink()
        return stage.lasting_rows()


class Kills:
    """Ten random moments, told by answers that the server has sent since, and what was kept at each."""

    def __init__(self, server: ServerProcess, stage: Stage, work: Path, seed: int):
        self._server, self._stage, self._work = server, stage, work
        self._dice = random.Random(seed)
        self._seen: list[tuple[int, set[str]]] = []

    def await_moment(self) -> None:
        """Wait for up to 40 more answers, and some milliseconds."""
        wanted = len(self._server.texts("answered")) + self._dice.randint(0, 40)
        wait_until(lambda: len(self._server.texts("answered")) >= wanted)
        time.sleep(self._dice.random() / 20)

    def note(self) -> None:
        """Remember what is kept, and that nothing more than what was in flight got lost."""
        kept = self._stage.kept(self._work)
        lost = set(self._server.texts("answered")) - kept
        assert len(lost) <= CONCURRENCY, len(lost)
        self._seen.append((len(self._server.events()), kept))

    def nothing_kept_was_asked_again(self) -> None:
        assert len(self._seen) == KILLS
        for place, kept in self._seen:
            assert kept.isdisjoint(self._server.texts("asked", place))
        assert len(self._seen[-1][1]) > 20  # the kills came in the midst of the work


def test_of_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = undisturbed(tmp_path, monkeypatch)
    with ServerProcess(tmp_path, delay_s=0.05) as server:
        stage = Stage(tmp_path, server.url, TEXTS, concurrency=CONCURRENCY)
        kills = Kills(server, stage, Path(os.environ["EAGLE3_WORK_DIR"]), seed=1)
        for _ in range(KILLS):
            process = stage.fork()
            kills.await_moment()
            assert process.is_alive()
            process.kill()
            process.join()
            assert not (tmp_path / "responses").exists()
            kills.note()
        stage.run()
        assert stage.lasting_rows() == expected
        kills.nothing_kept_was_asked_again()


def test_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run of the stage goes through all of it: the endpoint is left out and put back ten times."""
    expected = undisturbed(tmp_path, monkeypatch)
    with ServerProcess(tmp_path, delay_s=0.05) as server:
        stage = Stage(tmp_path, server.url, TEXTS, concurrency=CONCURRENCY, retries=5)
        kills = Kills(server, stage, Path(os.environ["EAGLE3_WORK_DIR"]), seed=2)
        process = stage.fork()
        for _ in range(KILLS):
            kills.await_moment()
            server.kill()
            time.sleep(0.1)  # what it had sent is read
            kills.note()
            server.restart()
        process.join()
        assert process.exitcode == 0
        assert stage.lasting_rows() == expected
        kills.nothing_kept_was_asked_again()


def test_of_dvc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dvc the stage goes on and keeps the work store to itself; it is ended too, and dvc run again."""
    expected = undisturbed(tmp_path, monkeypatch)
    with ServerProcess(tmp_path, delay_s=0.05) as server:
        project = Project(tmp_path / "project")
        project.edit(
            [{"path": "data/prompts/mine.jsonl", "name": "mine"}],
            settings(endpoints=[server.url], concurrency=CONCURRENCY),
        )
        stage = Stage(tmp_path / "inputs", server.url, TEXTS, concurrency=CONCURRENCY)
        lay_out(stage, project)
        kills = Kills(server, stage, project.folder / ".work", seed=3)
        refused = False
        for _ in range(KILLS):
            dvc = repro(project)
            kills.await_moment()
            dvc.send_signal(signal.SIGSTOP)  # so that it starts nothing while we look
            orphans = psutil.Process(dvc.pid).children(recursive=True)
            dvc.send_signal(signal.SIGKILL)
            dvc.wait()
            if orphans and not refused:
                for orphan in orphans:
                    orphan.suspend()  # so that it is still there
                again = repro(project)
                told, _ = again.communicate()
                refused = again.returncode != 0 and "is in use by process" in told
                assert refused, told
            for orphan in orphans:
                orphan.kill()
            psutil.wait_procs(orphans)
            kills.note()
        last = repro(project)
        told, _ = last.communicate()
        assert last.returncode == 0, told
        rows = read_parts(project.folder / "data/responses", schemas.RESPONSES)
        assert [{k: row[k] for k in row if k not in ("latency_s", "attempts")} for row in rows] == expected
        kills.nothing_kept_was_asked_again()
        asked = Counter(server.texts("asked"))
        assert set(asked) == set(TEXTS)


def lay_out(stage: Stage, project: Project) -> None:
    """What the stages before generate would have made."""
    data = project.folder / "data"
    data.mkdir()
    (stage.folder / "prompts").rename(data / "prompts")
    (data / "verifier.json").write_text((stage.folder / "verifier.json").read_text())
    (data / "check.txt").write_text("checked\n")


def repro(project: Project) -> "subprocess.Popen[str]":
    command = ["dvc", "repro", "--single-item", "generate"]
    return subprocess.Popen(
        command,
        cwd=project.folder,
        env=project.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
