"""Recording the shards that the work store lacks: with one engine, or with a crew of workers that have one each.

A worker gets planned shards, reads their rows from the token table itself, and leaves finished shards in the work
store; only their facts come back.
"""

import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from eagle3.console import Progress, say
from eagle3.hidden_states import (
    OpenShard,
    PlannedShard,
    ShardFacts,
    ShardRows,
    ShardStore,
    TokenTable,
    finish_shard,
    open_shards,
    record_shards,
    require_agreement,
    stored_dtype,
)
from eagle3.params import Params
from eagle3.serving.engine import runs_on_cpu, vllm_package
from eagle3.serving.executors import Crew, Desk, Finished, Lost, Ready, run
from eagle3.serving.process import ParentPipe
from eagle3.serving.recorder import StateRecorder
from eagle3.verifier import VerifierIdentity, load_head, locate_verifier
from eagle3.workstore import work_root, write_file

WORKER = "eagle3.recording:work"


def record(
    store: ShardStore, shards: Iterator[OpenShard], total: int, identity: VerifierIdentity, params: Params
) -> tuple[dict[str, ShardFacts], float]:
    """Record shards with one engine; their facts by key, and tokens per second without its start.

    total: tokens of all shards.
    """
    folder = locate_verifier(params.verifier)
    head = load_head(folder)
    facts: dict[str, ShardFacts] = {}
    recorder = recorder_of(params, identity, folder, work_root() / "logs" / "extract.log")
    leave_cores_to_the_engine()
    say("extract: starting the engine")
    with recorder, Progress("extract", total, "tokens") as progress:
        started = time.monotonic()

        def finish(shard: OpenShard) -> None:
            facts[shard.planned.key] = finish_shard(store, shard, identity, head, params.extract)
            progress.advance(shard.planned.tokens, f"{len(facts)} shards")

        record_shards(recorder, shards, window(params), finish)
        return facts, total / (time.monotonic() - started)


def recorder_of(params: Params, identity: VerifierIdentity, folder: Path, log_path: Path) -> StateRecorder:
    """A recording engine for the verifier in `folder`, not yet started."""
    return StateRecorder(
        params.verifier,
        params.engine,
        identity,
        folder,
        log_path,
        dtype=stored_dtype(identity, params.extract),
        max_pending_mib=params.extract.max_pending_mib,
        stall_timeout_s=params.extract.stall_timeout_s,
    )


def window(params: Params) -> int:
    """Samples that an engine is given ahead: twice what it computes at a time."""
    return 2 * params.engine.max_num_seqs


def leave_cores_to_the_engine() -> None:
    """Gates that spin on all cores would slow an engine down that computes there."""
    if runs_on_cpu():
        torch.set_num_threads(1)


@dataclass(frozen=True)
class Job:
    """What a worker needs besides its shards. Paths are absolute and the same for all, wherever a worker is.

    package: name and version of vLLM. mark: a file of this run in the work store.
    """

    params: Params
    identity: VerifierIdentity
    package: tuple[str, str]
    table: TokenTable
    verifier: Path
    store: Path
    mark: Path
    logs: Path

    def require_same_place(self) -> None:
        """Raise ValueError on a machine that has another disk or another vLLM than the stage."""
        here = socket.gethostname()
        for path in (self.mark, self.table.folder, self.verifier):
            if not path.exists():
                raise ValueError(
                    f"{path} is not there on {here}: the project, the work store (EAGLE3_WORK_DIR) and the verifier "
                    "must lie on a disk that all machines share, under the same path"
                )
        if vllm_package() != self.package:
            raise ValueError(
                f"{' '.join(vllm_package())} is installed on {here}, and {' '.join(self.package)} where the stage runs"
            )


def record_with_crew(
    store: ShardStore, missing: Sequence[PlannedShard], table: TokenTable, identity: VerifierIdentity, params: Params
) -> tuple[dict[str, ShardFacts], float]:
    """As `record`, with extract.workers workers of extract.executor. Seconds count from the first engine that runs."""
    mark = store.folder.absolute() / f"{secrets.token_hex(8)}.tmp"
    logs = work_root().absolute() / "logs"
    job = Job(
        params,
        identity,
        vllm_package(),
        TokenTable(table.folder.absolute(), table.max_length),
        locate_verifier(params.verifier),
        store.folder.absolute(),
        mark,
        logs,
    )
    extract, tensor_parallel_size = params.extract, params.engine.tensor_parallel_size
    crew = Crew("extract", WORKER, (job,), extract.workers, tensor_parallel_size, "extract.workers", logs)
    facts: dict[str, ShardFacts] = {}
    total = sum(shard.tokens for shard in missing)
    say(f"extract: starting {extract.workers} workers ({extract.executor}); logs: {logs}/extract-*.log")
    write_file(mark, b"")
    started: float | None = None
    events = run(missing, crew, extract.executor, extract.ray_address)
    with closing(events), Progress("extract", total, "tokens") as progress:
        for event in events:
            if isinstance(event, Finished):
                facts[event.unit.key] = event.result
                progress.advance(event.unit.tokens, f"{len(facts)} shards")
            else:
                say(_news(event))
            if isinstance(event, Ready) and started is None:
                started = time.monotonic()
        assert started is not None
        return facts, total / (time.monotonic() - started)


def _news(event: Ready | Lost) -> str:
    if isinstance(event, Ready):
        return f"extract: worker {event.number} records"
    others = f"its {event.units} unfinished shards go to others; " if event.units else ""
    return f"extract: worker {event.number} was lost, {others}it is started again ({event.reason})"


def work(pipe: ParentPipe, number: int, job: Job) -> None:
    """A worker of the crew: an engine that is kept busy with one planned shard after the other."""
    desk, store, rows = Desk(pipe), ShardStore(job.store), ShardRows(job.table)
    params, identity = job.params, job.identity
    job.require_same_place()
    head = load_head(job.verifier)
    leave_cores_to_the_engine()

    def unfinished(planned_shards: Iterator[PlannedShard]) -> Iterator[PlannedShard]:
        for planned in planned_shards:
            there = store.facts(planned)  # of a worker that was lost before it could tell
            if there is None:
                yield planned
            else:
                require_agreement(planned.key, there.problems, there.agreement, params.extract)
                desk.done(planned, there)

    def finish(shard: OpenShard) -> None:
        desk.done(shard.planned, finish_shard(store, shard, identity, head, params.extract))

    with recorder_of(params, identity, job.verifier, job.logs / f"extract-{number}.log") as recorder:
        while True:
            given = unfinished(chain([desk.wait()], iter(desk.take, None)))
            shards = open_shards(store, given, rows, identity, params.extract)
            record_shards(recorder, shards, window(params), finish)
