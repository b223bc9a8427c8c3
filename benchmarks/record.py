"""What recording hidden states costs: tokens per second against plain prefill in the same engine without recording.

    python -m benchmarks.record [TOKENS VERIFIER_JSON PARAMS] [--samples 96] [--pairs 8]
    python -m benchmarks.record --tiny-kimi [--samples 512] [--pairs 8]

Two engines are resident, with the same engine arguments but for those that make vLLM record; one is stopped while the
other runs. In each pair both read the same first samples of a token table, in an order that alternates; a pair before
the first one is not counted. Ours is the machinery of the stage, from beginning the first shard to keeping the last
one: gates, digests and fsync included. The last line of output is one JSON object; ratio_to_prefill is the median over
the pairs and should be 0.9 or more.

--tiny-kimi: instead of the default run's table, answers of the tests' small DeepSeek-V3 verifier (MLA, MoE, float32).
"""

import argparse
import json
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.project import ROOT
from eagle3.hidden_states import (
    RECORDING,
    PlannedShard,
    ShardFacts,
    ShardStore,
    TokenTable,
    missing_shards,
    plan_shards,
)
from eagle3.params import Params, load_params
from eagle3.recording import Recording
from eagle3.schemas import TOKENS
from eagle3.serving.engine import in_process_environment
from eagle3.serving.process import EngineProcess, signal_group
from eagle3.serving.recorder import StateRecorder, recording_arguments
from eagle3.tables import Account, Row, read_parts
from eagle3.verifier import VerifierIdentity, identify_verifier, locate_verifier, read_identity
from eagle3.verifier_head import HeadWeights, load_head
from tests.tiny_kimi import ORDINARY, build_tiny_kimi
from tests.token_tables import token_row, write_tokens

PATIENCE_S = 3600.0
RECORDING_ONLY = ("speculative_config", "kv_transfer_config")
KIMI_PROMPT, KIMI_ANSWER, KIMI_BATCH = 192, 64, 64


@dataclass(frozen=True)
class Work:
    """What both arms read."""

    params: Params
    folder: Path  # of the verifier
    identity: VerifierIdentity
    table: TokenTable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=Path, nargs="?", default=ROOT / "data/tokens", metavar="TOKENS")
    parser.add_argument("verifier", type=Path, nargs="?", default=ROOT / "data/verifier.json", metavar="VERIFIER_JSON")
    parser.add_argument("params", type=Path, nargs="?", default=ROOT / "params.yaml", metavar="PARAMS")
    parser.add_argument("--tiny-kimi", action="store_true")
    parser.add_argument("--samples", type=int, help="in each round; 96, or 512 for the tiny Kimi")
    parser.add_argument("--pairs", type=int, default=8)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if given.tiny_kimi:
            work = kimi_work(folder, given.samples or 512)
        else:
            work = table_work(folder, given.tokens, given.verifier, load_params(given.params), given.samples or 96)
        rates, tokens = compare(work, folder, given.pairs)
        print(json.dumps(numbers(rates) | {"verifier": work.identity.name, "tokens": tokens}))


def compare(work: Work, folder: Path, pairs: int) -> tuple[dict[str, list[float]], int]:
    """Tokens per second of each run of an arm, and the tokens of a run."""
    samples = [list(row["input_ids"]) for row in work.table.rows(RECORDING)]
    tokens = sum(map(len, samples))
    rates: dict[str, list[float]] = {"prefill": [], "record": []}
    with (
        plain_engine(work, folder) as prefill,
        recording(work).recorder(work.folder, folder / "record.log") as recorder,
    ):
        head = load_head(work.folder)
        prefill.receive(PATIENCE_S)
        signal_group(prefill.pid, signal.SIGSTOP)
        for pair in range(-1, pairs):
            for arm in ("prefill", "record") if pair % 2 == 0 else ("record", "prefill"):
                ours, other = (prefill, recorder._process)[:: 1 if arm == "prefill" else -1]
                signal_group(other.pid, signal.SIGSTOP)
                signal_group(ours.pid, signal.SIGCONT)
                seconds = run_prefill(prefill, samples) if arm == "prefill" else run_record(recorder, work, head)
                if pair >= 0:
                    rates[arm].append(tokens / seconds)
                    print(f"{arm}: {tokens:,} tokens, {tokens / seconds:,.1f} tokens/s", flush=True)
        for process in (prefill, recorder._process):
            signal_group(process.pid, signal.SIGCONT)
    return rates, tokens


