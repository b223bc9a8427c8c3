"""Runs a command whose whole process group ends with the process that asked for it, even when that one is killed.

python -m eagle3.serving.guard PARENT_PID COMMAND... in a session of its own. vLLM's server starts an engine process
that would otherwise outlive a killed parent, and keep its memory.
"""

import ctypes
import os
import signal
import subprocess
import sys
from types import FrameType

PR_SET_PDEATHSIG = 1


def _end_group(_number: int, _frame: FrameType | None) -> None:
    os.killpg(0, signal.SIGKILL)


def _run(parent: int, command: list[str]) -> int:
    signal.signal(signal.SIGUSR1, _end_group)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0)
    if os.getppid() != parent:
        _end_group(0, None)
    child = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # meant for the child, which has it too
    code = child.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(_run(int(sys.argv[1]), sys.argv[2:]))
