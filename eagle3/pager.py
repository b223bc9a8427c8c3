"""Long output on a terminal: through a pager when it is more than a screenful. In a pipe the text goes out as it is."""

import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Literal

from eagle3.console import say

Color = Literal["auto", "always", "never"]

DEFAULT_PAGER = "less -R"


def wants_color(choice: Color) -> bool:
    """auto: on a terminal, unless NO_COLOR is set (no-color.org) or the terminal is a dumb one."""
    if choice != "auto":
        return choice == "always"
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def print_paged(blocks: Iterable[str]) -> None:
    """Print blocks of whole lines, through $PAGER where needed. A reader that leaves early ends it quietly.

    blocks: made only as they are wanted; memory holds a screenful of them.
    """
    left = iter(blocks)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        _print(left)
        return
    screen = shutil.get_terminal_size()
    held: list[str] = []
    height = 1  # the prompt of the shell
    for block in left:
        held.append(block)
        height += sum(len(line) // screen.columns + 1 for line in block.splitlines())
        if height > screen.lines:
            _page(itertools.chain(held, left))
            return
    _print(iter(held))


def _print(blocks: Iterator[str]) -> None:
    try:
        for block in blocks:
            sys.stdout.write(block)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends


def _page(blocks: Iterator[str]) -> None:
    command = os.environ.get("PAGER") or DEFAULT_PAGER
    environment = {**os.environ, "LESS": f"{os.environ.get('LESS', '')} -R".strip()}  # colours, and no other escapes
    try:
        pager = subprocess.Popen(
            shlex.split(command), stdin=subprocess.PIPE, text=True, encoding="utf-8", env=environment
        )
    except (OSError, ValueError) as error:
        say(f"the pager {command} does not start ({error}); set PAGER to another one")
        _print(blocks)
        return
    assert pager.stdin is not None
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the pager
    try:
        with pager.stdin:
            for block in blocks:
                pager.stdin.write(block)
    except BrokenPipeError:
        pass  # left early
    finally:
        pager.wait()
        signal.signal(signal.SIGINT, before)
