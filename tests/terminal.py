"""What a program shows on a terminal."""

import fcntl
import os
import pty
import struct
import subprocess
import termios
from typing import Any


def on_terminal(command: list[str], **popen: Any) -> str:
    """All that a command prints to a terminal of 24 rows and 80 columns, its only input and output; it must succeed."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, **popen)
    os.close(child)
    shown = b""
    try:
        while piece := os.read(parent, 4096):
            shown += piece
    except OSError:
        pass  # the terminal is gone when the process ends
    os.close(parent)
    assert process.wait() == 0, shown
    return shown.decode()
