"""A child process with an engine in it: whatever becomes of it, the parent is told within its time and none is left."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from eagle3.serving import process as engine_process
from eagle3.serving.process import EngineProcess, ParentPipe

MEGABYTES = bytes(8 << 20)  # more than a socket holds


def echo(pipe: ParentPipe) -> None:
    while True:
        pipe.send(len(pipe.receive()))


def never_read(pipe: ParentPipe) -> None:
    pipe.send("ready")
    time.sleep(600)


def child(folder: Path, target: str) -> EngineProcess:
    return EngineProcess(f"tests.test_process:{target}", (), {}, folder / "child.log", "child")


def test_large_messages_arrive(tmp_path: Path) -> None:
    with child(tmp_path, "echo") as process:
        process.send(MEGABYTES, 60)
        assert process.receive(60) == len(MEGABYTES)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_child_that_takes_no_messages_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    monkeypatch.setattr(engine_process, "GRACE_S", 1)
    with child(tmp_path, "never_read") as process:
        assert process.receive(60) == "ready"
        if stopped:
            os.kill(process.pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(ValueError, match=r"child: made no progress for 0\.5 s; log: .*child\.log"):
            process.send(MEGABYTES, 0.5)
        assert time.monotonic() - started < 5
        pid = process.pid
    assert not psutil.pid_exists(pid)


def test_a_child_that_was_killed_says_what_it_may_have_been(tmp_path: Path) -> None:
    with child(tmp_path, "never_read") as process:
        assert process.receive(60) == "ready"
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(ValueError, match=r"ended unexpectedly \(killed by SIGKILL\), as the system does when mem"):
            process.receive(60)
        with pytest.raises(ValueError, match="ended unexpectedly"):
            process.send(MEGABYTES, 60)
