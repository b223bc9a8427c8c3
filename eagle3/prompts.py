"""Prompt records to prompt rows: three shapes, one meaning; filters, deduplication, split.

A record's shape follows from its keys:  `messages` (role, content), `conversations` (ShareGPT: from, value), or plain
text in the source's `text_column`. A `system` field is the system prompt in all three. Accepted is an optional system
turn, then user and assistant in turn, all of them text; everything else is rejected by name, never repaired.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from eagle3 import schemas
from eagle3.console import visible
from eagle3.digests import digest, fraction
from eagle3.params import PromptsParams, SourceParams
from eagle3.sources import RawRow, read_rows
from eagle3.tables import Account, Row
from eagle3.workstore import naming

SPLITS = ("train", "validation", "evaluation")
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
}
TOOL_ROLES = {"tool", "function", "function_call", "observation", "ipython"}
TOOL_KEYS = ("tools", "functions")
TOOL_CALL_KEYS = ("tool_calls", "function_call")
FORMATS = "messages (role, content), conversations (from, value), or a text column"

#: A source without a single record of an accepted shape in so many rows is refused as a whole.
SHAPE_ROWS = 20


class Unfit(Exception):
    """A record that cannot become a prompt; `shape` when its very form is unknown."""

    def __init__(self, reason: str, detail: str = "", *, shape: bool = False):
        super().__init__(reason)
        self.reason, self.detail, self.shape = reason, detail, shape


class Turn(NamedTuple):
    role: str  # system | user | assistant
    content: str  # may be empty


@dataclass(frozen=True)
class Prompt:
    """What the verifier is asked, and the human answer if there is one."""

    turns: list[Turn]  # [system], then user and assistant in turn, ending with user; none empty
    reference: str | None
    category: str | None  # as the record says

    @property
    def prompt_id(self) -> str:
        """SHA-256 of the messages."""
        return digest([[turn.role, turn.content] for turn in self.turns])

    @property
    def group(self) -> str:
        """SHA-256 of the first user turn, ignoring case and spacing: near-identical prompts share it."""
        first = next(turn.content for turn in self.turns if turn.role == "user")
        return digest(" ".join(first.lower().split()))


def parse_prompt(record: dict[str, Any], source: SourceParams, multi_turn: str) -> Prompt:
    """One record as a prompt. Raises Unfit with the reason otherwise."""
    for key in TOOL_KEYS:
        if record.get(key) not in (None, "", "[]", [], {}):
            raise Unfit("tool calls", f"the row has {key}")
    category = _optional_text(record, "category")
    reference = _optional_text(record, source.reference_column) if source.reference_column else None
    system = _optional_text(record, "system")
    if record.get("messages") is not None:
        turns = _turns(record["messages"], "messages")
    elif record.get("conversations") is not None:
        turns = _turns(record["conversations"], "conversations")
    elif record.get(source.text_column) is not None:
        turns = [Turn("user", _text(record[source.text_column]))]
    elif source.text_column in record:
        raise Unfit("empty content", f"{source.text_column} is null")
    else:
        raise Unfit("unknown format", f"keys: {', '.join(record) or 'none'}", shape=True)
    turns, answer = _cut(_with_system(turns, system), multi_turn)
    return Prompt(turns, answer or reference, category)


def _optional_text(record: dict[str, Any], key: str) -> str | None:
    value = record.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    return _text(value) or None if value is not None else None


def _text(value: Any) -> str:
    """Text, verbatim but for outer whitespace and CRLF; the text parts of a content list are joined by line breaks."""
    if isinstance(value, list):
        return _text("\n".join(map(_part, value)))
    if not isinstance(value, str):
        raise Unfit("content is not text", f"found {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Unfit("lone surrogate", f"character {error.start + 1}") from None
    return value.replace("\r\n", "\n").strip()


def _part(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(part, str):
        return part
    raise Unfit("content is not text", f"a part of type {part.get('type') if isinstance(part, dict) else type(part)}")


def _turns(messages: Any, key: str) -> list[Turn]:
    if not isinstance(messages, list):
        raise Unfit("unknown format", f"{key} is {type(messages).__name__}, not a list", shape=True)
    if not messages:
        raise Unfit("no messages", f"{key} is empty")
    return [_turn(message, f"{key}[{i}]") for i, message in enumerate(messages)]


def _turn(message: Any, name: str) -> Turn:
    if not isinstance(message, dict):
        raise Unfit("unknown format", f"{name} is {type(message).__name__}, not an object", shape=True)
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    if not isinstance(role, str):
        raise Unfit("unknown format", f"{name} has no role; keys: {', '.join(message)}", shape=True)
    role = role.strip().lower()
    if role in TOOL_ROLES or any(message.get(call) for call in TOOL_CALL_KEYS):
        raise Unfit("tool calls", f"{name}, role {role}")
    if role not in ROLES:
        raise Unfit("unknown role", f"{name}: {role}")
    return Turn(ROLES[role], _text(content) if content is not None else "")


def _with_system(turns: list[Turn], system: str | None) -> list[Turn]:
    """The turns with the `system` field in front; raises Unfit unless system comes first and the others alternate."""
    if system is not None:
        if turns[0].role == "system" and turns[0].content != system:
            raise Unfit("two system prompts", "the system field and the first message differ")
        turns = [Turn("system", system), *(turns[1:] if turns[0].role == "system" else turns)]
    spoken = turns[1:] if turns[0].role == "system" else turns
    if not spoken:
        raise Unfit("no user turn")
    if spoken[0].role == "assistant":
        raise Unfit("assistant first")
    for i, turn in enumerate(spoken):
        if turn.role != ("user", "assistant")[i % 2]:
            raise Unfit("turns do not alternate", f"turn {i + 1} after the system prompt is {turn.role}")
    return turns


def _cut(turns: list[Turn], multi_turn: str) -> tuple[list[Turn], str | None]:
    """The turns up to the first or last user turn, and the answer behind it (null when it is missing or empty)."""
    users = [i for i, turn in enumerate(turns) if turn.role == "user"]
    end = (users[0] if multi_turn == "first" else users[-1]) + 1
    for i, turn in enumerate(turns[:end]):
        if not turn.content:
            raise Unfit("empty content", f"turn {i + 1}, {turn.role}")
    answer = turns[end].content if end < len(turns) else None
    return turns[:end], answer or None


def split_of(group: str, params: PromptsParams) -> str:
    """Split of a group, a pure function of its text and the seed: other prompts never move it."""
    place = fraction(digest([params.seed, group]))
    if place < params.evaluation_share:
        return "evaluation"
    return "validation" if place < params.evaluation_share + params.validation_share else "train"


@dataclass
class Collector:
    """Walks the sources and yields prompt rows; counts every record in, out or rejected.

    Memory: a digest per distinct prompt, and another for those of sources that are fixed to a split.
    """

    params: PromptsParams
    account: Account
    bytes_read: int = 0
    _seen: dict[bytes, str] = field(default_factory=dict)  # prompt id -> split
    _repeats: dict[bytes, int] = field(default_factory=dict)  # prompt id -> how often, where more than once
    _reserved: dict[bytes, str] = field(default_factory=dict)  # group -> the split that its source is fixed to

    def __post_init__(self) -> None:
        if self.params.validation_share + self.params.evaluation_share >= 1:
            raise ValueError("prompts.validation_share and prompts.evaluation_share leave nothing to train on")
        names = [source.name for source in self.params.sources]
        if len(set(names)) < len(names):
            raise ValueError(f"prompts.sources: names must differ, found {', '.join(names)}")

    def rows(self) -> Iterator[Row]:
        """Rows of schemas.PROMPTS in source order."""
        self._reserve()
        for source in self.params.sources:
            for raw, prompt in self._prompts(source):
                row = self._admit(source, raw, prompt)
                if row is not None:
                    self.account.rows_out += 1
                    yield row

    def _reserve(self) -> None:
        """Note the groups of sources that are fixed to a split: their near-identical prompts elsewhere must follow.

        Where two such sources share a group, evaluation owns it before validation, and validation before train.
        """
        if len(self.params.sources) == 1:
            return
        for split in reversed(SPLITS):
            for source in self.params.sources:
                if source.split == split:
                    for _, prompt in Collector(self.params, Account("prompts", 1))._prompts(source):
                        self._reserved.setdefault(bytes.fromhex(prompt.group), split)

    def _prompts(self, source: SourceParams) -> Iterator[tuple[RawRow, Prompt]]:
        """Prompts of one source with their raw rows; unfit records go to the account."""
        columns = {"messages", "conversations", "system", "category", source.text_column, *TOOL_KEYS}
        columns |= {source.reference_column} if source.reference_column else set()
        shaped = count = 0
        last, place = Unfit(""), source.path
        for raw in read_rows(Path(source.path), columns):
            if count == source.limit:
                return
            count += 1
            self.account.rows_in += 1
            self.bytes_read += raw.size
            place = f"{source.path}:{raw.number}"
            try:
                if raw.record is None:
                    raise Unfit(raw.reason, raw.detail, shape=True)
                prompt = parse_prompt(raw.record, source, self.params.multi_turn)
            except Unfit as unfit:
                shaped += not unfit.shape
                if unfit.shape and not shaped and count >= SHAPE_ROWS:
                    raise _no_shape(source, place, unfit) from None
                self.account.reject(place, unfit.reason, visible(unfit.detail))
                last = unfit
            else:
                shaped += 1
                yield raw, prompt
        if not count:
            raise ValueError(f"{source.path}: nothing but blank lines")
        if not shaped:
            raise _no_shape(source, place, last)

    def _admit(self, source: SourceParams, raw: RawRow, prompt: Prompt) -> Row | None:
        """The row of one prompt, or None when a filter rejected it."""
        place, params = f"{source.path}:{raw.number}", self.params
        characters = sum(len(turn.content) for turn in prompt.turns)
        if not params.min_characters <= characters <= params.max_characters:
            reason = "too short" if characters < params.min_characters else "too long"
            self.account.reject(place, reason, f"{characters} characters")
            return None
        owner = self._reserved.get(bytes.fromhex(prompt.group))
        split = (owner or split_of(prompt.group, params)) if source.split == "auto" else source.split
        if owner not in (None, split):
            self.account.reject(place, f"reserved for {owner}", f"also in a source fixed to {owner}", tolerated=True)
            return None
        name = self._unique(prompt.prompt_id, split)
        if name is None:
            self.account.reject(place, "duplicate", prompt.prompt_id, tolerated=True)
            return None
        return {
            "prompt_id": name,
            "source": source.name,
            "source_row": raw.number,
            "category": source.category or prompt.category or source.name,
            "split": split,
            "messages": [turn._asdict() for turn in prompt.turns],
            "reference": prompt.reference,
        }

    def _unique(self, prompt_id: str, split: str) -> str | None:
        """The id, with -2, -3 ... behind it for repeats where they are wanted; None for one that is not."""
        key = bytes.fromhex(prompt_id)
        if key not in self._seen:
            self._seen[key] = split
            return prompt_id
        assert self._seen[key] == split, f"prompt {prompt_id} would stand in {self._seen[key]} and in {split}"
        if self.params.deduplicate:
            return None
        self._repeats[key] = self._repeats.get(key, 1) + 1
        return f"{prompt_id}-{self._repeats[key]}"


def _no_shape(source: SourceParams, place: str, unfit: Unfit) -> ValueError:
    return ValueError(
        f"{place}: {unfit.reason} ({visible(unfit.detail)}), as in every row before it; accepted are {FORMATS} "
        f"(prompts.sources: {source.name}: text_column is {source.text_column})"
    )


Counts = Counter[tuple[str, str]]


def write_splits(folder: Path, rows: Iterable[Row], batch_rows: int = 1000) -> Counts:
    """Write rows to `folder`/{train,validation,evaluation}.parquet in one pass; returns rows by (category, split).

    All three are written aside and renamed when the last row is in. Memory: one batch per split.
    """
    folder.mkdir(parents=True, exist_ok=True)
    aside = {split: folder / f".{split}.parquet.tmp" for split in SPLITS}
    held: dict[str, list[Row]] = {split: [] for split in SPLITS}
    counts: Counts = Counter()
    try:
        with naming(folder), ExitStack() as stack:
            writers = {
                split: stack.enter_context(pq.ParquetWriter(path, schemas.PROMPTS, compression="zstd"))
                for split, path in aside.items()
            }
            for row in rows:
                counts[row["category"], row["split"]] += 1
                batch = held[row["split"]]
                batch.append(row)
                if len(batch) == batch_rows:
                    writers[row["split"]].write_table(pa.Table.from_pylist(batch, schema=schemas.PROMPTS))
                    batch.clear()
            for split, batch in held.items():
                writers[split].write_table(pa.Table.from_pylist(batch, schema=schemas.PROMPTS))
        for split, path in aside.items():
            path.replace(folder / f"{split}.parquet")
    finally:
        for path in aside.values():
            path.unlink(missing_ok=True)
    return counts


def count_metrics(counts: Counts, categories: int = 100) -> dict[str, Any]:
    """Rows by split, and by category and split for the largest categories; the others are summed up as `other`."""
    sizes: Counter[str] = Counter()
    for (category, _), count in counts.items():
        sizes[category] += count
    named = {category for category, _ in sizes.most_common(categories)}
    table: dict[str, dict[str, int]] = {category: dict.fromkeys(SPLITS, 0) for category in sorted(named)}
    for (category, split), count in counts.items():
        row = table.setdefault(category if category in named else "other", dict.fromkeys(SPLITS, 0))
        row[split] += count
    splits = {split: sum(row[split] for row in table.values()) for split in SPLITS}
    return {"splits": splits, "categories": table}
