"""What the store of hidden states makes of a disk: its writer and its reader against the disk's own sequential rates.

    python -m benchmarks.store [--folder DIR] [--gib 2] [--hidden-size 4096] [--rounds 5]

Writer: everything of `extract` between a model and finished shards, with an engine whose model takes no time. Shards
are begun, states copied out of a paged cache and written to their places by the plug-in's threads, every shard then
fsynced, digested, renamed, and its facts written. Only the gates are left out: they look at values, and these are
random. Against: the same number of bytes, into one file, fsync at the end.

Reader: one epoch of the trainer's batches (random order, packed, checked to be finite) with nobody who trains on them,
from shards that were dropped from the page cache. Against: the same files read from end to end, dropped before too.

The arms take turns, in pairs whose order alternates. The last line of output is one JSON object; writer_ratio (should
be 0.7 or more) and reader_ratio (0.8) are medians over the rounds. from_disk: least share of the bytes of a reading
round that really came from the disk.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.disk import bytes_from_disk, drop_from_cache, read_sequentially, write_sequentially
from benchmarks.project import ROOT
from eagle3.draft import data
from eagle3.draft.data import BatchStream, Corpus, plan_epoch, read_corpus
from eagle3.gates import Agreement
from eagle3.hidden_states import (
    OpenShard,
    PlannedShard,
    ShardFacts,
    ShardStore,
    TokenTable,
    missing_shards,
    plan_shards,
    record_shards,
    write_hidden_states,
)
from eagle3.params import Params, load_params
from eagle3.reasoning import NO_MARKERS
from eagle3.recording import Recording
from eagle3.serving import recorder
from eagle3.tables import Account
from eagle3.verifier import VerifierIdentity
from tests.token_tables import token_row, write_tokens

SHORTEST, LONGEST, PROMPT = 400, 1000, 100
LAYERS = 3
GIB = 1 << 30


@dataclass
class Bench:
    """Synthetic samples of about the wanted size, and what the stage needs to record them."""

    folder: Path
    params: Params
    identity: VerifierIdentity
    table: TokenTable

    @property
    def out(self) -> Path:
        return self.folder / "hidden_states"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="an existing folder on the disk in question; else a temporary one")
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    recorder.ENGINE = "benchmarks.instant_engine:run_engine"
    with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
        bench = make_bench(Path(temporary), given.hidden_size, int(given.gib * GIB))
        plan = plan_shards(bench.table, bench.identity, bench.params.extract, Account("extract", 0))
        size = sum(shard.size for shard in plan)
        ours, disk = in_turns(given.rounds, lambda: write_shards(bench, plan), lambda: write_file(bench, size))
        writing = numbers("writer", "write", size, ours, disk)
        corpus = read_corpus(bench.out, bench.identity)
        shards = [bench.out / name for name in sorted({ref.shard for ref in corpus.train})]
        fresh: list[float] = []
        ours, disk = in_turns(
            given.rounds,
            lambda: from_disk(lambda: read_epoch(corpus, bench.params), shards, size, fresh),
            lambda: from_disk(lambda: read_sequentially(shards), shards, size, fresh),
        )
        reading = numbers("reader", "read", size, ours, disk) | {"from_disk": round(min(fresh), 3)}
    print(json.dumps(writing | reading | {"bytes": size, "shards": len(plan), "hidden_size": given.hidden_size}))


def in_turns(rounds: int, *arms: Callable[[], float]) -> list[list[float]]:
    """Seconds of each arm in each round; the order alternates. A round before the first one is not counted."""
    for arm in arms:
        arm()
    seconds: list[list[float]] = [[] for _ in arms]
    for number in range(rounds):
        order = range(len(arms)) if number % 2 else reversed(range(len(arms)))
        for place in order:
            seconds[place].append(arms[place]())
        print(f"round {number + 1}: {', '.join(f'{told[-1]:.2f} s' for told in seconds)}", flush=True)
    return seconds


def numbers(name: str, verb: str, size: int, ours: list[float], disk: list[float]) -> dict[str, Any]:
    """The ratio of rates and the rates themselves, from the seconds of each round."""
    ratios = [other / own for own, other in zip(ours, disk, strict=True)]
    return {
        f"{name}_ratio": round(statistics.median(ratios), 4),
        f"{name}_rounds": [round(ratio, 4) for ratio in ratios],
        f"{name}_mb_per_second": round(size / statistics.median(ours) / 1e6),
        f"disk_{verb}_mb_per_second": round(size / statistics.median(disk) / 1e6),
    }


def make_bench(folder: Path, hidden: int, size: int) -> Bench:
    """Samples of random ids whose states take about `size` bytes in bfloat16."""
    params = load_params(ROOT / "params.yaml")
    identity = VerifierIdentity(
        name="random",
        digest="0" * 64,
        architecture="RandomForCausalLM",
        hidden_size=hidden,
        num_layers=8,
        vocab_size=1000,
        max_position_embeddings=LONGEST + 1,
        rms_norm_eps=1e-5,
        aux_layer_ids=(2, 4, 5),
        stop_token_ids=(0,),
        dtype="bfloat16",
        engine="benchmark",
        markers=NO_MARKERS,
    )
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"hidden_size": hidden}))
    choice = random.Random(0)
    left, rows = size // (2 * hidden * (LAYERS + 1)), []
    while left > 0:
        rows.append(token_row([choice.randrange(1000) for _ in range(choice.randrange(SHORTEST, LONGEST))], PROMPT))
        left -= rows[-1]["length"]
    table = TokenTable(write_tokens(folder / "tokens", rows), LONGEST)
    verifier = params.verifier.model_copy(update={"max_model_len": LONGEST, "dtype": "bfloat16"})
    return Bench(folder, params.model_copy(update={"verifier": verifier}), identity, table)


def write_shards(bench: Bench, plan: list[PlannedShard]) -> float:
    """Seconds to write all shards anew; they end up in bench.out."""
    facts: dict[str, ShardFacts] = {}
    folder = bench.folder / "work"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    shutil.rmtree(bench.out, ignore_errors=True)  # the other arm's memory is free before it starts, too
    os.sync()
    with ShardStore(folder) as store:

        def finish(shard: OpenShard) -> ShardFacts:
            return store.keep(shard.planned.key, shard.problems, Agreement())

        def done(planned: PlannedShard, its: ShardFacts) -> None:
            facts[planned.key] = its

        way = Recording(bench.identity, bench.params.verifier, bench.params.engine, bench.params.extract)
        recording = way.recorder(bench.folder / "model", bench.folder / "engine.log")
        keys = {shard.key for shard in plan}
        with recording:
            started = time.monotonic()
            shards = missing_shards(store, plan, keys, bench.table, bench.identity, bench.params.extract)
            record_shards(recording, shards, 2 * bench.params.engine.max_num_seqs, finish, done)
            seconds = time.monotonic() - started
        account = Account("extract", 0)
        account.rows_in = sum(shard.samples for shard in plan)
        write_hidden_states(bench.out, bench.table, store, [(shard, facts[shard.key]) for shard in plan], account)
    return seconds


def write_file(bench: Bench, size: int) -> float:
    """Seconds of the disk by itself."""
    path = bench.folder / "sequential"
    seconds = write_sequentially(path, size)
    path.unlink()
    return seconds


def from_disk(read: Callable[[], float], shards: list[Path], size: int, fresh: list[float]) -> float:
    """Seconds of a reading arm whose shards no cache holds; adds the share of `size` that came from the disk."""
    data._opened.cache_clear()
    drop_from_cache(shards)
    before = bytes_from_disk()
    seconds = read()
    fresh.append((bytes_from_disk() - before) / size)
    return seconds


def read_epoch(corpus: Corpus, params: Params) -> float:
    """Seconds to read and pack one epoch."""
    lengths = [ref.length for ref in corpus.train]
    epoch = plan_epoch(lengths, params.train.batch_tokens, params.train.seed, 0)
    groups = iter([[[corpus.train[index] for index in batch]] for batch in epoch])
    started = time.monotonic()
    with BatchStream(corpus.folder, groups, params.train.ttt_steps) as stream:
        tokens = sum(batch.tokens for group in stream for batch in group)
    assert tokens == sum(lengths)
    return time.monotonic() - started


if __name__ == "__main__":
    main()
