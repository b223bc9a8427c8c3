"""What lies in the work store, what of it is still needed, and removing the rest.

The work store only saves work: whatever is removed costs recomputation when it is wanted again, and nothing else. Yet
recomputation is GPU time, so what may be needed stays:

    extract    shards that data/hidden_states names, or that `extract` would need for data/tokens as it is now
    train      runs that are not finished, and the newest finished one
    verifiers  the converted model that params.yaml names
    anything   younger than the age that is asked for, or whose removal frees no disk (DVC's cache has the same file)

Answers of `generate` (small, and the dearest), logs and folders of others are never removed.
"""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from eagle3.console import visible
from eagle3.hidden_states import ShardStore, TokenTable, plan_shards
from eagle3.params import Params
from eagle3.schemas import STATES
from eagle3.tables import INDEX, Account, read_columns
from eagle3.verifier import BUNDLED, bundled_folder, read_identity
from eagle3.workstore import LOCK, work_folder, work_root

TOKENS, STATES_OUT, IDENTITY = Path("data/tokens"), Path("data/hidden_states"), Path("data/verifier.json")
WRITERS = ("generate", "extract", "train", "train/*", "verifiers")  # folders with a lock
JUDGED = ("extract", "train", "verifiers")
KINDS = {
    "generate": "answers",
    "evaluate": "answers of interrupted evaluations",
    "identities": "facts about verifiers",
    "logs": "logs",
}
NEVER = "never removed"
SHARED = "another folder, as DVC's cache, has the same file: removing it here frees nothing"
DAY_S = 86400


@dataclass(frozen=True)
class Unit:
    """What is kept or removed as one. needed: why it stays; None = nothing needs it."""

    stage: str
    kind: str  # plural
    name: str
    paths: tuple[Path, ...]  # files and folders
    needed: str | None

    def files(self) -> list[Path]:
        """All its files, without locks."""
        inside = (file for path in self.paths for file in (path.rglob("*") if path.is_dir() else [path]))
        return [file for file in inside if file.is_file() and not file.is_symlink() and file.name != LOCK]

    def sizes(self) -> "Sizes":
        """Its bytes."""
        states = [file.stat() for file in self.files()]
        shared = sum(state.st_size for state in states if state.st_nlink > 1)
        newest = max((state.st_mtime for state in states), default=0.0)
        return Sizes(len(states), sum(state.st_size for state in states), shared, newest)


@dataclass(frozen=True)
class Sizes:
    """files: how many; bytes: of all; shared: of those that have another name elsewhere; newest: when last written."""

    files: int
    bytes: int
    shared: int
    newest: float


@dataclass(frozen=True)
class Entry:
    """A unit, measured and judged. `kept`: why gc leaves it; None = gc removes it."""

    unit: Unit
    sizes: Sizes
    kept: str | None

    @property
    def freed(self) -> int:
        """Bytes of disk that removing it gives back."""
        return self.sizes.bytes - self.sizes.shared


def survey(params: Params, older_than_days: float) -> list[Entry]:
    """Everything in the work store, by stage."""
    root, now = work_root(), time.time()
    entries = []
    for unit in [*_shards(root / "extract", params), *_runs(root / "train"), *_verifiers(root / "verifiers", params)]:
        sizes = unit.sizes()
        young = now - sizes.newest < older_than_days * DAY_S
        kept = unit.needed or (f"younger than {older_than_days:g} days" if young else None)
        shared = SHARED if 2 * sizes.shared > sizes.bytes else None
        entries.append(Entry(unit, sizes, kept or shared))
    for path in sorted(path for path in root.glob("*") if path.is_dir() and path.name not in JUDGED):
        unit = Unit(path.name, KINDS.get(path.name, "files of others"), path.name, (path,), NEVER)
        entries.append(Entry(unit, unit.sizes(), NEVER))
    return entries


