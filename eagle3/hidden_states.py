"""data/hidden_states: which shards there must be, which the work store has, how one is begun and finished, the out.

A shard is one unit of work. Its key hashes everything that decides its values; its samples follow from the token table
alone (content-defined boundaries), so an unchanged stretch of the table is never recorded twice.
"""

import contextlib
import json
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

import pyarrow as pa
import torch

from eagle3.boundaries import cut_points
from eagle3.digests import canonical_json, digest, digest_file, digest_tokens
from eagle3.gates import Agreement, Problem, check_shard, evenly, judged_rows
from eagle3.params import ExtractParams
from eagle3.schemas import REJECTED, SCHEMA_VERSION, STATES, TOKENS
from eagle3.serving.recorder import Placement, StateRecorder, digest_ids
from eagle3.shards import DTYPES, ShardLayout, begin_shard, open_shard, sample_bytes, shard_layout
from eagle3.tables import INDEX, Account, PartRows, Row, new_folder, read_parts, write_table
from eagle3.verifier import VerifierIdentity
from eagle3.verifier_head import HeadWeights
from eagle3.workstore import link_or_copy, write_file

MIB = 1 << 20
FINISHING = 2  # recorded shards that wait for their gates and digest at a time
#: The columns of the token table that planning needs; the ids are read only for shards that are missing.
PLANNING = pa.schema([TOKENS.field(name) for name in ("sample_id", "sample_digest", "category", "split", "length")])
RECORDING = pa.schema([TOKENS.field(name) for name in (*PLANNING.names, "input_ids", "loss_mask", "greedy", "rebuilt")])


@dataclass(frozen=True)
class PlannedShard:
    """A shard that the out must have: the first `samples` rows that can be recorded, from `first_row` of the table on.

    Rows are counted from 0, those that cannot be recorded too.
    """

    key: str
    first_row: int
    samples: int
    tokens: int
    size: int  # bytes of the file

    @property
    def name(self) -> str:
        """For messages."""
        return f"shard {self.key[:16]}"


@dataclass(frozen=True)
class ShardFacts:
    """What is kept beside a finished shard. problems: quarantined samples by position."""

    sha256: str
    size: int
    modified_ns: int
    loss_tokens: tuple[int, ...]
    problems: dict[int, Problem]
    agreement: Agreement


def stored_dtype(identity: VerifierIdentity, extract: ExtractParams) -> str:
    """Name of the dtype in which states are stored: the verifier's own, which loses nothing, or fp8."""
    return "float8_e4m3fn" if extract.storage == "fp8" else identity.dtype


def layout_of(identity: VerifierIdentity, dtype: str, key: str, lengths: Sequence[int]) -> ShardLayout:
    """The layout of a shard of this verifier's states, metadata included. dtype: of `stored_dtype`."""
    metadata = {
        "schema_version": str(SCHEMA_VERSION),
        "key": key,
        "verifier_digest": identity.digest,
        "aux_layer_ids": canonical_json(list(identity.aux_layer_ids)),
        "hidden_size": str(identity.hidden_size),
        "dtype": dtype,
        "prenorm": "true",
        "engine": identity.engine,
    }
    return shard_layout(lengths, len(identity.aux_layer_ids), identity.hidden_size, DTYPES[dtype], metadata)


@dataclass(frozen=True)
class TokenTable:
    """data/tokens and the longest sample that can be recorded."""

    folder: Path
    max_length: int

    def rows(self, schema: pa.Schema, account: Account | None = None) -> Iterator[Row]:
        """The rows that can be recorded, in order; the same ones in every pass. The account is told of the others."""
        for row in read_parts(self.folder, schema):
            fits = self.fits(row)
            if account is not None:
                account.rows_in += 1
                if not fits:
                    limit = f"verifier.max_model_len is {self.max_length}"
                    account.reject(row["sample_id"], "too-long", f"{row['length']} tokens, {limit}")
            if fits:
                yield row

    def fits(self, row: Row) -> bool:
        """Whether a row can be recorded."""
        return 0 < int(row["length"]) <= self.max_length


def plan_shards(
    table: TokenTable, identity: VerifierIdentity, extract: ExtractParams, account: Account
) -> list[PlannedShard]:
    """The shards of a token table, in its order. Counts the rows in, and those out that are too long.

    account: of no rows yet. Memory: one shard's lengths and digests, and five numbers per shard.
    """
    held: list[tuple[int, Row]] = []
    layers, dtype = len(identity.aux_layer_ids), stored_dtype(identity, extract)

    def measured() -> Iterator[tuple[str, int]]:
        for row in table.rows(PLANNING, account):
            held.append((account.rows_in - 1, row))
            yield row["sample_digest"], sample_bytes(row["length"], layers, identity.hidden_size, DTYPES[dtype])

    plan = []
    for count in cut_points(measured(), int(extract.shard_min_mib * MIB), int(extract.shard_max_mib * MIB)):
        shard, held[:count] = held[:count], []
        kind = [SCHEMA_VERSION, identity.digest, list(identity.aux_layer_ids), dtype, identity.engine]
        key = digest([*kind, [row["sample_digest"] for _, row in shard]])
        lengths = [row["length"] for _, row in shard]
        plan.append(PlannedShard(key, shard[0][0], count, sum(lengths), layout_of(identity, dtype, key, lengths).size))
    return plan


