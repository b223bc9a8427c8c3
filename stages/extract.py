"""extract: the verifier's hidden states for the token table, in shards.

python -m stages.extract TOKENS VERIFIER HIDDEN_STATES METRICS PARAMS
"""

import time
from collections.abc import Iterator
from pathlib import Path

import torch

from eagle3.console import Progress, say
from eagle3.hidden_states import (
    OpenShard,
    ShardFacts,
    ShardStore,
    TokenTable,
    finish_shard,
    missing_shards,
    plan_shards,
    record_shards,
    require_agreement,
    shard_metrics,
    stored_dtype,
    write_hidden_states,
)
from eagle3.params import Params, load_params
from eagle3.room import require_room
from eagle3.serving.engine import runs_on_cpu
from eagle3.serving.recorder import StateRecorder
from eagle3.stage import run_stage
from eagle3.tables import Account, write_metrics
from eagle3.verifier import VerifierIdentity, load_head, locate_verifier, read_identity
from eagle3.workstore import work_folder, work_root


def extract(tokens: Path, verifier: Path, hidden_states: Path, metrics: Path, params_path: Path) -> None:
    """Record the shards that the work store lacks, then assemble HIDDEN_STATES from it; write METRICS."""
    params = load_params(params_path)
    identity = read_identity(verifier)
    account = Account("extract", params.extract.max_rejected_share)
    table = TokenTable(tokens, params.verifier.max_model_len)
    with work_folder("extract") as folder, ShardStore(folder) as store:
        plan = plan_shards(table, identity, params.extract, account)
        facts = {shard.key: there for shard in plan if (there := store.facts(shard)) is not None}
        for key, there in facts.items():
            require_agreement(key, there.problems, there.agreement, params.extract)
        missing = {shard.key: shard for shard in plan if shard.key not in facts}
        needed = require_room(folder, hidden_states, missing.values(), plan, params.extract.storage)
        say(f"extract: {len(plan)} shards, {len(facts)} of them there; {needed / 1e9:,.2f} GB to record")
        tokens_per_second = 0.0
        if missing:
            shards = missing_shards(store, plan, set(missing), table, identity, params.extract)
            total = sum(shard.tokens for shard in missing.values())
            new_facts, tokens_per_second = record(store, shards, total, identity, params)
            facts.update(new_facts)
        recorded = [(shard, facts[shard.key]) for shard in plan]
        write_hidden_states(hidden_states, table, store, recorded, account)
    counts = {**account.settle(), **shard_metrics(recorded), "shards_reused": len(plan) - len(missing)}
    write_metrics(metrics, {**counts, "tokens_per_second": tokens_per_second})


def record(
    store: ShardStore, shards: Iterator[OpenShard], total: int, identity: VerifierIdentity, params: Params
) -> tuple[dict[str, ShardFacts], float]:
    """Record shards; their facts by key, and tokens per second without the engine's start. total: tokens of all."""
    folder = locate_verifier(params.verifier)
    head = load_head(folder)
    facts: dict[str, ShardFacts] = {}
    recorder = StateRecorder(
        params.verifier,
        params.engine,
        identity,
        folder,
        work_root() / "logs" / "extract.log",
        dtype=stored_dtype(identity, params.extract),
        max_pending_mib=params.extract.max_pending_mib,
        stall_timeout_s=params.extract.stall_timeout_s,
    )
    if runs_on_cpu():
        torch.set_num_threads(1)  # the engine has all cores; gates that spin on them would slow it down
    say("extract: starting the engine")
    with recorder, Progress("extract", total, "tokens") as progress:
        started = time.monotonic()

        def finish(shard: OpenShard) -> None:
            facts[shard.planned.key] = finish_shard(store, shard, identity, head, params.extract)
            progress.advance(shard.planned.tokens, f"{len(facts)} shards")

        record_shards(recorder, shards, 2 * params.engine.max_num_seqs, finish)
        return facts, total / (time.monotonic() - started)


if __name__ == "__main__":
    run_stage(extract)
