"""Resumable work outside DVC's outs (which DVC deletes before a stage runs).

A unit of work is kept under a key that hashes everything that determines it, so a changed parameter is a new key and
nothing stale can be reused. Deleting the store costs recomputation and nothing else. One writer at a time per stage.
"""

import errno
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

from safetensors import SafetensorError

from eagle3.console import say
from eagle3.digests import digest_bytes

LOCK = "lock"


def work_root() -> Path:
    """$EAGLE3_WORK_DIR, else .work in DVC's main repository, else .work in the current folder."""
    explicit = os.environ.get("EAGLE3_WORK_DIR")
    return Path(explicit) if explicit else Path(os.environ.get("DVC_ROOT", ".")).absolute() / ".work"


def in_own_folder() -> bool:
    """Whether this is an experiment that DVC runs in a folder of its own (`--temp`, `--queue`), beside others."""
    root = os.environ.get("DVC_ROOT")
    return root is not None and Path.cwd().is_relative_to(Path(root).resolve() / ".dvc" / "tmp")


@contextmanager
def work_folder(name: str) -> Iterator[Path]:
    """A folder of the work store, of a stage or of a run of it, locked for one writer.

    When another process holds it: an experiment in a folder of its own waits, so that the workers of a queue take
    turns; elsewhere it raises ValueError, because whoever sits there had better know.
    """
    folder = work_root() / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "?"
            if not in_own_folder():
                raise ValueError(
                    f"{folder} is in use by process {holder}; wait for it or end it, then run again"
                ) from None
            say(f"{folder} is in use by process {holder}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield folder


@contextmanager
def run_folder(stage: str, key: str) -> Iterator[Path]:
    """The folder of one run of a stage, locked, for runs of which several may go on at a time.

    Runs whose outs are in the same place, the project's, have the stage's lock too.
    """
    with nullcontext() if in_own_folder() else work_folder(stage), work_folder(f"{stage}/{key}") as folder:
        yield folder


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Whatever a library raises when it cannot write, as an OSError that names `path` (a full disk names no file)."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
    except sqlite3.Error as error:
        code = errno.ENOSPC if error.sqlite_errorcode == sqlite3.SQLITE_FULL else errno.EIO
        raise OSError(code, str(error), str(path)) from error
    except SafetensorError as error:
        if "I/O error" not in str(error) and "IoError" not in str(error):
            raise
        code = errno.ENOSPC if "No space left" in str(error) else errno.EIO
        raise OSError(code, str(error), str(path)) from error


class RowStore:
    """Small units (a row's result) in one SQLite file: key -> bytes, with a checksum; a damaged one reads as absent.

    A unit survives the death of this process from the moment that `put` returns, and a power cut `sync_every_s` later.
    One process at a time: the file is locked while it is open (and so needs no memory shared between processes, which
    network file systems lack).
    """

    def __init__(self, path: Path, sync_every_s: float = 0.5):
        self._path = path
        self._sync_every_s = sync_every_s
        self._last_sync = time.monotonic()
        self._pending = False
        try:
            self._open()
        except sqlite3.DatabaseError as error:
            kind = error.sqlite_errorcode & 0xFF
            if kind == sqlite3.SQLITE_BUSY:
                raise ValueError(f"{path} is in use by another process") from None
            if kind not in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
                with naming(path):
                    raise
            path.replace(path.with_suffix(".damaged"))
            self._open()

    def _open(self) -> None:
        self._db = sqlite3.connect(self._path, isolation_level=None)
        for setting in (
            "locking_mode = EXCLUSIVE",
            "journal_mode = WAL",
            "synchronous = NORMAL",
            "wal_autocheckpoint = 1000",
        ):
            self._db.execute(f"PRAGMA {setting}")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS units (key TEXT PRIMARY KEY, sha256 TEXT, value BLOB) WITHOUT ROWID"
        )
        self._db.execute("SELECT count(*) FROM (SELECT key FROM units LIMIT 1)").fetchone()

    def get(self, key: str) -> bytes | None:
        """The unit, or None when it is absent or damaged."""
        try:
            row = self._db.execute("SELECT sha256, value FROM units WHERE key = ?", (key,)).fetchone()
        except sqlite3.DatabaseError:
            return None
        return row[1] if row is not None and digest_bytes(row[1]) == row[0] else None

    def put(self, key: str, value: bytes) -> None:
        """Keep a unit."""
        with naming(self._path):
            self._db.execute("INSERT OR REPLACE INTO units VALUES (?, ?, ?)", (key, digest_bytes(value), value))
        self._pending = True
        if time.monotonic() - self._last_sync >= self._sync_every_s:
            self.flush()

    def flush(self) -> None:
        """Make what was put survive a power cut too."""
        if self._pending:
            log = self._path.with_name(self._path.name + "-wal")  # SQLite has everything new in there
            with naming(log), log.open("rb") as file:
                os.fsync(file.fileno())
        self._pending, self._last_sync = False, time.monotonic()

    def __enter__(self) -> "RowStore":
        return self

    def __exit__(self, *_: object) -> None:
        with closing(self._db):
            self.flush()


def write_file(path: Path, data: bytes) -> None:
    """Write aside, fsync, rename: the file is there whole or not at all."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with naming(path), aside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link where the filesystem allows one, else a copy under a temporary name and a rename."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        write_in_pieces(source, target)


def write_in_pieces(source: Path, target: Path, piece: int = 1 << 24) -> None:
    """Copy a file of any size aside, fsync, rename."""
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    with naming(target), source.open("rb") as reader, aside.open("wb") as writer:
        while data := reader.read(piece):
            writer.write(data)
        writer.flush()
        os.fsync(writer.fileno())
    aside.replace(target)
