"""The project as it was in a git revision or an experiment: files that git keeps, outs from DVC's cache or remote.

Nothing is checked out. Large files are looked for in the cache alone; small ones are read from the remote too.
"""

import re
from pathlib import Path, PurePosixPath

from eagle3.origin import LOCK, lock_entries, read_lock
from eagle3.tracked import DIR, Out, OutFile, Tracked

OBJECT = re.compile(r"[0-9a-f]{32}(\.dir)?")


class Revision:
    """A revision. Raises ValueError when there is none of this name, or it has no dvc.lock."""

    def __init__(self, tracked: Tracked, name: str):
        self._tracked = tracked
        self.commit = tracked.commit_of(name)
        lock = self.text(str(LOCK))
        if lock is None:
            raise ValueError(f"revision {name} has no {LOCK}: nothing was made there")
        self.stages = read_lock(lock)
        self._files: dict[str, dict[PurePosixPath, OutFile]] = {}

    def text(self, name: str) -> str | None:
        """A file that git keeps; None where there is none."""
        data = self._tracked.committed(self.commit, name)
        return None if data is None else data.decode(errors="replace")

    def file(self, name: str) -> Path | None:
        """Where DVC's cache has a file of an out; None where it has not."""
        found = self._member(name)
        return found.cached if found is not None and found.cached.is_file() else None

    def read(self, name: str) -> bytes:
        """A small file of an out, from the cache or the remote. Raises ValueError when neither has it."""
        member = self._member(name)
        if member is None:
            raise ValueError(f"commit {self.commit[:12]} has no {name}")
        data = member.cached.read_bytes() if member.cached.is_file() else None
        if data is None:
            data = self._tracked.remote(member.out.remote).read(member.object, name)
        if data is None:
            raise ValueError(f"{name} of commit {self.commit[:12]} is neither in DVC's cache nor on the remote")
        return data

    def out(self, name: str) -> Out | None:
        """The out that a path is or lies in, as dvc.lock has it."""
        for stage, entry in self.stages.items():
            for path, md5 in lock_entries(entry, "outs").items():
                if PurePosixPath(name).is_relative_to(path) and OBJECT.fullmatch(md5):
                    return Out(Path(path), stage, md5, None, None, True)
        return None

    def _member(self, name: str) -> OutFile | None:
        out = self.out(name)
        if out is None:
            return None
        if out.object not in self._files:
            listing = None
            if out.object.endswith(DIR) and not self._tracked.cached(out.object).is_file():
                listing = self._tracked.remote(out.remote).listing(out)
            files = self._tracked.files(out, listing)
            self._files[out.object] = {PurePosixPath(file.path): file for file in files}
        return self._files[out.object].get(PurePosixPath(name))
