"""Starts a stage in several processes of this machine: the calling process becomes torchrun's agent.

Everything listens on loopback. Ctrl-C and SIGTERM are passed on once, so that the processes save and end together; a
second one kills them. They die with this process, even when it is killed.
"""

import logging
import os
import signal
import socket
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from eagle3.console import Interrupted
from eagle3.draft.processes import INTERRUPTED, LAUNCHER, LOOPBACK, TOLD

PROJECT = Path(__file__).parents[2]


def launch(module: str, arguments: Sequence[object], count: int) -> None:
    """Run a module with arguments in `count` processes, as torchrun would; returns when all have ended well.

    Raises ValueError when one died, SystemExit when one has told its error, Interrupted when they were interrupted.
    """
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
    with (
        tempfile.TemporaryDirectory(prefix="eagle3-torchrun-") as logs,
        _environment(_variables(port, count)),
        _silent_torchrun(),
        _PassedOn() as passed_on,
    ):
        options = [f"--nproc-per-node={count}", "--rdzv-backend=c10d", f"--rdzv-endpoint={LOOPBACK}:{port}"]
        options += ["--rdzv-conf=is_host=0", f"--rdzv-id={uuid.uuid4()}", f"--local-addr={LOOPBACK}"]
        options += [f"--log-dir={logs}", "--signals-to-handle=SIGQUIT", "--module", module]
        try:
            run(parse_args([*options, *map(str, arguments)]))
        except ChildFailedError as error:
            codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            if passed_on.signals:
                raise Interrupted from None
            if store.check([TOLD]):
                raise SystemExit(1) from None
            raise _reason(codes, count) from None
    if passed_on.signals:
        raise Interrupted


def _variables(port: int, count: int) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ours = {
        LAUNCHER: f"{os.getpid()}:{port}",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else torchrun opens one on every interface
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    theirs = {"OMP_NUM_THREADS": str(max(1, cores // count)), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return ours | {name: os.environ.get(name, value) for name, value in theirs.items()}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """torchrun's processes inherit this process's environment."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _silent_torchrun() -> Iterator[None]:
    """The processes and `launch` say what went wrong; torchrun would say it again in twenty lines."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


class _PassedOn:
    """Passes the first SIGTERM or Ctrl-C on to the processes started since, and kills them at the second."""

    def __init__(self) -> None:
        self.signals = 0
        self._own = psutil.Process()
        self._others = set(self._own.children())

    def __enter__(self) -> "_PassedOn":
        self._previous = {number: signal.signal(number, self._pass) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _pass(self, _number: int, _frame: FrameType | None) -> None:
        self.signals += 1
        started = set(self._own.children()) - self._others
        for process in started:
            process.send_signal(signal.SIGTERM if self.signals == 1 else signal.SIGKILL)
        if not started:
            raise Interrupted


def _reason(codes: Mapping[int, int], count: int) -> BaseException:
    """Why the processes ended: exit codes by rank, those that ended first first."""
    killed = [(rank, code) for rank, code in codes.items() if code < 0]
    rank, code = killed[0] if killed else next(iter(codes.items()))
    if code == INTERRUPTED:
        return Interrupted()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return ValueError(
        f"train: process {rank} of {count} {how}{hint}, and the others were ended; finished work is kept, run the same "
        "command again to go on"
    )
