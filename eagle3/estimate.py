"""What a run will take before it is paid for: rows, tokens, bytes on each disk, hours, GPU-hours, cost.

Every figure comes from the best thing that is there, and says from what: the table itself; else the ratio seen in the
tables or metrics of another run; else a number that was asked for or a bound that params.yaml sets. Starts no engine.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from eagle3.hidden_states import PlannedShard, ShardStore, TokenTable, plan_shards
from eagle3.params import Params, VerifierParams
from eagle3.probe import Probed
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
from eagle3.schemas import PROMPTS, REJECTED, RESPONSES, TOKENS, sample_name
from eagle3.shards import DTYPES, sample_bytes
from eagle3.tables import INDEX, Account, Part, list_parts, read_columns, read_table
from eagle3.tracked import open_tracked
from eagle3.verification import IDENTITY
from eagle3.verifier import choose_aux_layers, locate_verifier, read_identity
from eagle3.workstore import work_root

PROMPTS_OUT, RESPONSES_OUT, TOKENS_OUT = Path("data/prompts"), Path("data/responses"), Path("data/tokens")
STATES_OUT, METRICS, LOCK = Path("data/hidden_states"), Path("data/metrics"), Path("dvc.lock")
SPLITS = ("train", "validation")
RATES = {"generate": "generate-rate", "extract": "record-rate", "train": "train-rate"}  # the option of each stage
ID_BYTES = 5  # a token's id and its place in the loss mask
TEXT_BYTES_PER_TOKEN = 3  # where no token was ever counted; English has 4 to 5
#: Settings of `generate` that decide no answer.
ASKING = {"endpoints", "concurrency", "retries", "stall_timeout_s", "max_failed_share", "require_ids"}


@dataclass(frozen=True)
class Asked:
    """Numbers given on the command line, each in place of what the tables say; None = what the tables say.

    prompt_tokens, answer_tokens: mean of a row. rates: tokens per second by stage, of the whole machine.
    """

    rows: int | None
    prompt_tokens: float | None
    answer_tokens: float | None
    hidden_size: int | None
    aux_layers: int | None
    storage: Storage | None
    rates: dict[str, float]
    probed: Probed | None

    @property
    def is_dry(self) -> bool:
        """A sum of other numbers than those of the tables and the verifier that lie here."""
        return any(number is not None for number in (self.prompt_tokens, self.answer_tokens, self.hidden_size))


@dataclass(frozen=True)
class Workload:
    """What the stages have before them. rows, tokens: of all that will be recorded; unanswered: of these, answer
    tokens that are still to be written; train_tokens: of the train split.

    counted: all of it stands in data/tokens. source: where the numbers come from.
    """

    rows: int
    prompt_tokens: int
    answer_tokens: int
    unanswered: int
    train_tokens: int
    counted: bool
    source: str

    @property
    def tokens(self) -> int:
        """Of prompts and answers."""
        return self.prompt_tokens + self.answer_tokens


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
class Seen:
    """Rows of a table or of the metrics of a run: sums."""

    rows: int
    prompt_tokens: int
    answer_tokens: int
    source: str


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
    plan, there = ([], []) if asked.is_dry else _planned(params)
    exact = work.counted and bool(plan)
    if exact:
        absent = [shard for shard in plan if shard not in there]
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
    if verifier.model.startswith("bundled:") or verifier.model.count("/") != 1 or Path(verifier.model).is_dir():
        return locate_verifier(verifier) / "config.json"
    try:
        return Path(hf_hub_download(verifier.model, "config.json", revision=verifier.revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        told = " ".join(str(error).split())[:200]
        raise ValueError(
            f"config.json of {verifier.model} cannot be had ({told}); say --hidden-size and --aux-layers instead"
        ) from None


@dataclass(frozen=True)
class Past:
    """What an earlier run left. standing: its answers are those that params.yaml asks for; budget: max_new_tokens of
    params.yaml, as a multiple of what it was then."""

    seen: Seen | None
    standing: bool
    budget: float


def measure_work(params: Params, asked: Asked) -> Workload:
    """Rows and tokens of a whole run, and what of them is still to be generated.

    Raises ValueError when there is neither a table of prompts nor a number of rows.
    """
    given = asked.rows is not None and asked.prompt_tokens is not None and asked.answer_tokens is not None
    past = Past(None, False, 1) if given else read_past(params)
    if asked.probed is not None and not past.standing:
        told = asked.probed
        past = Past(Seen(told.rows, told.prompt_tokens, told.answer_tokens, "the probe"), False, 1)
    as_is = asked.rows is asked.prompt_tokens is asked.answer_tokens is None
    if asked.rows is None:
        wanted, train_share = _wanted(params)
        rows, unanswered = len(wanted), _open_rows(wanted) if past.standing else len(wanted)
        seen = counted_tokens()
        if as_is and past.standing and not unanswered and seen is not None and _covers(wanted):
            train = _tokens_of_split("train")
            return Workload(
                seen.rows, seen.prompt_tokens, seen.answer_tokens, 0, train, True, f"counted in {TOKENS_OUT}"
            )
    else:
        rows, train_share = asked.rows, _train_share(params)
        unanswered = max(0, rows - past.seen.rows) if past.standing and past.seen else rows
    prompt, answer, source = _means(params, asked, past)
    return Workload(
        rows,
        round(rows * prompt),
        round(rows * answer),
        round(unanswered * answer) if params.generate.responses == "verifier" else 0,
        round(rows * (prompt + answer) * train_share),
        False,
        source,
    )


def _means(params: Params, asked: Asked, past: Past) -> tuple[float, float, str]:
    """Mean tokens of a prompt and of an answer, and where they come from."""
    if asked.prompt_tokens is not None and asked.answer_tokens is not None:
        return asked.prompt_tokens, asked.answer_tokens, "as asked"
    if (seen := past.seen) is not None:
        prompt, answer = seen.prompt_tokens / seen.rows, seen.answer_tokens / seen.rows * past.budget
        source = f"expected, from the {seen.rows:,} rows of {seen.source}"
        source += "" if past.budget == 1 else f"; answers {past.budget:.3g} times as long, as max_new_tokens is"
    else:
        prompt = _text_tokens("messages")
        own = params.generate
        answer = mean(own.max_new_tokens) if own.responses == "verifier" else _text_tokens("reference")
        source = f"at most, from generate.max_new_tokens and {TEXT_BYTES_PER_TOKEN} bytes of prompt a token"
    longest = params.verifier.max_model_len
    prompt = min(prompt, longest) if asked.prompt_tokens is None else asked.prompt_tokens
    answer = min(answer, max(0, longest - prompt)) if asked.answer_tokens is None else asked.answer_tokens
    return prompt, answer, source


def mean(value: int | list[int]) -> float:
    """Of a setting that is a number or a list of which one is drawn for each answer."""
    return sum(value) / len(value) if isinstance(value, list) else value


def _text_tokens(column: str) -> float:
    """Mean tokens of a column of the prompts, guessed from their text."""
    rows = [row for split in SPLITS for row in read_table(_prompts(split), pa.schema([PROMPTS.field(column)]))]
    texts = [row[column] if isinstance(row[column], str) else str(row[column] or "") for row in rows]
    if column == "messages":
        texts = ["".join(message["content"] for message in row[column]) for row in rows]
    return sum(len(text.encode(errors="replace")) for text in texts) / TEXT_BYTES_PER_TOKEN / max(1, len(rows))


def _prompts(split: str) -> Path:
    path = PROMPTS_OUT / f"{split}.parquet"
    if not path.is_file():
        raise ValueError(
            f"{path} is not there yet: `dvc repro prompts` makes it without an engine; or say --rows, --prompt-tokens "
            "and --answer-tokens"
        )
    return path


def _wanted(params: Params) -> tuple[list[str], float]:
    """Sample ids that today's prompts ask for, and the share of them that trains."""
    schema = pa.schema([PROMPTS.field("prompt_id")])
    train, validation = (read_columns(_prompts(split), schema)["prompt_id"].to_pylist() for split in SPLITS)
    samples = range(params.generate.samples_per_prompt if params.generate.responses == "verifier" else 1)
    ids = [sample_name(prompt, sample) for prompt in (*train, *validation) for sample in samples]
    if not ids:
        raise ValueError(f"{PROMPTS_OUT}: there is no prompt for training in there")
    return ids, len(train) / (len(train) + len(validation))