class ShardStore:
    """Finished shards in the work folder: <key>.safetensors, and <key>.json, which is there before it.

    A context manager: what an interrupted run left half done is removed at both ends. Partial files have names of this
    run, so that an engine that outlives the run before finds none to write to.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._run = secrets.token_hex(4)

    def __enter__(self) -> "ShardStore":
        self._sweep()
        return self

    def __exit__(self, *_: object) -> None:
        self._sweep()

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def partial(self, key: str) -> Path:
        return self.folder / f"{key}.{self._run}.partial"

    def clear(self, key: str) -> None:
        """Remove what a lost worker has begun of a shard, and the room that it reserved."""
        for stray in self.folder.glob(f"{key}.*.partial"):
            stray.unlink(missing_ok=True)

    def _sweep(self) -> None:
        for stray in (*self.folder.glob("*.partial"), *self.folder.glob("*.tmp")):
            stray.unlink()

    def facts(self, planned: PlannedShard) -> ShardFacts | None:
        """The facts of a finished shard, or None when it is absent or damaged.

        The size and the header are always checked; the digest only when the file has another time than it was written
        at. (No clock is asked: that time is only compared with itself.)
        """
        path = self.path(planned.key)
        try:
            facts = _facts_from_json(path.with_suffix(".json").read_bytes())
            state = path.stat()
            if state.st_size != planned.size or facts.size != planned.size:
                return None
            shard = open_shard(path)
        except (OSError, ValueError):
            return None
        if len(facts.loss_tokens) != planned.samples or len(shard) != planned.samples:
            return None
        untouched = state.st_mtime_ns == facts.modified_ns or digest_file(path) == facts.sha256
        return facts if untouched and shard.metadata["key"] == planned.key else None

    def keep(self, key: str, problems: dict[int, Problem], agreement: Agreement) -> ShardFacts:
        """Take a complete partial file in: fsync, digest, the facts, and its name last. From then on it is finished."""
        partial, path = self.partial(key), self.path(key)
        shard = open_shard(partial)
        bounds = zip(shard.offsets, shard.offsets[1:], strict=False)
        loss_tokens = tuple(int(shard.loss_mask[start:end].sum()) for start, end in bounds)
        with ThreadPoolExecutor(1, "fsync") as threads:
            written = threads.submit(_fsync, partial)
            sha256 = digest_file(partial)  # while the disk is busy
            written.result()
        state = partial.stat()
        facts = ShardFacts(sha256, state.st_size, state.st_mtime_ns, loss_tokens, problems, agreement)
        write_file(path.with_suffix(".json"), _facts_to_json(facts))
        with contextlib.suppress(FileNotFoundError, PermissionError):  # absent as a rule, or another user's
            path.chmod(0o644)  # damaged, and with hard links an object of DVC's cache, which trusts what is read-only
        partial.replace(path)
        return facts


def missing_shards(
    store: ShardStore,
    plan: Sequence[PlannedShard],
    missing: set[str],
    table: TokenTable,
    identity: VerifierIdentity,
    extract: ExtractParams,
) -> Iterator["OpenShard"]:
    """Each shard whose key is in `missing`, once, begun when it is asked for. Memory: see ShardRows."""
    wanted = {planned.key: planned for planned in plan if planned.key in missing}
    yield from open_shards(store, wanted.values(), ShardRows(table), identity, extract)


class ShardRows:
    """The token rows of planned shards. Memory: one part of the table and one shard's rows."""

    def __init__(self, table: TokenTable):
        self._table, self._rows = table, PartRows(table.folder, RECORDING)

    def of(self, planned: PlannedShard) -> list[Row]:
        """The rows of a shard, in order."""
        rows = (row for _, row in self._rows.since(planned.first_row) if self._table.fits(row))
        return list(islice(rows, planned.samples))


def open_shards(
    store: ShardStore,
    shards: Iterable[PlannedShard],
    rows: ShardRows,
    identity: VerifierIdentity,
    extract: ExtractParams,
) -> Iterator["OpenShard"]:
    """Each of the shards, begun when it is asked for."""
    for planned in shards:
        yield open_new_shard(store, identity, planned, rows.of(planned), planned.first_row, extract)


