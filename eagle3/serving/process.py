"""A child process that runs an engine: its output in a log file, a pipe to talk to it, and an end that is certain.

The child never outlives its parent, and an error always names the log and quotes its last lines. Engines run in a
child so that a crash, a hang or a leak of theirs ends in one sentence instead of taking the stage along.
"""

import contextlib
import ctypes
import importlib
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

from eagle3.console import visible

GRACE_S = 10
HANDOVER_S = 120  # for a child's interpreter to start and take its arguments
TAIL_BYTES = 1 << 16
PR_SET_PDEATHSIG = 1
CACHE_HINT = "engine.cpu_kv_cache_gib sets the size of the cache on a CPU, engine.gpu_memory_utilization on a GPU"
PROJECT = Path(__file__).parents[2]


class ParentPipe:
    """The child's end of the pipe: whole Python values, to and from the process that started it."""

    def __init__(self, connection: Connection):
        self._connection = connection

    def send(self, message: Any) -> None:
        """Send a message to EngineProcess.receive."""
        self._connection.send(("message", message))

    def fail(self, reason: str) -> None:
        """Make the parent's next receive raise ValueError with this reason."""
        self._connection.send(("error", reason))

    def waits(self, timeout_s: float = 0) -> bool:
        """Whether a message is there, after at most `timeout_s`."""
        return self._connection.poll(timeout_s)

    def receive(self) -> Any:
        """The next message of the parent; waits for it. Ends the process when the parent has closed the pipe."""
        try:
            return self._connection.recv()
        except (EOFError, ConnectionError):
            raise SystemExit(0) from None


#: Runs in the child: called with a ParentPipe, then the arguments.
Target = Callable[..., None]


class EngineProcess:
    """`with EngineProcess(target, arguments, environment, log_path, label) as process:` it ends with the block.

    target: a function of a module, or "module:function" where the parent had better not import that module. It is
        called with a ParentPipe and the arguments. Whatever it raises reaches the parent as a ValueError.
    environment: variables to add to the parent's; they hold before the first import.
    advice: what to do after a failure; ends every error.
    """

    def __init__(
        self,
        target: Target | str,
        arguments: tuple[Any, ...],
        environment: Mapping[str, str],
        log_path: Path,
        label: str,
        advice: str = "",
    ):
        self.log_path, self.label, self.advice = log_path, label, advice
        self._target = target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"
        self._arguments, self._environment = arguments, environment
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "EngineProcess":
        ours, theirs = socket.socketpair()
        self._pipe = Connection(ours.detach())
        with theirs:
            self._process = start_child(
                ["eagle3.serving.process", str(theirs.fileno()), str(os.getpid())],
                {**os.environ, **self._environment},
                self.log_path,
                pass_fds=[theirs.fileno()],
            )
        try:
            self.send((self._target, self._arguments), HANDOVER_S)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def fileno(self) -> int:
        """The pipe's descriptor, for a selector."""
        return self._pipe.fileno()

    def send(self, message: Any, timeout_s: float) -> None:
        """Send a message to the target. Raises ValueError when the child is gone, or takes nothing for `timeout_s`."""
        with socket.socket(fileno=os.dup(self._pipe.fileno())) as ours:
            limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            self._pipe.send(message)
        except BlockingIOError:
            raise self.stalled(timeout_s) from None
        except OSError:
            self.receive(0)  # the error that it died of, if it told
            raise self._failure("ended unexpectedly") from None

    def receive(self, timeout_s: float) -> Any:
        """The next message of the target. Raises ValueError on its error, its end, or `timeout_s` of silence."""
        try:
            if not self._pipe.poll(timeout_s):
                raise self._failure(f"gave no answer for {timeout_s:g} s")
            kind, message = self._pipe.recv()
        except (EOFError, OSError):
            raise self._failure("ended unexpectedly") from None
        if kind == "error":
            hint = f" ({CACHE_HINT})" if re.search("KV cache|cache blocks", message) else ""
            raise self._failure(f"failed: {message}{hint}", quote=False)
        return message

    def stalled(self, timeout_s: float) -> ValueError:
        """The error for a caller whose own watchdog saw no progress for `timeout_s`."""
        return self._failure(f"made no progress for {timeout_s:g} s")

    def stop(self) -> None:
        """End the child and all of its own children: terminate, then kill after a grace time."""
        if self._process is None:
            return
        self._pipe.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            signal_group(self._process.pid, number)
            try:
                self._process.wait(GRACE_S)
                break
            except subprocess.TimeoutExpired:
                continue
        signal_group(self._process.pid, signal.SIGKILL)

    def _failure(self, what: str, quote: bool = True) -> ValueError:
        assert self._process is not None
        try:
            code = self._process.wait(1 if "ended" in what else 0)
            ended = f" (killed by {signal.Signals(-code).name})" if code < 0 else f" (exit code {code})"
            if code == -signal.SIGKILL:
                ended += ", as the system does when memory runs out"
        except subprocess.TimeoutExpired:
            ended = ""
        said = last_words(self.log_path) if quote else ""
        told = [
            f"{self.label}: {what}{ended}",
            f"log: {self.log_path}",
            f"it ends: {said}" if said else "",
            self.advice,
        ]
        return ValueError("; ".join(filter(None, told)))


def start_child(
    words: Sequence[str], environment: Mapping[str, str], log_path: Path, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a module of ours (name and arguments in `words`) in a process group of its own, its output in `log_path`.

    environment: all of its variables; this project is put first on its module path.
    """
    paths = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
            pass_fds=pass_fds,
            start_new_session=True,  # Ctrl-C reaches only the parent, which ends the whole group
        )


def signal_group(group: int, number: int) -> None:
    """Signal a process group that may be gone already."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def last_words(log_path: Path, lines: int = 3) -> str:
    """The last lines of a log that say something: error lines if there are any near its end. Escaped, on one line."""
    try:
        with log_path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    told = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in text.splitlines()]
    told = [line for line in told if len(line) > 3]
    errors = [line for line in told if re.search(r"\b\w*(Error|Exception|Killed|out of memory)\b", line)]
    return " | ".join(visible(line) for line in (errors or told)[-lines:])


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _terminated(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(0)


def _run(descriptor: int, parent: int) -> None:
    """The child: receive the target and its arguments, call it, report what it raises."""
    _die_with_parent(parent)
    signal.signal(signal.SIGTERM, _terminated)
    pipe = ParentPipe(Connection(descriptor))
    name, arguments = pipe.receive()
    module, function = name.split(":")
    try:
        target: Target = vars(importlib.import_module(module))[function]
        target(pipe, *arguments)
    except Exception as error:
        traceback.print_exc()
        told = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        pipe.fail(" ".join(told.split())[:2000])
        sys.exit(1)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is on its way out


if __name__ == "__main__":
    _run(int(sys.argv[1]), int(sys.argv[2]))
