"""Is everything on the remote that dvc.lock implies, whole? Sizes are asked for; bytes are read only on request.

`dvc push` does not tell: it succeeds when an object is missing in the cache, and on the remote it looks for the listing
of a folder alone. What the remote lacks can be uploaded again from the cache, once the cache's bytes are checked.
"""

import shlex
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from eagle3.console import Progress, say
from eagle3.tracked import DIR, Out, OutFile, Remote, Tracked
from eagle3.verification import Fault, digest_files


@dataclass
class RemoteFindings:
    """What one remote holds of what it must hold."""

    remote: str
    objects: int = 0
    bytes: int = 0
    uploaded: int = 0
    faults: list[Fault] = field(default_factory=list)


@dataclass(frozen=True)
class _Lack:
    """An object that the remote lacks or has in another size."""

    file: OutFile
    problem: str


def verify_remote(tracked: Tracked, name: str | None, repair: bool, read: bool) -> list[RemoteFindings]:
    """Check the remote of this name, or by default the one that each out belongs to.

    repair: upload what the cache has. read: download every object and compare its bytes with its name.
    Raises ValueError when there is no such remote, it does not answer, or it refuses.
    """
    outs = [out for out in tracked.outs() if out.pushed]
    if not outs:
        raise ValueError("dvc.lock records no out yet; `dvc repro` makes them, `dvc push` takes them to the remote")
    return verify_outs(tracked, outs, name, repair, read)


def verify_outs(
    tracked: Tracked, outs: Sequence[Out], name: str | None, repair: bool, read: bool
) -> list[RemoteFindings]:
    """The same for these outs, whatever dvc.lock says now."""
    by_remote: defaultdict[str | None, list[Out]] = defaultdict(list)
    for out in outs:
        by_remote[name or out.remote].append(out)
    return [_verify_one(tracked, tracked.remote(asked), own, repair, read) for asked, own in by_remote.items()]


def _verify_one(tracked: Tracked, remote: Remote, outs: Sequence[Out], repair: bool, read: bool) -> RemoteFindings:
    found = RemoteFindings(remote.name)
    contents: dict[Out, list[OutFile]] = {}
    for out in outs:
        try:
            contents[out] = _contents(tracked, remote, out)
        except ValueError as error:
            found.faults.append(Fault(out.path, str(error), f"`dvc repro {out.stage}`, then `dvc push`"))
    objects = {file.object for files in contents.values() for file in files}
    say(f"remote {remote.name}: asking for {len(objects):,} objects")
    sizes = remote.sizes(sorted(objects))
    lacking = _lacking(contents, sizes)
    if read:
        lacking |= _damaged(remote, contents, {name: size for name, size in sizes.items() if name not in lacking})
    if repair and lacking:
        lacking = _repair(remote, lacking, found)
    found.objects, found.bytes = len(objects), sum(sizes.values())
    found.faults += [Fault(lack.file.path, lack.problem, _remedy(lack.file)) for lack in lacking.values()]
    found.faults.sort(key=lambda fault: str(fault.path))
    return found


def _contents(tracked: Tracked, remote: Remote, out: Out) -> list[OutFile]:
    """The listing of a folder out and its files, or the one file. Raises ValueError when there is no whole listing."""
    if not out.is_folder:
        return tracked.files(out)
    itself = OutFile(out, out.path, out.object, tracked.cached(out.object))
    try:
        return [itself, *tracked.files(out)]
    except ValueError as error:
        listing = remote.listing(out)
        if listing is None:
            raise ValueError(f"{error}, nor on remote {remote.name}") from None
        return [itself, *tracked.files(out, listing)]


def _lacking(contents: dict[Out, list[OutFile]], sizes: dict[str, int]) -> dict[str, _Lack]:
    """What the remote lacks, by object. sizes: of the objects that are there."""
    lacking: dict[str, _Lack] = {}
    for out, files in contents.items():
        members = [file for file in files if not file.is_listing]
        total = sum(sizes.get(file.object, 0) for file in members)
        agrees = total == out.size  # with dvc.lock; a size that the cache disputes is then the cache's fault
        for file in files:
            size, wanted = sizes.get(file.object), _size_of(file)
            if size is None:
                lacking.setdefault(file.object, _Lack(file, f"object {file.object} is missing"))
            elif wanted not in (None, size) and not (agrees and not file.is_listing):
                problem = f"object {file.object} has {size:,} bytes instead of {wanted:,}"
                lacking.setdefault(file.object, _Lack(file, problem))
        if out.size is not None and not agrees and not any(file.object in lacking for file in files):
            problem = f"its objects have {total:,} bytes in all, dvc.lock says {out.size:,}"
            lacking.setdefault(out.object, _Lack(files[0], problem))
    return lacking


def _damaged(remote: Remote, contents: dict[Out, list[OutFile]], sizes: dict[str, int]) -> dict[str, _Lack]:
    """What has the right size and other bytes, by object. sizes: of the objects to read."""
    files = {file.object: file for files in contents.values() for file in files}
    damaged: dict[str, _Lack] = {}
    with Progress(f"reading remote {remote.name}", sum(sizes.values()), "bytes") as progress:
        for name, digest in remote.digests(list(sizes)):
            progress.advance(sizes[name])
            if digest != name.removesuffix(DIR):
                damaged[name] = _Lack(files[name], f"object {name} is damaged: its bytes differ from its name")
    return damaged


def _size_of(file: OutFile) -> int | None:
    """Bytes that an object must have: dvc.lock's for a file, the cache's for what belongs to a folder."""
    if not file.out.is_folder and file.out.size is not None:
        return file.out.size
    try:
        return file.cached.stat().st_size
    except OSError:
        return None


def _repair(remote: Remote, lacking: dict[str, _Lack], found: RemoteFindings) -> dict[str, _Lack]:
    """Upload what the cache has whole; returns what is still lacking.

    Listings go last, and only when all that they name is there: DVC takes a listing on the remote as proof of the rest.
    """
    left = dict(lacking)
    for listings in (False, True):
        incomplete = {lack.file.out for lack in left.values() if not lack.file.is_listing}
        turn = [lack for lack in left.values() if lack.file.is_listing == listings and lack.file.cached.exists()]
        ready = []
        for lack, whole in _judge(turn):
            if not whole:
                left[lack.file.object] = _Lack(lack.file, f"{lack.problem}, and the cache's copy is damaged")
            elif not (listings and lack.file.out in incomplete):
                ready.append((lack.file.cached, lack.file.object))
        failed = remote.upload(ready)
        there = remote.sizes([name for _, name in ready])
        for path, name in ready:
            if name in failed:
                left[name] = _Lack(left[name].file, f"{left[name].problem}, and the upload failed: {failed[name]}")
            elif there.get(name) == path.stat().st_size:
                del left[name]
                found.uploaded += 1
    return left


def _judge(lacks: Sequence[_Lack]) -> Iterator[tuple[_Lack, bool]]:
    """Each with whether the cache's copy is whole."""
    for place, digest in digest_files([(lack.file.cached, "md5") for lack in lacks], "checking the cache"):
        yield lacks[place], digest == lacks[place].file.object.removesuffix(DIR)


def _remedy(file: OutFile) -> str:
    if file.cached.exists():
        return f"`eagle3 verify --remote --repair` uploads it from {shlex.quote(str(file.cached))} if that is whole"
    return f"nor is it in DVC's cache: push from where it is, or `dvc repro {file.out.stage}` and `dvc push`"