@dataclass
class OpenShard:
    """A shard that is being recorded. pending: samples to submit, by position; left: how many are not done.

    choices: the engine's own, by position, of the samples that the verifier did not write; empty until told.
    """

    planned: PlannedShard
    path: Path
    greedy: list[bool]
    choices: dict[int, tuple[int, ...]]
    left: int
    problems: dict[int, Problem] = field(default_factory=dict)
    pending: list[tuple[int, list[int], Placement]] = field(default_factory=list)


def open_new_shard(
    store: ShardStore,
    identity: VerifierIdentity,
    planned: PlannedShard,
    rows: Sequence[Row],
    first_ordinal: int,
    extract: ExtractParams,
) -> OpenShard:
    """Create a partial file with everything but the states, and where each sample's states belong.

    extract.agreement_samples: so many of those that the verifier did not write are judged by the engine's own choices.
    Raises ValueError when the disk has no room, or when a row does not fit its digest.
    """
    path = store.partial(planned.key)
    for row in rows:
        if digest_tokens(row["input_ids"], row["loss_mask"]) != row["sample_digest"]:
            raise ValueError(
                f"sample {row['sample_id']}: ids or mask differ from sample_digest; `dvc repro` the tokens"
            )
    layout = layout_of(identity, stored_dtype(identity, extract), planned.key, [row["length"] for row in rows])
    assert layout.size == planned.size
    try:
        store.clear(planned.key)
        begin_shard(path, layout, [(row["input_ids"], row["loss_mask"]) for row in rows])
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ValueError(
            f"{path}: {error.strerror} while reserving {planned.size:,} bytes; free some room and run again, "
            "finished shards are kept"
        ) from None
    foreign = [position for position, row in enumerate(rows) if row["rebuilt"]]
    judged = set(evenly(torch.tensor(foreign), extract.agreement_samples).tolist())
    shard = OpenShard(planned, path, [bool(row["greedy"]) for row in rows], dict.fromkeys(foreign, ()), 0)
    for position, (row, start) in enumerate(zip(rows, layout.offsets, strict=False)):
        ids = row["input_ids"]
        if not all(0 <= token < identity.vocab_size for token in ids):
            shard.problems[position] = Problem("foreign-token", f"ids outside the vocabulary of {identity.vocab_size}")
            continue
        placement = Placement(
            first_ordinal + position,
            str(path),
            {name: layout.places[name].row_start(start) for name in layout.states},
            row["length"],
            digest_ids(ids),
            tuple(judged_rows(torch.tensor(row["loss_mask"])).tolist()) if position in judged else (),
        )
        shard.pending.append((position, ids, placement))
    shard.left = len(shard.pending)
    return shard


def record_shards(
    recorder: StateRecorder,
    shards: Iterable[OpenShard],
    window: int,
    finish: Callable[[OpenShard], ShardFacts],
    done: Callable[[PlannedShard, ShardFacts], None],
) -> None:
    """Stream shards through the engine, at most `window` samples at a time.

    `finish` is called for each whose samples are all written, in a thread of its own: the engine goes on meanwhile. It
    waits when FINISHING shards are to be finished. `done` is called here, in the order in which they were finished.
    """
    owners: dict[int, tuple[OpenShard, int, Placement]] = {}
    finishing: deque[tuple[PlannedShard, Future[ShardFacts]]] = deque()

    def collect(most: int) -> None:
        while len(finishing) > most or (finishing and finishing[0][1].done()):
            planned, future = finishing.popleft()
            done(planned, future.result())

    def finish_aside(shard: OpenShard) -> None:
        collect(FINISHING - 1)
        finishing.append((shard.planned, thread.submit(finish, shard)))

    def settle() -> None:
        for told in recorder.completions():
            shard, position, placement = owners.pop(told.ordinal)
            if told.problem is not None:
                shard.problems[position] = Problem("not-recorded", told.problem)
            elif len(told.choices) != len(placement.judged_rows):
                shard.problems[position] = Problem("not-recorded", "the engine did not tell its own choices")
            elif told.choices:
                shard.choices[position] = told.choices
            shard.left -= 1
            if not shard.left:
                finish_aside(shard)
        collect(FINISHING)

    with ThreadPoolExecutor(1, "finish") as thread:
        for shard in shards:
            if not shard.left:
                finish_aside(shard)
            while shard.pending:
                if recorder.outstanding >= window:
                    settle()
                    continue
                count = window - recorder.outstanding
                batch, shard.pending = shard.pending[:count], shard.pending[count:]
                owners |= {placement.ordinal: (shard, position, placement) for position, _, placement in batch}
                recorder.submit([(ids, placement) for _, ids, placement in batch])
        while recorder.outstanding:
            settle()
        collect(0)


