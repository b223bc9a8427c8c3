"""Whether the hidden states fit: where their bytes go, which places share them, what each filesystem has free.

A shard is written once, into the work store. The out and DVC's cache are further names of the same file where the
filesystem and `cache.type` of .dvc/config allow that, and copies elsewhere:

    out      hard links into the work store on one filesystem, else copies
    cache    hard links of the out on one filesystem, if `cache.type` begins with hardlink; else copies
    the out  once more, when DVC has what it needs: linked to the cache by the first of `cache.type` that works there

A reflink is counted as a copy, since few filesystems have them: where they work, less is needed than is said here.
"""

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from eagle3.tracked import Tracked, open_tracked

Storage = Literal["lossless", "fp8"]
WORK, OUT, CACHE = "work store", "out", "DVC's cache"
FILES, HARD_LINKS, SYMLINKS, COPIES = "files", "hard links", "symlinks", "copies"


class Sized(Protocol):
    """A shard that the out must have."""

    @property
    def key(self) -> str:
        """Its content key; the file is named after it."""

    @property
    def size(self) -> int:
        """Bytes of the file."""


@dataclass(frozen=True)
class Volume:
    """Bytes of shards. total: of all; missing: of those the work store lacks; uncached: of those DVC's cache lacks."""

    total: int
    missing: int
    uncached: int


@dataclass(frozen=True)
class Cache:
    """DVC's cache. types: `cache.type`, first choice first."""

    folder: Path
    types: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """One of the places where shards lie. stays: bytes of its own in the end; needs: bytes that it takes on the way.

    device: the filesystem, as st_dev has it.
    """

    name: str
    path: Path
    device: int
    kind: str
    stays: int
    needs: int


@dataclass(frozen=True)
class Filesystem:
    """What one filesystem has to take. free: bytes, those included that DVC frees first by removing the old out."""

    mount: Path
    places: tuple[Place, ...]
    free: int

    @property
    def needs(self) -> int:
        """Bytes."""
        return sum(place.needs for place in self.places)

    @property
    def fits(self) -> bool:
        """Is there room for them."""
        return self.needs <= self.free


def find_cache(tracked: Tracked | None) -> Cache | None:
    """DVC's cache as the repository configures it; None without a repository."""
    return None if tracked is None else Cache(tracked.cache_folder, tracked.cache_types)


def measure_volume(
    plan: Iterable[Sized], missing: Iterable[Sized], tracked: Tracked | None, cache: Cache | None, out: Path
) -> Volume:
    """The bytes of planned shards. Equal shards are one file."""
    sizes = {shard.key: shard.size for shard in plan}
    absent = {shard.key: shard.size for shard in missing}
    cached = set() if tracked is None or cache is None or _cache_is_linked(out, cache) else _cached_keys(tracked, out)
    uncached = sum(size for key, size in sizes.items() if key not in cached)
    return Volume(sum(sizes.values()), sum(absent.values()), uncached)


def lay_out(work: Path, out: Path, cache: Cache | None, volume: Volume) -> list[Place]:
    """Where the bytes of that many shards go. work, out: folders of the work store and of the out, there or not."""
    linked = device_of(work) == device_of(out.parent)
    places = [Place(WORK, work, device_of(work), FILES, volume.total, volume.missing)]
    first = 0 if linked else volume.total  # what the out takes before DVC sees it
    kind, stays, needs = (HARD_LINKS if linked else COPIES), first, first
    if cache is None:
        return [*places, Place(OUT, out, device_of(out.parent), kind, stays, needs)]
    if _cache_is_linked(out, cache):
        own = Place(CACHE, cache.folder, device_of(cache.folder), HARD_LINKS, 0, 0)
    else:
        kind, stays, needs = {
            "hardlink": (HARD_LINKS, 0, first),
            "symlink": (SYMLINKS, 0, first),
            "copy": (COPIES, volume.total, volume.total),
        }[_link_to_cache(out, cache, linked)]
        own = Place(CACHE, cache.folder, device_of(cache.folder), COPIES, volume.total, volume.uncached)
    return [*places, Place(OUT, out, device_of(out.parent), kind, stays, needs), own]


