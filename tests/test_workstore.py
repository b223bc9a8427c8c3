"""Work survives kill -9, damage is noticed, one writer at a time."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from eagle3.workstore import RowStore, link_or_copy, run_folder, work_folder, work_root, write_file

ROOT = Path(__file__).parent.parent

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


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `dvc exp run --temp`: DVC runs the stage in a folder of its own."""
    folder = tmp_path / "main/.dvc/tmp/exps/tmp1"
    folder.mkdir(parents=True)
    monkeypatch.setenv("DVC_ROOT", str(tmp_path / "main"))
    monkeypatch.chdir(folder)


@contextmanager
def held(name: str, seconds: float) -> "Iterator[subprocess.Popen[str]]":
    """Another process that holds a folder of the work store for so long."""
    code = (
        f"from eagle3.workstore import work_folder\nimport time\nwith work_folder({name!r}):\n"
        f" print('held', flush=True)\n time.sleep({seconds})"
    )
    environment = {name: value for name, value in os.environ.items() if name != "DVC_ROOT"}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(process.stdout)
        yield process
        process.kill()


@pytest.mark.usefixtures("own_folder")
def test_experiments_in_folders_of_their_own_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    with held("extract", 1) as holder:
        start = time.monotonic()
        with work_folder("extract"):
            assert time.monotonic() - start > 0.5
            assert holder.wait() == 0
    assert f"is in use by process {holder.pid}; waiting for it" in capsys.readouterr().err


@pytest.mark.usefixtures("own_folder")
def test_two_runs_of_a_stage_go_on_side_by_side_if_their_outs_are_apart() -> None:
    with held("train/one", 60), run_folder("train", "two") as folder:
        assert folder == work_root() / "train/two"


def test_two_runs_of_a_stage_in_one_place_do_not() -> None:
    with run_folder("train", "one"), pytest.raises(ValueError, match="in use"), run_folder("train", "two"):
        pass
    with held("train/one", 60), pytest.raises(ValueError, match="in use"), run_folder("train", "one"):
        pass
