"""What DVC tracks: outs and their files, where its cache keeps them, what a remote holds. Only this file imports dvc.

An object is one file in DVC's cache or on a remote, named by its MD5; the listing of a folder is an object too, whose
name ends in `.dir`.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from dvc.exceptions import NotDvcRepoError
from dvc.repo import Repo
from dvc.scm import resolve_rev

from eagle3.console import visible

DIR = ".dir"
READERS = 8  # objects of a remote that are read at a time
PIECE = 1 << 22
_MD5 = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Out:
    """An out that dvc.lock (or a .dvc file) records. size: bytes of all its files."""

    path: Path  # relative to the current folder where it lies below it
    stage: str
    object: str
    size: int | None
    remote: str | None  # the remote that dvc.yaml names for this out alone
    pushed: bool  # belongs on a remote

    @property
    def is_folder(self) -> bool:
        return self.object.endswith(DIR)


@dataclass(frozen=True)
class OutFile:
    """One file of an out, or the listing of a folder out (its path is then the folder's)."""

    out: Out
    path: Path
    object: str
    cached: Path  # where DVC's cache keeps it, if it does

    @property
    def is_listing(self) -> bool:
        return self.object.endswith(DIR)


class Tracked:
    """DVC's view of the repository around the current folder."""

    def __init__(self, repo: Any):
        self._repo = repo
        self._cache = repo.cache.local

    def outs(self) -> list[Out]:
        """Every out that was made and that DVC keeps in its cache. Raises ValueError for a damaged dvc.yaml or lock."""
        with _plain_errors("dvc.lock"):
            outs = [out for out in self._repo.index.outs if out.use_cache and out.hash_info]
            return [
                Out(
                    _near(Path(out.fs_path)),
                    out.stage.addressing,
                    out.hash_info.value,
                    out.meta.size if out.meta else None,
                    out.remote,
                    bool(out.can_push and not out.stage.is_repo_import),
                )
                for out in outs
            ]

    @property
    def cache_folder(self) -> Path:
        """DVC's cache, there or not."""
        return Path(self._cache.path)

    @property
    def cache_types(self) -> tuple[str, ...]:
        """How DVC links outs to its cache, first choice first: `cache.type` of its configuration."""
        return tuple(self._cache.cache_types)

    def cached(self, name: str) -> Path:
        """Where the cache keeps an object, there or not."""
        return _near(Path(self._cache.oid_to_path(name)))

    def files(self, out: Out, listing: bytes | None = None) -> list[OutFile]:
        """The files of an out. listing: of a folder out, where it comes from elsewhere than the cache.

        Raises ValueError when the listing is absent or damaged, or names paths that lead out of the folder.
        """
        if not out.is_folder:
            return [OutFile(out, out.path, out.object, self.cached(out.object))]
        entries = _parse_listing(self._listing(out) if listing is None else listing)
        return [OutFile(out, out.path / name, md5, self.cached(md5)) for name, md5 in entries]

    def _listing(self, out: Out) -> bytes:
        path = self.cached(out.object)
        try:
            text = path.read_bytes()
        except OSError as error:
            raise ValueError(f"its listing {path} is not in DVC's cache ({error.strerror})") from None
        _check_object(text, out.object, f"its listing {path}")
        return text

    def commit_of(self, revision: str) -> str:
        """The commit of a git revision or of an experiment. Raises ValueError when there is none of this name."""
        with _plain_errors(f"revision {visible(revision)}"):
            return str(resolve_rev(self._repo.scm, revision))

    def committed(self, commit: str, name: str) -> bytes | None:
        """A file of the project that git keeps, as it was in a commit; None where that has none of this name."""
        with _plain_errors(f"commit {commit}"):
            project = self._repo.fs.relparts(self._repo.root_dir, self._repo.scm.root_dir)
            parts = [part for part in project if part != "."]
            files = self._repo.scm.get_fs(commit)
            try:
                with files.open("/".join([*parts, name]), "rb") as file:
                    return bytes(file.read())
            except FileNotFoundError:
                return None

    def remote(self, name: str | None) -> "Remote":
        """A configured remote. Raises ValueError when there is none of this name, or its plug-in is missing."""
        with _plain_errors(f"remote {name or 'by default'}"):
            odb = self._repo.cloud.get_remote_odb(name or None, command="push")
            return Remote(name or str(self._repo.config["core"]["remote"]), odb, self._cache.fs)


class Remote:
    """Objects on a remote."""

    def __init__(self, name: str, odb: Any, local: Any):
        self.name = name
        self._odb, self._local = odb, local

    def sizes(self, names: Sequence[str]) -> dict[str, int]:
        """Bytes of each object that is there; absent ones are left out. Downloads nothing."""
        with _plain_errors(f"remote {self.name}"):
            paths = [self._odb.oid_to_path(name) for name in names]
            found = self._odb.fs.info(paths, return_exceptions=True)
            failed = (entry for entry in found if isinstance(entry, Exception))
            for error in failed:
                if not isinstance(error, FileNotFoundError | NotADirectoryError):
                    raise error
            return {
                name: int(entry["size"])
                for name, entry in zip(names, found, strict=True)
                if not isinstance(entry, Exception)
            }

    def listing(self, out: Out) -> bytes | None:
        """The listing of a folder out, None when it is not there. Raises ValueError when it is damaged."""
        return self.read(out.object, f"its listing {out.object}")

    def read(self, name: str, what: str) -> bytes | None:
        """A small object, None when it is not there. Raises ValueError that calls it `what` when it is damaged."""
        with _plain_errors(f"remote {self.name}"):
            try:
                with self._odb.fs.open(self._odb.oid_to_path(name), "rb") as file:
                    data = bytes(file.read())
            except FileNotFoundError:
                return None
        _check_object(data, name, f"{what} on remote {self.name}")
        return data

    def digests(self, names: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Each object that is there with the MD5 of its bytes, in the order in which they are done. Downloads all."""
        with _plain_errors(f"remote {self.name}"), ThreadPoolExecutor(READERS) as pool:
            try:
                futures = {pool.submit(self._digest, name): name for name in names}
                for future in as_completed(futures):
                    yield futures[future], future.result()
            finally:  # Ctrl-C too
                pool.shutdown(cancel_futures=True)

    def _digest(self, name: str) -> str:
        state = hashlib.md5(usedforsecurity=False)
        with self._odb.fs.open(self._odb.oid_to_path(name), "rb") as file:
            while piece := file.read(PIECE):
                state.update(piece)
        return state.hexdigest()

    def upload(self, files: Iterable[tuple[Path, str]]) -> dict[str, str]:
        """Put files under the names of their objects, over what is there. Returns what went wrong, by object."""
        failed: dict[str, str] = {}
        pairs = list(files)
        if not pairs:
            return failed
        with _plain_errors(f"remote {self.name}"):
            self._odb.add(
                [str(path.absolute()) for path, _ in pairs],
                self._local,
                [name for _, name in pairs],
                check_exists=False,
                verify=False,  # DVC would download each object again to hash it
                on_error=lambda name, error: failed.setdefault(name, _one_line(error)),
            )
        return failed


def open_tracked() -> Tracked | None:
    """DVC's repository around the current folder, None where there is none."""
    try:
        with _plain_errors("DVC"):
            return Tracked(Repo())
    except NoRepositoryError:
        return None


class NoRepositoryError(ValueError):
    """The current folder lies in no DVC repository."""


@contextmanager
def _plain_errors(what: str) -> Iterator[None]:
    """Whatever DVC and the clients of remotes raise (they share no base class), as a ValueError of one line."""
    try:
        yield
    except NotDvcRepoError as error:
        raise NoRepositoryError(str(error)) from None
    except Exception as error:
        raise ValueError(f"{what}: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    """The error and what it came from, on one line."""
    told: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(told) < 3:
        text = " ".join(str(cause).split()) or type(cause).__name__
        if isinstance(cause, OSError) and cause.strerror and cause.strerror not in text:
            text = f"{text} ({cause.strerror})"
        if not any(text in earlier for earlier in told):
            told.append(text)
        cause = cause.__cause__
    return visible(": ".join(told), 500)


def _check_object(text: bytes, name: str, what: str) -> None:
    if hashlib.md5(text, usedforsecurity=False).hexdigest() != name.removesuffix(DIR):
        raise ValueError(f"{what} is damaged: it differs from its name")


def _parse_listing(text: bytes) -> list[tuple[str, str]]:
    """(name inside the folder, object) of each entry."""
    try:
        found = [(str(entry["relpath"]), str(entry["md5"])) for entry in json.loads(text)]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"its listing is none of DVC's: {error!r}") from None
    for name, md5 in found:
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or name.startswith("/") or "\0" in name or not _MD5.fullmatch(md5):
            raise ValueError(f"its listing names {visible(name)} ({visible(md5)}), which is refused")
    return found


def _near(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