def filesystems(places: Sequence[Place], freed: int) -> list[Filesystem]:
    """The filesystems of the places. freed: bytes that DVC frees at the out before it is made again."""
    found = []
    for device in dict.fromkeys(place.device for place in places):
        here = tuple(place for place in places if place.device == device)
        near = _existing(here[0].path)
        gained = freed if any(place.name == OUT for place in here) else 0
        found.append(Filesystem(_mount_of(near), here, shutil.disk_usage(near).free + gained))
    return found


def shortage(filesystem: Filesystem, storage: Storage) -> str:
    """One sentence for a filesystem that has too little room, and what to do about it."""
    greatest = max(filesystem.places, key=lambda place: place.needs)
    other = {
        WORK: "set EAGLE3_WORK_DIR to a folder on a larger disk",
        OUT: "put the work store (EAGLE3_WORK_DIR) on this filesystem, so that the out is hard links",
        CACHE: "move DVC's cache to a larger disk (`dvc cache dir`)",
    }[greatest.name]
    if greatest.name == OUT and any(place.name == WORK for place in filesystem.places):
        other = "let cache.type in .dvc/config begin with hardlink and put DVC's cache on this filesystem"
    smaller = "set extract.storage: fp8 (about half the bytes), " if storage == "lossless" else ""
    return (
        f"{greatest.path}: hidden states need {filesystem.needs:,} bytes, {filesystem.free:,} are free. "
        f"Free some room (`eagle3 work gc`, `dvc gc`), {other}, {smaller}"
        "or take fewer prompts (prompts.sources[].limit) or tokens (generate.max_new_tokens)"
    )


def require_room(work: Path, out: Path, missing: Iterable[Sized], plan: Sequence[Sized], storage: Storage) -> int:
    """Bytes that recording will write; raises ValueError when what follows has no room or may not be written."""
    tracked = open_tracked()
    cache = find_cache(tracked)
    volume = measure_volume(plan, missing, tracked, cache, out)
    places = lay_out(work, out.absolute(), cache, volume)
    for place in places:
        near = _existing(place.path.parent if place.name == OUT else place.path)
        if not os.access(near, os.W_OK):
            raise ValueError(
                f"{near} ({place.name}) is read-only; make it writable and run again: finished shards are kept"
            )
    for filesystem in filesystems(places, freed=0):
        if not filesystem.fits:
            raise ValueError(shortage(filesystem, storage))
    return volume.missing


def own_bytes(out: Path) -> int:
    """Bytes that removing an out frees: of its files that have no other name."""
    states = [path.lstat() for path in out.rglob("*") if path.is_file() and not path.is_symlink()]
    return sum(state.st_size for state in states if state.st_nlink == 1)


def device_of(path: Path) -> int:
    """st_dev of a path, or of the nearest folder above it that exists."""
    return _existing(path).stat().st_dev


def _link_to_cache(out: Path, cache: Cache, linked: bool) -> str:
    """How DVC links an out to its cache: by the first of `cache.type` that works. A copy stays where one is allowed.

    linked: the out is hard links into the work store, so that its files count as links.
    """
    if not linked and {"copy", "reflink"} & set(cache.types):
        return "copy"
    near = device_of(out.parent) == device_of(cache.folder)
    usable = [name for name in cache.types if name in ("symlink", "copy") or (name == "hardlink" and near)]
    return usable[0] if usable else "copy"


def _cache_is_linked(out: Path, cache: Cache) -> bool:
    return cache.types[:1] == ("hardlink",) and device_of(out.parent) == device_of(cache.folder)


def _cached_keys(tracked: Tracked, out: Path) -> set[str]:
    """Keys of the shards of the out as dvc.lock records it that DVC's cache still has."""
    try:
        known = [found for found in tracked.outs() if found.path.absolute() == out.absolute()]
        files = [file for found in known for file in tracked.files(found)]
    except ValueError:
        return set()
    return {file.path.stem for file in files if file.cached.is_file()}


def _existing(path: Path) -> Path:
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def _mount_of(path: Path) -> Path:
    return next(place for place in (path, *path.parents) if os.path.ismount(place))
