"""What a person sees: progress, warnings, errors without stack traces. Foreign text is escaped on its way here."""

import errno
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

AGAIN = "and run the same command again: finished work is kept"
REMEDIES = {
    errno.ENOSPC: f"free some room there {AGAIN}",
    errno.EDQUOT: f"free some room there {AGAIN}",
    errno.EROFS: f"make it writable, or set EAGLE3_WORK_DIR where it is the work store, {AGAIN}",
    errno.EACCES: f"give this user access to it, or set EAGLE3_WORK_DIR where it is the work store, {AGAIN}",
}


class Interrupted(BaseException):
    """SIGTERM arrived. Not an Exception, so that it unwinds like Ctrl-C and `finally` blocks run."""


def visible(text: str, limit: int = 200) -> str:
    """Foreign text made safe for a terminal: control characters and escapes spelled out, long text cut."""
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text[:limit]
    )
    return shown + ("..." if len(text) > limit else "")


def say(message: str) -> None:
    """One line of news on standard error."""
    tqdm.write(message, file=sys.stderr)
    sys.stderr.flush()


class Progress:
    """A bar on a terminal; elsewhere a line at most every `every_s` seconds, and one at the end."""

    def __init__(self, label: str, total: int, unit: str, done: int = 0, every_s: float = 10):
        self.label, self.total, self.unit, self.done = label, total, unit, done
        self._first, self._started, self._every_s, self._note = done, time.monotonic(), every_s, ""
        self._last_line = self._started
        self._bar = (
            tqdm(total=total, initial=done, desc=label, unit=f" {unit}", dynamic_ncols=True, smoothing=0.05)
            if sys.stderr.isatty()
            else None
        )

    def advance(self, count: int = 1, note: str = "") -> None:
        """Count `count` more units; `note` is a short text shown behind the numbers."""
        self.done += count
        self._note = note or self._note
        if self._bar is not None:
            self._bar.set_postfix_str(self._note, refresh=False)
            self._bar.update(count)
        elif time.monotonic() - self._last_line >= self._every_s:
            self._line()

    def _line(self) -> None:
        self._last_line = time.monotonic()
        seconds = max(self._last_line - self._started, 1e-9)
        rate = (self.done - self._first) / seconds
        left = f", {_clock((self.total - self.done) / rate)} left" if rate > 0 and self.done < self.total else ""
        note = f", {self._note}" if self._note else ""
        say(f"{self.label}: {self.done:,} of {self.total:,} {self.unit}, {rate:,.1f} per s{left}{note}")

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        else:
            self._line()


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Note under `name` how many seconds the block took."""
    started = time.monotonic()
    yield
    seconds[name] = time.monotonic() - started


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """The command with its errors made readable: ValueError and OSError become one line and exit 1, an interruption
    exit 130. Set EAGLE3_TRACEBACK to see where an error came from."""

    @functools.wraps(command)
    def wrapped(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except (ValueError, OSError) as error:
            if os.environ.get("EAGLE3_TRACEBACK"):
                raise
            remedy = REMEDIES.get(error.errno or 0) if isinstance(error, OSError) else None
            say(f"error: {error}" + (f"; {remedy}" if remedy else ""))
            sys.exit(1)
        except (KeyboardInterrupt, Interrupted):
            say("interrupted; finished work is kept, run the same command again to go on")
            sys.exit(130)

    return wrapped


def interrupt(*_: object) -> None:
    """Handler of SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Interrupted
