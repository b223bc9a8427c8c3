"""Recording the shards that the work store lacks: with one engine, or with a crew of workers that have one each.

A worker gets planned shards, reads their rows from the token table itself, and leaves finished shards in the work
store; only their facts come back.
"""

import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
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
from eagle3.params import EngineParams, ExtractParams, VerifierParams
from eagle3.serving.engine import runs_on_cpu, vllm_package
from eagle3.serving.executors import Crew, Desk, Finished, Lost, Ready, run
from eagle3.serving.process import ParentPipe
from eagle3.serving.recorder import StateRecorder
from eagle3.verifier import VerifierIdentity, locate_verifier
from eagle3.verifier_head import HeadWeights, load_head
from eagle3.workstore import work_root, write_file

WORKER = "eagle3.recording:work"


@dataclass(frozen=True)
class Recording:
    """What decides how shards are recorded, whoever records them."""

    identity: VerifierIdentity
    verifier: VerifierParams
    engine: EngineParams
    extract: ExtractParams

    def recorder(self, folder: Path, log_path: Path) -> StateRecorder:
        """A recording engine for the verifier in `folder`, not yet started."""
        return StateRecorder(
            self.verifier,
            self.engine,
            self.identity,
            folder,
            log_path,
            dtype=stored_dtype(self.identity, self.extract),
            max_pending_mib=self.extract.max_pending_mib,
            stall_timeout_s=self.extract.stall_timeout_s,
        )

    def stream(
        self,
        recorder: StateRecorder,
        shards: Iterator[OpenShard],
        store: ShardStore,
        head: HeadWeights,
        done: Callable[[PlannedShard, ShardFacts], None],
    ) -> None:
        """Record shards and keep them, with twice as many samples ahead as the engine computes at a time."""
        if runs_on_cpu():
            torch.set_num_threads(1)  # the engine has all cores; gates that spin on them would slow it down

        def finish(shard: OpenShard) -> ShardFacts:
            return finish_shard(store, shard, self.identity, head, self.extract)

        record_shards(recorder, shards, 2 * self.engine.max_num_seqs, finish, done)


Recorded = tuple[dict[str, ShardFacts], float]  # facts by key, and tokens per second without the engines' start


def record(store: ShardStore, shards: Iterator[OpenShard], total: int, recording: Recording, stage: str) -> Recorded:
    """Record shards with one engine. total: tokens of all. stage: for messages and the name of the log."""
    folder = locate_verifier(recording.verifier)
    head = load_head(folder)
    facts: dict[str, ShardFacts] = {}
    say(f"{stage}: starting the engine")
    with (
        recording.recorder(folder, work_root() / "logs" / f"{stage}.log") as recorder,
        Progress(stage, total, "tokens") as progress,
    ):
        started = time.monotonic()

        def done(planned: PlannedShard, its: ShardFacts) -> None:
            facts[planned.key] = its
            progress.advance(planned.tokens, f"{len(facts)} shards")

        recording.stream(recorder, shards, store, head, done)
        return facts, total / (time.monotonic() - started)


@dataclass(frozen=True)
class Job:
    """What a worker needs besides its shards. Paths are absolute and the same for all, wherever a worker is.

    package: name and version of vLLM. mark: a file of this run in the work store.
    """

    recording: Recording
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
    store: ShardStore, missing: Sequence[PlannedShard], table: TokenTable, recording: Recording
) -> Recorded:
    """Record shards with extract.workers workers of extract.executor, from the first engine that runs on."""
    mark = store.folder.absolute() / f"{secrets.token_hex(8)}.tmp"
    logs = work_root().absolute() / "logs"
    shared_table = TokenTable(table.folder.absolute(), table.max_length)
    folder = locate_verifier(recording.verifier)
    job = Job(recording, vllm_package(), shared_table, folder, store.folder.absolute(), mark, logs)
    extract = recording.extract
    crew = Crew(
        "extract", WORKER, (job,), extract.workers, recording.engine.tensor_parallel_size, "extract.workers", logs
    )
    facts: dict[str, ShardFacts] = {}
    total = sum(shard.tokens for shard in missing)
    say(f"extract: starting {extract.workers} workers ({extract.executor}); logs: {logs}/extract-*.log")
    write_file(mark, b"")
    progress: Progress | None = None
    started, seconds = time.monotonic(), 0.0
    events = run(missing, crew, extract.executor, extract.ray_address)
    with ExitStack() as stack:
        stack.enter_context(closing(events))
        for event in events:
            if isinstance(event, Finished):
                assert progress is not None
                facts[event.unit.key] = event.result
                progress.advance(event.unit.tokens, f"{len(facts)} shards")
                seconds = time.monotonic() - started  # ending the engines does not count either
                continue
            say(_news(event))
            if isinstance(event, Ready) and progress is None:
                progress = stack.enter_context(Progress("extract", total, "tokens"))
                started = time.monotonic()
        return facts, total / seconds


def _news(event: Ready | Lost) -> str:
    if isinstance(event, Ready):
        return f"extract: worker {event.number} records"
    others = f"its {event.units} unfinished shards go to others; " if event.units else ""
    return f"extract: worker {event.number} was lost, {others}it is started again ({event.reason})"


def work(pipe: ParentPipe, number: int, job: Job) -> None:
    """A worker of the crew: an engine that is kept busy with one planned shard after the other."""
    job.require_same_place()
    desk, store, rows = Desk(pipe), ShardStore(job.store), ShardRows(job.table)
    identity, extract = job.recording.identity, job.recording.extract
    head = load_head(job.verifier)

    def unfinished(given: Iterable[PlannedShard]) -> Iterator[PlannedShard]:
        for planned in given:
            there = store.facts(planned)  # of a worker that was lost before it could tell
            if there is None:
                yield planned
            else:
                require_agreement(planned.name, there.problems, there.agreement, extract)
                desk.done(planned, there)

    with job.recording.recorder(job.verifier, job.logs / f"extract-{number}.log") as recorder:
        while True:
            given = chain([desk.wait()], iter(desk.take, None))
            shards = open_shards(store, unfinished(given), rows, identity, extract)
            job.recording.stream(recorder, shards, store, head, desk.done)