def _train_share(params: Params) -> float:
    """The share of rows that trains, as prompts are split."""
    return max(0.0, 1 - params.prompts.validation_share / max(1e-9, 1 - params.prompts.evaluation_share))


def _open_rows(wanted: Sequence[str]) -> int:
    """How many of the wanted samples have neither an answer nor a reason why there is none."""
    answered = _samples(RESPONSES_OUT, ("prompt_id", "sample")) or _samples(TOKENS_OUT, ("sample_id",))
    return len(set(wanted) - answered - _rejected(RESPONSES_OUT) - _rejected(TOKENS_OUT))


def _covers(wanted: Sequence[str]) -> bool:
    """Is data/tokens made of today's prompts, all of them and no others."""
    there = _samples(TOKENS_OUT, ("sample_id",))
    return there <= set(wanted) <= there | _rejected(TOKENS_OUT) | _rejected(RESPONSES_OUT)


def _samples(folder: Path, names: tuple[str, ...]) -> set[str]:
    """Sample ids of a folder of parts; none where it is not there."""
    schema = pa.schema([(TOKENS if folder == TOKENS_OUT else RESPONSES).field(name) for name in names])
    columns = [read_columns(part.path, schema).to_pydict() for part in _parts(folder)]
    return {
        sample_name(*row) if len(row) > 1 else row[0] for held in columns for row in zip(*held.values(), strict=True)
    }


