"""Work survives kill -9, damage is noticed, one writer at a time."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle3.workstore import RowStore, link_or_copy, work_folder, work_root, write_file

WRITER = """
import sys, time
from pathlib import Path
from eagle3.workstore import RowStore
with RowStore(Path(sys.argv[1]), sync_every_s=60) as store:
    for number in range(10_000):
        store.put(str(number), b"x" * 1000)
        print(number, flush=True)
        time.sleep(0.001)
"""


def test_rows_put_before_a_kill_are_there(tmp_path: Path) -> None:
    path = tmp_path / "rows.sqlite"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    seen = [int(next(process.stdout)) for _ in range(50)]
    process.send_signal(signal.SIGKILL)
    process.wait()
    with RowStore(path) as store:
        assert all(store.get(str(key)) is not None for key in seen)
        assert store.get("9999") is None


def test_a_changed_byte_reads_as_absent(tmp_path: Path) -> None:
    path = tmp_path / "rows.sqlite"
    with RowStore(path) as store:
        store.put("a", b"needle-value")
        store.put("b", b"other")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"needle-value", b"needle-VALUE"))
    with RowStore(path) as store:
        assert store.get("a") is None
        assert store.get("b") == b"other"
        store.put("a", b"again")
        assert store.get("a") == b"again"


def test_a_file_that_is_no_database_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "rows.sqlite"
    path.write_bytes(b"nonsense" * 1000)
    with RowStore(path) as store:
        assert store.get("a") is None
        store.put("a", b"1")
    assert (tmp_path / "rows.damaged").exists()


def test_a_second_writer_is_refused_and_told_who_holds_the_folder() -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", "from eagle3.workstore import work_folder\nimport time\n"
         "with work_folder('generate'):\n print('held', flush=True)\n time.sleep(60)"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout is not None
    next(holder.stdout)
    with pytest.raises(ValueError, match=f"process {holder.pid}"), work_folder("generate"):
        pass
    holder.kill()
    holder.wait()
    with work_folder("generate") as folder:
        assert folder.is_dir()


def test_the_number_in_a_lock_file_holds_nothing() -> None:
    """A process of another program may have the number by now; and after a restart of the machine it surely may."""
    for number in (os.getppid(), 1, os.getpid()):
        with work_folder("generate") as folder:
            pass
        (folder / "lock").write_text(str(number))
        with work_folder("generate"):
            assert (folder / "lock").read_text() == str(os.getpid())


def test_the_root_is_the_main_repository_even_in_an_experiment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EAGLE3_WORK_DIR")
    monkeypatch.setenv("DVC_ROOT", str(tmp_path / "main"))
    assert work_root() == tmp_path / "main" / ".work"


def test_files_appear_whole_and_leave_nothing_aside(tmp_path: Path) -> None:
    write_file(tmp_path / "a", b"one")
    write_file(tmp_path / "a", b"two")
    link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"two"
    assert (tmp_path / "b").stat().st_ino == (tmp_path / "a").stat().st_ino
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_waiting_for_the_lock_ends() -> None:
    with work_folder("x"):
        start = time.monotonic()
        with pytest.raises(ValueError, match="in use"), work_folder("x", wait_s=0.5):
            pass
        assert 0.4 < time.monotonic() - start < 5
