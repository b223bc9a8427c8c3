"""What the stages have before them: rows and tokens, counted or expected, and from what.

The best thing that is there decides: the tables, where they are of today's prompts and settings; else the means of
their rows, or of the metrics of another run; else a bound that params.yaml sets. Numbers that are given come first.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from eagle3.params import Params
from eagle3.probe import Probed
from eagle3.room import Storage
from eagle3.schemas import PROMPTS, REJECTED, RESPONSES, TOKENS, sample_name
from eagle3.tables import INDEX, Part, list_parts, read_columns, read_table

PROMPTS_OUT, RESPONSES_OUT, TOKENS_OUT = Path("data/prompts"), Path("data/responses"), Path("data/tokens")
METRICS, LOCK = Path("data/metrics"), Path("dvc.lock")
SPLITS = ("train", "validation")
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


@dataclass(frozen=True)
class Workload:
    """What the stages have before them. rows, tokens: of all that will be recorded; unanswered: of these, answer
    tokens that are still to be written; train_tokens: of the train split.

    counted: all of it stands in data/tokens. standing: what stands there stays. source: where the numbers come from.
    """

    rows: int
    prompt_tokens: int
    answer_tokens: int
    unanswered: int
    train_tokens: int
    counted: bool
    standing: bool
    source: str

    @property
    def tokens(self) -> int:
        """Of prompts and answers."""
        return self.prompt_tokens + self.answer_tokens


@dataclass(frozen=True)
class Seen:
    """Rows of a table or of the metrics of a run: sums."""

    rows: int
    prompt_tokens: int
    answer_tokens: int
    source: str


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
                seen.rows, seen.prompt_tokens, seen.answer_tokens, 0, train, True, True, f"counted in {TOKENS_OUT}"
            )
    else:
        rows, train_share = asked.rows, _train_share(params)
        unanswered = max(0, rows - past.seen.rows) if past.standing and past.seen else rows
    prompt, answer, source = _means(params, asked, past)
    return Workload(
        rows,
        round(rows * prompt),
        round(rows * answer),
        round(unanswered * answer * (1 - params.generate.reference_share)),
        round(rows * (prompt + answer) * train_share),
        False,
        past.standing and asked.prompt_tokens is None and asked.answer_tokens is None,
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
        prompt, answer = _text_tokens()
        source = f"guessed at {TEXT_BYTES_PER_TOKEN} bytes of text a token"
        if params.generate.reference_share < 1:
            answer = mean(params.generate.max_new_tokens)
            source = f"at most, from generate.max_new_tokens and {TEXT_BYTES_PER_TOKEN} bytes of prompt a token"
    longest = params.verifier.max_model_len
    prompt = min(prompt, longest) if asked.prompt_tokens is None else asked.prompt_tokens
    answer = min(answer, max(0, longest - prompt)) if asked.answer_tokens is None else asked.answer_tokens
    return prompt, answer, source


def mean(value: int | list[int]) -> float:
    """Of a setting that is a number or a list of which one is drawn for each answer."""
    return sum(value) / len(value) if isinstance(value, list) else value


def _text_tokens() -> tuple[float, float]:
    """Mean tokens of a prompt and of a human answer, guessed from their text."""
    schema = pa.schema([PROMPTS.field("messages"), PROMPTS.field("reference")])
    prompt = answer = rows = 0
    for split in SPLITS:
        for row in read_table(_prompts(split), schema):
            rows += 1
            prompt += sum(_bytes(message["content"]) for message in row["messages"])
            answer += _bytes(row["reference"] or "")
    return prompt / TEXT_BYTES_PER_TOKEN / max(1, rows), answer / TEXT_BYTES_PER_TOKEN / max(1, rows)


def _bytes(text: str) -> int:
    return len(text.encode(errors="replace"))


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
    samples = range(params.generate.samples_per_prompt if params.generate.reference_share == 0 else 1)
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