def table(entries: list[Entry]) -> list[str]:
    """`eagle3 work du`: a line for each kind of unit and each reason why it stays, and a line for the sum."""
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.unit.stage, entry.unit.kind, entry.kept or ""), []).append(entry)
    rows = [["stage", "what", "number", "files", "bytes", "unused", "why it stays"]]
    for (stage, kind, kept), group in groups.items():
        rows.append([stage, kind, *_counts(group), kept])
    rows.append(["", "all", *_counts(entries), ""])
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    return ["  ".join([*map(_cell, row, "<<>>>>", widths), row[6]]).rstrip() for row in rows]


def _counts(entries: list[Entry]) -> list[str]:
    files, size = sum(entry.sizes.files for entry in entries), sum(entry.sizes.bytes for entry in entries)
    return [f"{count:,}" for count in (len(entries), files, size, freed(entries))]


def _cell(text: str, side: str, width: int) -> str:
    return f"{text:{side}{width}}"


def freed(entries: list[Entry]) -> int:
    """Bytes of disk that gc gives back."""
    return sum(entry.freed for entry in entries if entry.kept is None)


def remove(entries: list[Entry]) -> None:
    """Remove what is not kept."""
    for entry in entries:
        if entry.kept is None:
            for path in entry.unit.paths:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)


@contextmanager
def no_stage_running() -> Iterator[None]:
    """Hold the locks of all stages that write into the work store. Raises ValueError when one runs."""
    with ExitStack() as held:
        for folder in (path for name in WRITERS for path in sorted(work_root().glob(name)) if path.is_dir()):
            held.enter_context(work_folder(str(folder.relative_to(work_root()))))
        yield


def _shards(folder: Path, params: Params) -> Iterator[Unit]:
    needed, unknown = _needed_shards(params)
    store = ShardStore(folder)  # not entered: that would sweep
    names = {path.stem for path in folder.glob("*.safetensors")} | {path.stem for path in folder.glob("*.json")}
    for key in sorted(names):
        why = "named by data/hidden_states or wanted for data/tokens" if key in needed else unknown
        yield Unit("extract", "shards", key[:16], (store.path(key).with_suffix(".json"), store.path(key)), why)
    strays = [*folder.glob("*.partial"), *folder.glob("*.tmp"), *folder.glob(".*.tmp")]
    for path in sorted(strays):
        yield Unit("extract", "left half done", path.name, (path,), None)


def _needed_shards(params: Params) -> tuple[set[str], str | None]:
    """Keys of the shards that today's data need; and, where that cannot be known, why all must stay."""
    needed: set[str] = set()
    try:
        if (STATES_OUT / INDEX).is_file():
            index = read_columns(STATES_OUT / INDEX, pa.schema([STATES.field("shard")]))
            needed |= {str(name).removesuffix(".safetensors") for name in index["shard"].unique().to_pylist()}
        table = TokenTable(TOKENS, params.verifier.max_model_len)
        plan = plan_shards(table, read_identity(IDENTITY), params.extract, Account("extract", 1))
    except ValueError as error:
        return needed, f"what is needed cannot be told: {visible(str(error))}"
    return needed | {shard.key for shard in plan}, None


def _runs(folder: Path) -> Iterator[Unit]:
    runs = [path for path in folder.glob("*") if path.is_dir()]
    finished = [run for run in runs if _finished(run)]
    newest = max(finished, key=lambda run: Unit("train", "runs", run.name, (run,), None).sizes().newest, default=None)
    for run in sorted(runs):
        why = None if run in finished else "not finished; remove it by hand if it will not go on"
        yield Unit("train", "runs", run.name[:16], (run,), "the newest finished run" if run == newest else why)


def _finished(run: Path) -> bool:
    checkpoints = sorted(path for path in run.glob("step-*") if path.suffix != ".tmp")
    try:
        return bool(checkpoints) and json.loads((checkpoints[-1] / "state.json").read_text())["finished"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _verifiers(folder: Path, params: Params) -> Iterator[Unit]:
    named = bundled_folder(params.verifier.model).name if params.verifier.model in BUNDLED else None
    for path in sorted(path for path in folder.glob("*") if path.is_dir()):
        why = "params.yaml names it" if path.name == named else None
        yield Unit("verifiers", "converted models", path.name, (path,), why)
