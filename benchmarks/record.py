"""What recording hidden states costs: tokens per second against plain prefill in the same engine without recording.

    python -m benchmarks.record [TOKENS VERIFIER_JSON PARAMS] [--samples 200] [--pairs 3]
    python -m benchmarks.record --tiny-kimi [--samples 2000] [--pairs 3]

Both arms read the first samples of a token table with the same engine arguments, but for those that make vLLM record;
each in an engine of its own, one engine at a time, in pairs whose order alternates. Ours is the stage's own machinery
from beginning the first shard to keeping the last one: gates, digests and fsync included, the engine's start left out.
The last line of output is one JSON object; ratio_to_prefill is the median over the pairs and should be 0.9 or more.

--tiny-kimi: instead of the default run's table, answers of the tests' small DeepSeek-V3 verifier (MLA, MoE, float32).
"""

import argparse
import json
import os
import statistics
import tempfile
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.project import ROOT
from eagle3.hidden_states import RECORDING, ShardStore, TokenTable, missing_shards, plan_shards
from eagle3.params import Params, load_params
from eagle3.schemas import TOKENS
from eagle3.serving.engine import in_process_environment
from eagle3.serving.process import EngineProcess
from eagle3.serving.recorder import recording_arguments
from eagle3.tables import Account, Row, read_parts
from eagle3.verifier import VerifierIdentity, identify_verifier, locate_verifier, read_identity
from eagle3.workstore import work_folder
from stages.extract import record
from tests.tiny_kimi import ORDINARY, build_tiny_kimi
from tests.token_tables import token_row, write_tokens

PATIENCE_S = 3600.0
RECORDING_ONLY = ("speculative_config", "kv_transfer_config")
KIMI_PROMPT, KIMI_ANSWER, KIMI_BATCH = 192, 64, 64


@dataclass(frozen=True)
class Work:
    """What both arms read."""

    params: Params
    identity: VerifierIdentity
    table: TokenTable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=Path, nargs="?", default=ROOT / "data/tokens", metavar="TOKENS")
    parser.add_argument("verifier", type=Path, nargs="?", default=ROOT / "data/verifier.json", metavar="VERIFIER_JSON")
    parser.add_argument("params", type=Path, nargs="?", default=ROOT / "params.yaml", metavar="PARAMS")
    parser.add_argument("--tiny-kimi", action="store_true")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if given.tiny_kimi:
            work = kimi_work(folder, given.samples)
        else:
            work = table_work(folder, given.tokens, given.verifier, load_params(given.params), given.samples)
        samples = [list(row["input_ids"]) for row in work.table.rows(RECORDING)]
        tokens = sum(map(len, samples))
        rates: dict[str, list[float]] = {"prefill": [], "record": []}
        for pair in range(given.pairs):
            for arm in ("prefill", "record") if pair % 2 == 0 else ("record", "prefill"):
                rate = tokens / run_prefill(work, samples) if arm == "prefill" else run_record(work)
                rates[arm].append(rate)
                print(f"{arm}: {tokens:,} tokens, {rate:,.1f} tokens/s", flush=True)
        print(json.dumps(numbers(rates) | {"verifier": work.identity.name, "samples": len(samples), "tokens": tokens}))


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
    return Work(params, read_identity(verifier), TokenTable(write_tokens(folder / "tokens", rows), limit))


def kimi_work(folder: Path, samples: int) -> Work:
    """A tiny Kimi and its own answers, sampled at temperature 1, to prompts of random ids."""
    model = build_tiny_kimi(folder / "kimi")
    params = load_params(ROOT / "params.yaml")
    length = KIMI_PROMPT + KIMI_ANSWER
    changes = {"model": str(model), "dtype": "float32", "max_model_len": length}
    params = params.model_copy(update={"verifier": params.verifier.model_copy(update=changes)})
    table = write_tokens(folder / "tokens", sampled_rows(model, samples))
    return Work(params, identify_verifier(params.verifier, params.reasoning), TokenTable(table, length))


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


def run_prefill(work: Work, samples: list[list[int]]) -> float:
    """Seconds of the engine without recording."""
    folder = locate_verifier(work.params.verifier)
    arguments = recording_arguments(work.params.verifier, work.params.engine, work.identity, folder, {})
    plain = {name: value for name, value in arguments.items() if name not in RECORDING_ONLY}
    environment = in_process_environment(work.params.engine) | {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    with tempfile.TemporaryDirectory() as temporary:
        log = Path(temporary) / "prefill.log"
        with EngineProcess(
            "benchmarks.plain_prefill:prefill", (plain, samples), environment, log, "prefill"
        ) as process:
            seconds: float = process.receive(PATIENCE_S)
    return seconds


def run_record(work: Work) -> float:
    """Tokens per second of the stage's machinery with an empty work store."""
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["EAGLE3_WORK_DIR"] = temporary
        try:
            with work_folder("extract") as folder, ShardStore(folder) as store:
                plan = plan_shards(work.table, work.identity, work.params.extract, Account("extract", 0))
                keys = {shard.key for shard in plan}
                judged = work.params.extract.agreement_samples
                shards = missing_shards(store, plan, keys, work.table, work.identity, judged)
                total = sum(shard.tokens for shard in plan)
                facts, rate = record(store, shards, total, work.identity, work.params)
        finally:
            del os.environ["EAGLE3_WORK_DIR"]
    if problems := [problem for found in facts.values() for problem in found.problems.values()]:
        print(f"record: {len(problems)} samples failed a gate, first: {problems[0]}", flush=True)
    return rate


if __name__ == "__main__":
    main()