def _parts(folder: Path) -> list[Part]:
    return list(list_parts(folder)) if (folder / INDEX).is_file() else []


def _rejected(folder: Path) -> set[str]:
    path = folder / "rejected.parquet"
    return {str(row["row"]) for row in read_table(path, REJECTED)} if path.is_file() else set()


def _tokens_of_split(split: str) -> int:
    schema = pa.schema([TOKENS.field("split"), TOKENS.field("length")])
    tables = [read_columns(part.path, schema) for part in _parts(TOKENS_OUT)]
    return sum(pc.sum(table.filter(pc.equal(table["split"], split))["length"]).as_py() or 0 for table in tables)


def read_past(params: Params) -> Past:
    """What the tables, the metrics and dvc.lock tell of an earlier run."""
    then, now = _settings_then(), params.model_dump(mode="json")
    made, own = then.get("generate", {}), now["generate"]
    same = all(made.get(name, own[name]) == own[name] for name in own if name not in ASKING)
    same = same and all(then.get(section, now[section]) == now[section] for section in ("verifier", "reasoning"))
    budget = mean(own["max_new_tokens"]) / mean(made.get("max_new_tokens", own["max_new_tokens"]))
    seen = counted_tokens() or _counted_answers() or _last_metrics()
    return Past(seen, same and any(map(_parts, (TOKENS_OUT, RESPONSES_OUT))), budget)


def _settings_then() -> dict[str, Any]:
    """The sections of params.yaml that `generate` last ran with, as dvc.lock has them."""
    try:
        lock = YAML(typ="safe", pure=True).load(LOCK.read_text())
        found: dict[str, Any] = lock["stages"]["generate"]["params"]["params.yaml"]
    except (OSError, YAMLError, KeyError, TypeError):
        return {}
    return found


def counted_tokens() -> Seen | None:
    """The sums of data/tokens, None where it is not there."""
    schema = pa.schema([TOKENS.field("prompt_length"), TOKENS.field("length")])
    tables = [read_columns(part.path, schema) for part in _parts(TOKENS_OUT)]
    rows = sum(table.num_rows for table in tables)
    prompt = sum(pc.sum(table["prompt_length"]).as_py() or 0 for table in tables)
    total = sum(pc.sum(table["length"]).as_py() or 0 for table in tables)
    return Seen(rows, prompt, total - prompt, str(TOKENS_OUT)) if rows else None


def _counted_answers() -> Seen | None:
    """The sums of data/responses, where its rows have ids."""
    names = ("prompt_token_ids", "output_token_ids")
    schema = pa.schema([RESPONSES.field(name) for name in names])
    tables = [read_columns(part.path, schema) for part in _parts(RESPONSES_OUT)]
    rows = sum(table.num_rows - table[names[1]].null_count for table in tables)
    prompt, answer = (sum(pc.sum(pc.list_value_length(table[name])).as_py() or 0 for table in tables) for name in names)
    return Seen(rows, prompt, answer, str(RESPONSES_OUT)) if rows and prompt else None


def _last_metrics() -> Seen | None:
    """The sums that the last run of `generate` wrote down; git keeps them where the tables are not."""
    found = read_metrics("generate")
    try:
        seen = Seen(
            found["rows_out"], found["prompt_tokens"], found["completion_tokens"], str(METRICS / "generate.json")
        )
    except KeyError:
        return None
    return seen if seen.rows else None


def read_metrics(stage: str) -> dict[str, Any]:
    """The metrics of a stage; empty where there are none."""
    try:
        found: dict[str, Any] = json.loads((METRICS / f"{stage}.json").read_text())
    except (OSError, ValueError):
        return {}
    return found


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
        "bytes": asdict(found.volume) | {"exact": found.exact},
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
    lines.append(f"  about {int(found.work.rows * disk.free / disk.needs):,} of {found.work.rows:,} rows would fit")
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