def numbers(rates: dict[str, list[float]]) -> dict[str, Any]:
    """The result, from the tokens per second of each run of an arm."""
    ratios = [ours / plain for plain, ours in zip(rates["prefill"], rates["record"], strict=True)]
    return {
        "ratio_to_prefill": round(statistics.median(ratios), 4),
        "tokens_per_second_prefill": round(statistics.median(rates["prefill"]), 1),
        "tokens_per_second_record": round(statistics.median(rates["record"]), 1),
        "pairs": [round(ratio, 4) for ratio in ratios],
    }


def table_work(folder: Path, tokens: Path, verifier: Path, params: Params, samples: int) -> Work:
    """The first samples of a token table."""
    rows: list[Row] = list(islice(read_parts(tokens, TOKENS), samples))
    limit = params.verifier.max_model_len
    table = TokenTable(write_tokens(folder / "tokens", rows), limit)
    return Work(params, locate_verifier(params.verifier), read_identity(verifier), table)


def kimi_work(folder: Path, samples: int) -> Work:
    """A tiny Kimi and its own answers, sampled at temperature 1, to prompts of random ids."""
    model = build_tiny_kimi(folder / "kimi")
    params = load_params(ROOT / "params.yaml")
    length = KIMI_PROMPT + KIMI_ANSWER
    changes = {"model": str(model), "dtype": "float32", "max_model_len": length}
    params = params.model_copy(update={"verifier": params.verifier.model_copy(update=changes)})
    table = write_tokens(folder / "tokens", sampled_rows(model, samples))
    identity = identify_verifier(params.verifier, params.reasoning)
    return Work(params, model, identity, TokenTable(table, length))


def sampled_rows(folder: Path, count: int) -> list[Row]:
    """Rows of schemas.TOKENS."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    torch.manual_seed(0)
    rows: list[Row] = []
    while len(rows) < count:
        prompts = torch.randint(ORDINARY, (KIMI_BATCH, KIMI_PROMPT))
        with torch.inference_mode():
            made = model.generate(
                prompts, max_new_tokens=KIMI_ANSWER, do_sample=True, top_k=0, top_p=1.0, eos_token_id=None
            )
        rows += [token_row(ids, KIMI_PROMPT, greedy=False) for ids in made.tolist()]
    return rows[:count]


def plain_engine(work: Work, folder: Path) -> EngineProcess:
    """The engine without recording."""
    arguments = recording_arguments(work.params.verifier, work.params.engine, work.identity, work.folder, {})
    plain = {name: value for name, value in arguments.items() if name not in RECORDING_ONLY}
    environment = in_process_environment(work.params.engine) | {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    log = folder / "prefill.log"
    return EngineProcess("benchmarks.plain_prefill:prefill", (plain,), environment, log, "prefill")


def recording(work: Work) -> Recording:
    """The stage's own machinery."""
    return Recording(work.identity, work.params.verifier, work.params.engine, work.params.extract)


def run_prefill(engine: EngineProcess, samples: list[list[int]]) -> float:
    """Seconds of the engine without recording."""
    engine.send(samples, 60)
    seconds: float = engine.receive(PATIENCE_S)
    return seconds


def run_record(recorder: StateRecorder, work: Work, head: HeadWeights) -> float:
    """Seconds of the stage's machinery with an empty work store."""
    faults = 0
    with tempfile.TemporaryDirectory() as temporary, ShardStore(Path(temporary)) as store:

        def done(_: PlannedShard, facts: ShardFacts) -> None:
            nonlocal faults
            faults += len(facts.problems)

        extract = work.params.extract
        plan = plan_shards(work.table, work.identity, extract, Account("extract", 0))
        keys = {shard.key for shard in plan}
        started = time.monotonic()
        shards = missing_shards(store, plan, keys, work.table, work.identity, extract)
        recording(work).stream(recorder, shards, store, head, done)
        seconds = time.monotonic() - started
    if faults:
        print(f"record: {faults} samples failed a gate", flush=True)
    return seconds


if __name__ == "__main__":
    main()
