"""What a run will take before it is paid for: rows, tokens, bytes on each disk, hours, GPU-hours, cost.

Bytes are those of the very shards that `extract` will write where the tokens are known, laid out as room.py lays them
out for `extract` too; hours those at the rates of the last run, of a probe, or as given. Nothing here starts an engine.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from eagle3.hidden_states import PlannedShard, ShardStore, TokenTable, plan_shards
from eagle3.params import Params, VerifierParams
from eagle3.room import (
    Filesystem,
    Place,
    Storage,
    Volume,
    filesystems,
    find_cache,
    lay_out,
    measure_volume,
    own_bytes,
    shortage,
)
from eagle3.shards import DTYPES, sample_bytes
from eagle3.tables import INDEX, Account
from eagle3.tracked import open_tracked
from eagle3.verification import IDENTITY
from eagle3.verifier import choose_aux_layers, is_hub_id, locate_verifier, read_identity
from eagle3.workload import METRICS, TOKENS_OUT, Asked, Workload, measure_work, read_metrics
from eagle3.workstore import work_root

STATES_OUT = Path("data/hidden_states")
RATES = {"generate": "generate-rate", "extract": "record-rate", "train": "train-rate"}  # the option of each stage
ID_BYTES = 5  # a token's id and its place in the loss mask


@dataclass(frozen=True)
class StateSizes:
    """What decides the bytes of a token: `hidden_size` values of each auxiliary layer and of the last one.

    dtype: of the verifier.
    """

    aux_layers: int
    hidden_size: int
    dtype: str

    def token_bytes(self, storage: Storage) -> int:
        """Bytes of one token in a shard: its states, its id and its mask."""
        dtype = DTYPES["float8_e4m3fn" if storage == "fp8" else self.dtype]
        return sample_bytes(1, self.aux_layers, self.hidden_size, dtype) + ID_BYTES


@dataclass(frozen=True)
class Step:
    """The work of one stage. tokens: of a whole run; left: of these, still to do; rate: tokens per second or None."""

    stage: str
    tokens: int
    left: int
    rate: float | None
    source: str

    @property
    def hours(self) -> float | None:
        """For what is left, without the start of an engine."""
        if not self.left:
            return 0.0
        return None if self.rate is None else self.left / self.rate / 3600


@dataclass(frozen=True)
class Estimate:
    """All of it. exact: the bytes are those of the shards that `extract` will write."""

    work: Workload
    sizes: StateSizes
    storage: Storage
    volume: Volume
    exact: bool
    places: list[Place]
    disks: list[Filesystem]
    steps: list[Step]

    @property
    def shortages(self) -> list[str]:
        """A sentence for each filesystem that is too small."""
        return [shortage(disk, self.storage) for disk in self.disks if not disk.fits]


def estimate_run(params: Params, asked: Asked) -> Estimate:
    """The estimate for params.yaml and what lies in data/. Raises ValueError that says which number is missing."""
    if asked.storage is not None:
        params = params.model_copy(update={"extract": params.extract.model_copy(update={"storage": asked.storage})})
    storage = params.extract.storage
    work = measure_work(params, asked)
    sizes = state_sizes(params, asked)
    tracked = open_tracked()
    cache = find_cache(tracked)
    plan, there = _planned(params) if work.standing and asked.hidden_size is None else ([], [])
    exact = work.counted and bool(plan)
    if exact:
        known_keys = {shard.key for shard in there}
        absent = [shard for shard in plan if shard.key not in known_keys]
        volume = measure_volume(plan, absent, tracked, cache, STATES_OUT)
        left = _tokens(absent)
    else:
        total, known = work.tokens * sizes.token_bytes(storage), measure_volume(there, [], tracked, cache, STATES_OUT)
        missing = max(0, total - known.total)
        volume, left = Volume(total, missing, missing + known.uncached), max(0, work.tokens - _tokens(there))
    places = lay_out(work_root() / "extract", STATES_OUT.absolute(), cache, volume)
    train = work.train_tokens * params.train.epochs
    steps = [
        _step("generate", work.answer_tokens, work.unanswered, asked),
        _step("extract", work.tokens, left, asked),
        _step("train", train, train, asked),
    ]
    return Estimate(work, sizes, storage, volume, exact, places, filesystems(places, own_bytes(STATES_OUT)), steps)


def state_sizes(params: Params, asked: Asked) -> StateSizes:
    """Sizes of the verifier's states: as asked, else of data/verifier.json, else of the model's config.json."""
    dtype = params.verifier.dtype
    if asked.hidden_size is not None and asked.aux_layers is not None:
        return StateSizes(asked.aux_layers, asked.hidden_size, dtype)
    if asked.hidden_size is not None or asked.aux_layers is not None:
        raise ValueError("--hidden-size and --aux-layers go together: they stand in for the verifier")
    if IDENTITY.is_file():
        identity = read_identity(IDENTITY)
        return StateSizes(len(identity.aux_layer_ids), identity.hidden_size, identity.dtype)
    path = _config_file(params.verifier)
    try:
        config = json.loads(path.read_text())
        config = {**config, **config.get("text_config", {})}
        layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: no sizes of a model in there ({error!r}); say --hidden-size, --aux-layers") from None
    return StateSizes(len(choose_aux_layers(params.verifier.aux_layer_ids, layers)), hidden, dtype)


def _config_file(verifier: VerifierParams) -> Path:
    """config.json of the verifier; of a hub id that file alone is downloaded."""
    name = verifier.model
    if not is_hub_id(name):
        return locate_verifier(verifier) / "config.json"
    try:
        return Path(hf_hub_download(name, "config.json", revision=verifier.revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        told = " ".join(str(error).split())[:200]
        raise ValueError(
            f"config.json of {name} cannot be had ({told}); say --hidden-size and --aux-layers instead"
        ) from None


def _tokens(shards: Sequence[PlannedShard]) -> int:
    """Equal shards are recorded once."""
    return sum({shard.key: shard.tokens for shard in shards}.values())


def _planned(params: Params) -> tuple[list[PlannedShard], list[PlannedShard]]:
    """The shards of data/tokens, and those of them that the work store has; none where they cannot be told."""
    if not (TOKENS_OUT / INDEX).is_file() or not IDENTITY.is_file():
        return [], []
    identity = read_identity(IDENTITY)
    table = TokenTable(TOKENS_OUT, params.verifier.max_model_len)
    plan = plan_shards(table, identity, params.extract, Account("extract", 1))
    store = ShardStore(work_root() / "extract")  # not entered: that would sweep
    return plan, [shard for shard in plan if store.facts(shard) is not None]


def _step(stage: str, tokens: int, left: int, asked: Asked) -> Step:
    metrics = read_metrics(stage)
    if stage in asked.rates:
        return Step(stage, tokens, left, asked.rates[stage], "as asked")
    if asked.probed is not None and stage in asked.probed.rates:
        return Step(stage, tokens, left, asked.probed.rates[stage], f"probe of {asked.probed.rows:,} rows")
    rate = metrics.get("tokens_per_second", 0.0)
    if rate:
        return Step(stage, tokens, left, float(rate), str(METRICS / f"{stage}.json"))
    why = "no run yet" if not metrics else "nothing was new in the last run"
    return Step(stage, tokens, left, None, f"unknown: {why}")


def as_json(found: Estimate, gpus: int, price_per_hour: float | None) -> str:
    """The estimate for a program. Bytes, tokens, hours; null where a rate is not known."""
    hours = total_hours(found.steps)
    told = {
        "rows": found.work.rows,
        "prompt_tokens": found.work.prompt_tokens,
        "answer_tokens": found.work.answer_tokens,
        "tokens": found.work.tokens,
        "source": found.work.source,
        "bytes_per_token": found.sizes.token_bytes(found.storage),
        "storage": found.storage,
        "bytes": {"total": found.volume.total, "missing": found.volume.missing, "exact": found.exact},
        "places": [
            {
                "name": place.name,
                "path": str(place.path),
                "kind": place.kind,
                "stays": place.stays,
                "needs": place.needs,
            }
            for place in found.places
        ],
        "filesystems": [
            {"mount": str(disk.mount), "needs": disk.needs, "free": disk.free, "fits": disk.fits}
            for disk in found.disks
        ],
        "stages": {step.stage: asdict(step) | {"hours": step.hours} for step in found.steps},
        "hours": hours,
        "gpu_hours": None if hours is None else hours * gpus,
        "cost": None if hours is None or price_per_hour is None else hours * gpus * price_per_hour,
        "fits": not found.shortages,
        "remedies": [*found.shortages, *unknown_rates(found.steps)],
    }
    return json.dumps(told, indent=2)


def total_hours(steps: Sequence[Step]) -> float | None:
    """Of all stages; None where one is not known."""
    hours = [step.hours for step in steps]
    return None if None in hours else sum(hour for hour in hours if hour is not None)


def unknown_rates(steps: Sequence[Step]) -> list[str]:
    """What to do about the stages whose rate is not known."""
    names = [step.stage for step in steps if step.hours is None]
    options = ", ".join(f"--{RATES[name]} TOKENS_PER_S" for name in names)
    return [f"no rate for {', '.join(names)}: say {options}, or measure with --probe 64"] if names else []


def as_lines(found: Estimate, gpus: int, price_per_hour: float | None) -> list[str]:
    """The estimate for a person."""
    work, sizes = found.work, found.sizes
    values = sizes.dtype if found.storage == "lossless" else found.storage
    lines = [
        f"rows    {work.rows:,}",
        f"tokens  {work.prompt_tokens:,} of prompts + {work.answer_tokens:,} of answers = {work.tokens:,} "
        f"({work.source})",
        f"states  {sizes.token_bytes(found.storage):,} bytes a token: {sizes.aux_layers} layers and the last one, "
        f"{sizes.hidden_size:,} {values} values each; {'exactly' if found.exact else 'about'} "
        + size(found.volume.total),
        "",
    ]
    rows = [["disk", "kept as", "in the end", "still needed", "where"]]
    rows += [
        [place.name, place.kind, size(place.stays), size(place.needs), str(near(place.path))] for place in found.places
    ]
    lines += [*aligned(rows, "<<>><"), *(line for disk in found.disks for line in _disk_lines(disk, found)), ""]
    return [*lines, *_time_lines(found.steps, gpus, price_per_hour), *unknown_rates(found.steps)]


def _disk_lines(disk: Filesystem, found: Estimate) -> list[str]:
    if disk.fits:
        return [f"{disk.mount}: {size(disk.needs)} needed, {size(disk.free)} free: fits"]
    lines = [f"{disk.mount}: {size(disk.needs)} needed, {size(disk.free)} free: DOES NOT FIT"]
    rows = found.work.rows
    row_bytes = found.volume.total / rows * sum(place.needs > 0 for place in disk.places)
    fitting = max(0, int(rows - (disk.needs - disk.free) / row_bytes))
    lines.append(f"  about {fitting:,} of {rows:,} rows would fit")
    if found.storage == "lossless":
        smaller = round(disk.needs * found.sizes.token_bytes("fp8") / found.sizes.token_bytes("lossless"))
        fits = "would fit" if smaller <= disk.free else "would not fit either"
        lines.append(f"  all rows with extract.storage: fp8 need {size(smaller)} and {fits}")
    return lines


def _time_lines(steps: Sequence[Step], gpus: int, price: float | None) -> list[str]:
    rows = [["stage", "tokens", "to do", "tokens/s", "hours", "GPU-hours", "cost", "rate"]]
    known = total_hours(steps)
    for name, tokens, left, rate, hours, source in [
        *[
            (s.stage, f"{s.tokens:,}", f"{s.left:,}", f"{s.rate:,.0f}" if s.rate else "?", s.hours, s.source)
            for s in steps
        ],
        ("all", "", "", "", known, ""),
    ]:
        times = ["?", "?"] if hours is None else [clock(hours), clock(hours * gpus)]
        cost = "" if price is None else "?" if hours is None else f"{hours * gpus * price:,.2f}"
        rows.append([name, tokens, left, rate, *times, cost, source])
    return aligned(rows, "<>>>>>><")


def near(path: Path) -> Path:
    """A path as seen from the current folder."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def clock(hours: float) -> str:
    """Hours for a person."""
    return f"{hours:,.2f}" if hours >= 1 else f"{hours:.3f}"


def size(count: int) -> str:
    """Bytes for a person."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= unit:
            return f"{count / unit:,.2f} {name}"
    return f"{count:,} bytes"


def aligned(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Rows of cells as lines; sides: < or > for each column."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(sides))]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]
