"""Is the data whole? Every file against the digest that an index, a lineage or dvc.lock has for it.

DVC trusts a read-only object of its cache without reading it, and with hard links a file of an out *is* that object; so
changed bytes are noticed here and nowhere else. Each file is read once, whatever number of names it has.
"""

import hashlib
import json
import os
import shlex
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError, safe_open

from eagle3.console import Progress, visible
from eagle3.lineage import LINEAGE
from eagle3.schemas import PARTS, STATES
from eagle3.tables import INDEX, read_columns
from eagle3.tracked import Out, OutFile, Tracked
from eagle3.verifier import read_identity
from eagle3.workstore import work_root

INDEXED = (Path("data/responses"), Path("data/tokens"), Path("data/hidden_states"))
DRAFT, IDENTITY = Path("data/draft"), Path("data/verifier.json")
BESIDE_AN_INDEX = {INDEX, "rejected.parquet", "preview.txt", "audit.parquet", "audit.txt"}  # outside a DVC project
PIECE = 1 << 22
MEGABYTE = 10**6


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong, on one line. remedy: what to type or to do."""

    path: Path
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{visible(str(self.path), 500)}: {self.problem}; {self.remedy}"


@dataclass(frozen=True)
class Claim:
    """What somebody says about a file. algorithm: sha256 | md5; size: None = not said; by: who says it."""

    path: Path
    algorithm: str
    digest: str
    size: int | None
    by: str


@dataclass
class Findings:
    """What is said about files, who DVC says they are, and what is wrong with them."""

    claims: list[Claim] = field(default_factory=list)
    tracked: dict[Path, OutFile] = field(default_factory=dict)  # by path in the workspace and in the cache
    problems: dict[Path, str] = field(default_factory=dict)  # the first one of each file
    faults: list[Fault] = field(default_factory=list)  # those whose remedy depends on nothing else
    skipped: list[str] = field(default_factory=list)  # sentences about what was not looked at
    files: int = 0
    bytes: int = 0

    def problem(self, path: Path, text: str) -> None:
        self.problems.setdefault(path, text)


def verify_places(places: Sequence[Path], tracked: Tracked | None) -> Findings:
    """Check folders and files, or without any all that the pipeline makes and dvc.lock records.

    Raises ValueError for a place that is not there or that nothing tells about, and for a damaged dvc.lock.
    """
    found = Findings()
    outs = {out.path: out for out in tracked.outs()} if tracked else {}
    if tracked is None:
        found.skipped.append("dvc.lock: this folder lies in no DVC repository")
    everything = list(dict.fromkeys([*INDEXED, DRAFT, IDENTITY, *outs]))
    for place in [near for asked in places for near in _expand(asked, everything)] or everything:
        out = outs.get(place)
        if os.path.lexists(place):
            if not _own_claims(place, found) and out is None:
                raise ValueError(f"{place}: neither an index nor dvc.lock tells what must be in it")
        else:
            absent = f"{place}: not there yet" + (f"; `dvc pull {_word(place)}` brings it" if out else "")
            if places:
                raise ValueError(absent)
            found.skipped.append(absent)
        if out is not None and tracked is not None:
            _recorded_claims(out, tracked, found)
        _find_foreign(place, found)
    _compare(found)
    _conclude(found)
    return found


def digest_files(wanted: Sequence[tuple[Path, str]], label: str) -> Generator[tuple[int, str | OSError]]:
    """Digest files on all cores, with a progress bar; (position in `wanted`, hex digest or what the disk said).

    wanted: path and algorithm. The digests come in the order in which they are done.
    """
    total = sum(_size(path) for path, _ in wanted)
    workers = max(1, len(os.sched_getaffinity(0)))
    with Progress(label, -(-total // MEGABYTE), "MB") as progress, ThreadPoolExecutor(workers) as pool:
        meter = _Meter(progress)
        try:
            futures = {pool.submit(_digest, path, kind, meter): place for place, (path, kind) in enumerate(wanted)}
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:  # Ctrl-C too
            meter.stop.set()
            pool.shutdown(cancel_futures=True)


class _Meter:
    """Bytes read by several threads, on one progress bar. `stop` ends the threads at their next piece."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self._lock = threading.Lock()
        self._bytes = 0
        self.stop = threading.Event()

    def add(self, count: int) -> None:
        with self._lock:
            before, self._bytes = self._bytes, self._bytes + count
            self._progress.advance(-(-self._bytes // MEGABYTE) + (-before // MEGABYTE))


def _digest(path: Path, algorithm: str, meter: _Meter) -> str | OSError:
    state = hashlib.new(algorithm, usedforsecurity=False)
    piece = memoryview(bytearray(PIECE))
    try:
        with path.open("rb", buffering=0) as file:
            while not meter.stop.is_set() and (count := file.readinto(piece)):
                state.update(piece[:count])
                meter.add(count)
    except OSError as error:
        return error
    return state.hexdigest()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _expand(asked: Path, everything: list[Path]) -> list[Path]:
    """A place that was asked for, or the known ones below it."""
    path = Path(os.path.abspath(asked))  # noqa: PTH100 - does not follow links, as DVC does not
    place = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return [known for known in everything if known != place and known.is_relative_to(place)] or [place]


def _own_claims(place: Path, found: Findings) -> bool:
    """Note what the pipeline's own files say about a place; False when there are none."""
    read: Callable[[Path], list[Claim]]
    if place in INDEXED or (place / INDEX).is_file():
        source, read = place / INDEX, _index_claims
    elif place == DRAFT or (place / LINEAGE).is_file():
        source, read = place / LINEAGE, _lineage_claims
    elif place.name == IDENTITY.name:
        source, read = place, _identity_claims
    else:
        return False
    try:
        found.claims += read(source)
    except ValueError as error:
        problem = " ".join(str(error).removeprefix(f"{source}: ").partition("; `")[0].split())
        found.problem(source, visible(problem))
    return True


def _index_claims(index: Path) -> list[Claim]:
    """Raises ValueError for an index that is damaged or names files outside its folder."""
    try:
        shards = "shard" in pq.read_schema(index).names
    except (pa.ArrowException, OSError) as error:
        raise ValueError("missing" if isinstance(error, FileNotFoundError) else f"not readable: {error}") from None
    names = ["shard", "shard_bytes", "shard_sha256"] if shards else ["file", "bytes", "sha256"]
    schema = pa.schema([(STATES if shards else PARTS).field(name) for name in names])
    distinct = read_columns(index, schema).group_by(names).aggregate([])
    rows = zip(*(distinct[name].to_pylist() for name in names), strict=True)
    return [Claim(_inside(index, name), "sha256", str(sha256), size, str(index)) for name, size, sha256 in rows]


def _lineage_claims(lineage: Path) -> list[Claim]:
    """Raises ValueError for a lineage that is damaged, and for weights that are no safetensors file."""
    try:
        digests = {str(name): str(sha256) for name, sha256 in json.loads(lineage.read_text())["draft"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError("missing" if isinstance(error, FileNotFoundError) else f"not a lineage: {error!r}") from None
    claims = [Claim(_inside(lineage, name), "sha256", sha256, None, str(lineage)) for name, sha256 in digests.items()]
    for claim in claims:
        if claim.path.suffix != ".safetensors":
            continue
        try:
            with safe_open(claim.path, "pt") as tensors:
                tensors.keys()
        except FileNotFoundError:
            continue  # noticed when the claims are compared
        except (SafetensorError, OSError) as error:
            raise ValueError(f"names {claim.path.name}, which is not readable as safetensors: {error}") from None
    return claims


def _identity_claims(identity: Path) -> list[Claim]:
    read_identity(identity)
    return []


def _inside(index: Path, name: str | None) -> Path:
    """A file beside the index. Raises ValueError for any other name."""
    if not name or PurePosixPath(name).name != name or name == ".." or "\0" in name:
        raise ValueError(f"names {visible(str(name))}, which is no file of this folder: refused")
    return index.with_name(name)


def _recorded_claims(out: Out, tracked: Tracked, found: Findings) -> None:
    """Note what dvc.lock says: of the out's files where it is there, and of their objects in the cache in any case."""
    there = os.path.lexists(out.path)
    try:
        files = tracked.files(out)
    except ValueError as error:
        if there:
            damaged = tracked.cached(out.object)
            first = f"`rm -f {_word(damaged)}`, then " if damaged.exists() else ""
            remedy = f"{first}`dvc commit {out.stage}` if the folder is whole, else `dvc pull {_word(out.path)}`"
            found.faults.append(Fault(out.path, str(error), remedy))
        return
    for file in files:
        size = None if out.is_folder else out.size
        found.tracked |= {file.path: file, file.cached: file}
        if there:
            found.claims.append(Claim(file.path, "md5", file.object, size, "dvc.lock"))
        if file.cached.exists():
            found.claims.append(Claim(file.cached, "md5", file.object, size, "its name"))
        elif there:
            lost = f"not in DVC's cache ({file.cached}), so no push takes it along"
            found.faults.append(Fault(file.path, lost, f"`dvc commit {out.stage}` puts it there"))


def _find_foreign(place: Path, found: Findings) -> None:
    """Note files that nothing names: DVC would hash and push them, and every stage behind would run again."""
    if not place.is_dir():
        return
    own = {claim.path for claim in found.claims if claim.algorithm == "sha256" and claim.path.parent == place}
    recorded = {path for path in found.tracked if path.is_relative_to(place)}
    indexed = own and (place / INDEX).is_file()
    if not (indexed or recorded):
        return
    known = own | recorded | {place / name for name in BESIDE_AN_INDEX if indexed}
    for path in sorted(place.rglob("*")):
        if path not in known and (path.is_symlink() or not path.is_dir()):
            remedy = "move it elsewhere, or DVC takes it for a change of the folder"
            found.faults.append(Fault(path, "foreign: neither index nor dvc.lock names it", remedy))


def _compare(found: Findings) -> None:
    """Read every file once and compare it with what is said about it. A SHA-256 of ours spares the slower MD5."""
    by_file: dict[tuple[int, int], list[Claim]] = {}
    for claim in found.claims:
        try:
            state = claim.path.stat()
        except OSError as error:
            gone = "missing" if isinstance(error, FileNotFoundError) else f"not readable ({error.strerror})"
            found.problem(claim.path, f"{gone}, {claim.by} names it")
            continue
        if claim.size is not None and claim.size != state.st_size:
            found.problem(claim.path, f"{state.st_size:,} bytes where {claim.by} says {claim.size:,}")
        by_file.setdefault((state.st_dev, state.st_ino), []).append(claim)
    found.files = len(by_file)
    readings = []
    for same in by_file.values():
        strong = [claim for claim in same if claim.algorithm == "sha256"]
        if not any(claim.path in found.problems for claim in same):
            readings.append(strong or same)
    wanted = [(same[0].path, same[0].algorithm) for same in readings]
    with closing(digest_files(wanted, "verify")) as digests:
        for place, digest in digests:
            found.bytes += _size(wanted[place][0])
            for claim in readings[place]:
                if isinstance(digest, OSError):
                    found.problem(claim.path, f"not readable ({digest.strerror})")
                elif digest != claim.digest:
                    found.problem(claim.path, f"its bytes differ from its {claim.algorithm} in {claim.by}")


def _conclude(found: Findings) -> None:
    """One fault for each file with a problem, under its name in the workspace where it has one."""
    told: set[tuple[int, int]] = set()
    cached = {file.cached for file in found.tracked.values()}
    for path, problem in sorted(found.problems.items(), key=lambda item: (item[0] in cached, str(item[0]))):
        if path.exists():
            state = path.stat()
            if (state.st_dev, state.st_ino) in told:
                continue
            told.add((state.st_dev, state.st_ino))
        owner = f" (DVC's cache has it for {found.tracked[path].path})" if path in cached else ""
        found.faults.append(Fault(path, problem + owner, _remedy(path, found)))
    found.faults.sort(key=lambda fault: str(fault.path))


def _remedy(path: Path, found: Findings) -> str:
    """What brings a damaged or missing file back, given what else is damaged."""
    file = found.tracked.get(path)
    if file is None:
        return "restore it from where it came from, or `dvc repro`"
    again = f"`dvc pull {_word(file.out.path)}` or `dvc repro {file.out.stage}`"
    if path == file.cached:
        return f"`rm -f {_word(path)}`, then `dvc commit {file.out.stage}` if the workspace has it whole, else {again}"
    one_file = path.exists() and file.cached.exists() and path.samefile(file.cached)
    if file.cached.exists() and not one_file and file.cached not in found.problems:
        return f"`dvc checkout --force {_word(file.out.path)}`"
    if not path.exists():
        return again
    return f"`rm -f {' '.join(_word(name) for name in _names(path, file.cached))}`, then {again}"


def _names(path: Path, cached: Path) -> list[Path]:
    """All names of a damaged file: one that stays would bring it back, through DVC or through the work store."""
    stored = work_root() / "extract" / path.name
    near = stored.relative_to(Path.cwd()) if stored.is_relative_to(Path.cwd()) else stored
    return [path, *(other for other in (cached, near) if other.exists() and other.samefile(path))]


def _word(path: Path) -> str:
    return shlex.quote(str(path))