def finish_shard(
    store: ShardStore, shard: OpenShard, identity: VerifierIdentity, head: HeadWeights, extract: ExtractParams
) -> ShardFacts:
    """Put a recorded shard through the gates and keep it. When the head disagrees: ValueError, and it is removed."""
    found, agreement = check_shard(
        open_shard(shard.path), shard.greedy, shard.choices, identity.aux_layer_ids, head, extract.agreement_samples
    )
    problems = found | shard.problems
    try:
        require_agreement(shard.planned.name, problems, agreement, extract)
    except ValueError as error:
        shard.path.unlink()
        raise ValueError(f"{error}. The shard was not kept") from None
    return store.keep(shard.planned.key, problems, agreement)


def require_agreement(what: str, problems: dict[int, Problem], agreement: Agreement, extract: ExtractParams) -> None:
    """Raise ValueError when the verifier's head does not explain the tokens of `what`."""
    if not agreement.falls_short(extract.min_head_agreement):
        return
    worst = [f"{position} ({problem.detail})" for position, problem in sorted(problems.items())][:5]
    raise ValueError(
        f"{what}: the verifier's head gives {agreement.share:.1%} of {agreement.rows} generated tokens, "
        f"extract.min_head_agreement is {extract.min_head_agreement:.1%}"
        + (f"; worst samples: {', '.join(worst)}" if worst else "")
        + ". Likely causes: the tokens come from another verifier or another revision of it, states of a wrong layer or"
        " after the final norm, shifted rows, swapped samples"
    )


def write_hidden_states(
    out: Path,
    table: TokenTable,
    store: ShardStore,
    recorded: Sequence[tuple[PlannedShard, ShardFacts]],
    account: Account,
) -> None:
    """Assemble the out: hard links to the shards, the rejected samples, and the index last. Settles the account."""
    with new_folder(out) as folder:
        rows = _index_rows(table.rows(PLANNING), recorded, account)
        write_table(folder / f".{INDEX}", rows, STATES)
        write_table(folder / "rejected.parquet", account.rejected, REJECTED)
        account.settle()
        for planned, facts in recorded:
            if len(facts.problems) < planned.samples:
                link_or_copy(store.path(planned.key), folder / store.path(planned.key).name)
        (folder / f".{INDEX}").replace(folder / INDEX)


def total_agreement(recorded: Sequence[tuple[PlannedShard, ShardFacts]]) -> Agreement:
    """Agreement over all shards of the out."""
    return sum((facts.agreement for _, facts in recorded), Agreement())


def shard_metrics(recorded: Sequence[tuple[PlannedShard, ShardFacts]]) -> dict[str, float]:
    """Finite numbers over all shards of the out."""
    size, tokens = sum(shard.size for shard, _ in recorded), sum(shard.tokens for shard, _ in recorded)
    agreement = total_agreement(recorded)
    return {
        "shards": len(recorded),
        "tokens": tokens,
        "bytes": size,
        "bytes_per_token": size / max(tokens, 1),
        "head_agreement": agreement.share,
        "head_agreement_rows": agreement.rows,
    }


def _index_rows(
    rows: Iterator[Row], recorded: Sequence[tuple[PlannedShard, ShardFacts]], account: Account
) -> Iterator[Row]:
    for planned, facts in recorded:
        start = 0
        for position, row in enumerate(islice(rows, planned.samples)):
            if problem := facts.problems.get(position):
                account.reject(row["sample_id"], problem.reason, problem.detail)
            else:
                account.rows_out += 1
                yield {
                    "sample_id": row["sample_id"],
                    "sample_digest": row["sample_digest"],
                    "category": row["category"],
                    "split": row["split"],
                    "shard": f"{planned.key}.safetensors",
                    "position": position,
                    "row_start": start,
                    "length": row["length"],
                    "loss_tokens": facts.loss_tokens[position],
                    "shard_bytes": facts.size,
                    "shard_sha256": facts.sha256,
                }
            start += row["length"]


def _facts_to_json(facts: ShardFacts) -> bytes:
    return (json.dumps(asdict(facts)) + "\n").encode()


def _facts_from_json(text: bytes) -> ShardFacts:
    """Raises ValueError for anything but our own JSON."""
    try:
        fields = json.loads(text)
        problems = {int(position): Problem(**problem) for position, problem in fields.pop("problems").items()}
        agreement = Agreement(**fields.pop("agreement"))
        return ShardFacts(
            **fields | {"loss_tokens": tuple(fields["loss_tokens"])}, problems=problems, agreement=agreement
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not the facts of a shard: {error}") from None


def _fsync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
