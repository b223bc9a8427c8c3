"""extract: the verifier's hidden states for the token table, in shards.

python -m stages.extract TOKENS VERIFIER HIDDEN_STATES METRICS PARAMS
"""

from pathlib import Path

from eagle3.console import say
from eagle3.hidden_states import (
    ShardStore,
    TokenTable,
    missing_shards,
    plan_shards,
    require_agreement,
    shard_metrics,
    total_agreement,
    write_hidden_states,
)
from eagle3.params import load_params
from eagle3.recording import Recording, record, record_with_crew
from eagle3.room import require_room
from eagle3.serving.executors import require_executor
from eagle3.stage import run_stage
from eagle3.tables import Account, write_metrics
from eagle3.verifier import read_identity
from eagle3.workstore import work_folder


def extract(tokens: Path, verifier: Path, hidden_states: Path, metrics: Path, params_path: Path) -> None:
    """Record the shards that the work store lacks, then assemble HIDDEN_STATES from it; write METRICS."""
    params = load_params(params_path)
    require_executor(params.extract.executor, "extract.executor")
    identity = read_identity(verifier)
    account = Account("extract", params.extract.max_rejected_share)
    table = TokenTable(tokens, params.verifier.max_model_len)
    with work_folder("extract") as folder, ShardStore(folder) as store:
        plan = plan_shards(table, identity, params.extract, account)
        facts = {shard.key: there for shard in plan if (there := store.facts(shard)) is not None}
        for shard in plan:
            if shard.key in facts:
                there = facts[shard.key]
                require_agreement(shard.name, there.problems, there.agreement, params.extract)
        missing = {shard.key: shard for shard in plan if shard.key not in facts}
        needed = require_room(folder, hidden_states, missing.values(), plan, params.extract.storage)
        say(f"extract: {len(plan)} shards, {len(facts)} of them there; {needed / 1e9:,.2f} GB to record")
        tokens_per_second = 0.0
        recording = Recording(identity, params.verifier, params.engine, params.extract)
        if missing and params.extract.executor == "local" and params.extract.workers == 1:
            shards = missing_shards(store, plan, set(missing), table, identity, params.extract)
            total = sum(shard.tokens for shard in missing.values())
            new_facts, tokens_per_second = record(store, shards, total, recording, "extract")
            facts.update(new_facts)
        elif missing:
            new_facts, tokens_per_second = record_with_crew(store, list(missing.values()), table, recording)
            facts.update(new_facts)
        recorded = [(shard, facts[shard.key]) for shard in plan]
        require_agreement("all shards together", {}, total_agreement(recorded), params.extract)
        write_hidden_states(hidden_states, table, store, recorded, account)
    counts = {**account.settle(), **shard_metrics(recorded), "shards_reused": len(plan) - len(missing)}
    write_metrics(metrics, {**counts, "tokens_per_second": tokens_per_second})


if __name__ == "__main__":
    run_stage(extract)
