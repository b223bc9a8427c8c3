"""The stage `train` in processes of its own that are forked from one which has imported everything: they start at once.

Launcher and training processes are real ones, and all their code runs, torchrun's too; what is left out is that each
executes Python anew and imports torch for seconds. The tests that start the stage as users do have that in.
"""

import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from eagle3.stage import run_stage
from stages.train import train
from tests.draft_runs import Run, wait_until

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.forked_stages"])


def end_server() -> None:
    """End the process that stages are forked from, and its tracker: other tests look whether they left a child."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


class Stage:
    """The stage as a process that is the leader of a group of its own, as a terminal's foreground job."""

    def __init__(self, run: Run):
        self._said = run.root / "said"
        arguments = list(map(str, run.arguments))
        self.process = SERVER.Process(target=_launcher, args=(arguments, dict(os.environ), run.root, self._said))
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid
        self._own = psutil.Process(self.pid)

    def workers(self) -> list[psutil.Process]:
        """The training processes in the order of their ranks, once both are there."""
        wait_until(lambda: len(self._own.children()) == 2)
        return sorted(self._own.children(), key=lambda process: process.pid)

    def ended(self, within_s: float) -> tuple[int, str]:
        """Exit code and what was said; no child is left."""
        family = self._own.children(recursive=True) if self._own.is_running() else []
        self.process.join(within_s)
        assert self.process.exitcode is not None, self._said.read_text()
        gone(family, 5)
        return self.process.exitcode, self._said.read_text()


def gone(processes: Sequence[psutil.Process], within_s: float) -> None:
    left = psutil.wait_procs(processes, timeout=within_s)[1]
    for process in left:
        process.kill()
    assert not left


class _Fork:
    """A forked training process, with what torchrun's agent uses of subprocess.Popen."""

    def __init__(self, arguments: Sequence[str], environment: dict[str, str]):
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _worker(arguments, environment)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.01)


def _launcher(arguments: list[str], environment: dict[str, str], folder: Path, said: Path) -> None:
    os.setsid()
    os.chdir(folder)
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    SubprocessHandler._popen = lambda _self, command, variables: _Fork(command, variables)  # type: ignore[assignment]
    _run(arguments, environment)


def _worker(command: Sequence[str], environment: dict[str, str]) -> NoReturn:
    code: Any = 1
    try:
        os.setsid()
        os.closerange(3, 4096)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        logging.disable(logging.NOTSET)
        _run(command[command.index("stages.train") + 1 :], environment)
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _run(arguments: Sequence[str], environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = ["stages.train", *arguments]
    run_stage(train)
