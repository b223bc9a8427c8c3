"""What a person sees: escaped text, log lines without a terminal, one-line errors, interruptions that keep work."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3.console import Progress, visible
from tests.terminal import on_terminal

SCRIPT = """
import errno
import os
import time
from pathlib import Path
from eagle3.console import Progress
from eagle3.stage import run_stage
def work(what: Path) -> None:
    "Does WHAT is named."
    if str(what) == "mistake":
        raise ValueError("row 7 of x.jsonl: no such thing")
    if str(what) == "bug":
        raise KeyError("inner")
    if str(what) in ("ENOSPC", "EROFS", "EACCES"):
        number = getattr(errno, str(what))
        raise OSError(number, os.strerror(number), "/place")
    with Progress("work", 50, "rows", every_s=0.2) as progress:
        for _ in range(50):
            time.sleep(0.05)
            progress.advance()
run_stage(work)
"""


def run(what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", SCRIPT, what], capture_output=True, text=True, check=False)


def test_foreign_text_is_escaped_and_cut() -> None:
    assert visible("a\x1b[31mb\nc\u202e\ud800") == "a\\x1b[31mb\\nc\\u202e\\ud800"
    assert visible("x" * 300) == "x" * 200 + "..."


def test_a_users_mistake_is_one_line() -> None:
    shown = run("mistake")
    assert (shown.returncode, shown.stderr) == (1, "error: row 7 of x.jsonl: no such thing\n")


@pytest.mark.parametrize(
    ("what", "remedy"),
    [
        ("ENOSPC", "No space left on device: '/place'; free some room there and run"),
        (
            "EROFS",
            "Read-only file system: '/place'; make it writable, or set EAGLE3_WORK_DIR where it is the work store",
        ),
        ("EACCES", "Permission denied: '/place'; give this user access to it, or set EAGLE3_WORK_DIR where it is"),
    ],
)
def test_what_the_disk_refuses_is_one_line_with_a_remedy(what: str, remedy: str) -> None:
    shown = run(what)
    assert shown.returncode == 1
    [line] = shown.stderr.splitlines()
    assert remedy in line and line.endswith("run the same command again: finished work is kept")


def test_a_bug_keeps_its_trace() -> None:
    shown = run("bug")
    assert shown.returncode != 0
    assert "KeyError" in shown.stderr


def test_without_a_terminal_progress_is_log_lines() -> None:
    lines = run("fine").stderr.splitlines()
    assert 3 <= len(lines) <= 20
    assert lines[-1].startswith("work: 50 of 50 rows, ")
    assert "left" in lines[0]
    assert not any("\r" in line for line in lines)


def test_on_a_terminal_progress_is_a_bar() -> None:
    shown = on_terminal([sys.executable, "-c", SCRIPT, "fine"])
    assert "\r" in shown
    assert "50/50" in shown, shown[-400:]


def test_interruptions_end_with_130_and_no_trace() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen([sys.executable, "-c", SCRIPT, "fine"], stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        process.stderr.readline()
        process.send_signal(number)
        rest = process.stderr.read()
        assert process.wait() == 130
        assert "finished work is kept" in rest
        assert "Traceback" not in rest


def test_progress_counts_resumed_work(capsys: object) -> None:
    with Progress("x", 10, "rows", done=7) as progress:
        progress.advance(3)
        assert progress.done == 10


def test_help_names_the_arguments(tmp_path: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "stages.generate", "--help"], capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0
    assert "responses" in shown.stdout.lower(), shown.stdout
