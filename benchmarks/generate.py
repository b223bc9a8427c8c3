"""What generating through our client costs: tokens per second against vLLM's own offline `LLM.chat`.

    python -m benchmarks.generate [--prompts 256] [--tokens 128] [--pairs 3]

Both arms answer the same prompts of data/prompts/starter.jsonl with the same engine arguments and sampling, each in an
engine of its own, one engine at a time, in pairs whose order alternates. Ours is the stage's own machinery: a local
server, the client, a cold work store. Counted from the first request to the last answer, without the engine's start.
The last line of output is one JSON object; ratio_to_offline is the median over the pairs. Five minutes on two cores.
"""

import argparse
import json
import os
import statistics
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.project import ROOT
from eagle3.digests import digest
from eagle3.params import Params, load_params
from eagle3.prompts import write_splits
from eagle3.serving.answers import make_question
from eagle3.serving.engine import engine_arguments, engine_environment
from eagle3.serving.generation import Generation
from eagle3.serving.process import EngineProcess
from eagle3.tables import Row
from eagle3.verifier import identify_verifier, locate_verifier
from eagle3.workstore import RowStore, work_folder

PATIENCE_S = 3600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=3)
    given = parser.parse_args()
    params = load_params(ROOT / "params.yaml")
    generate = params.generate.model_copy(update={"max_new_tokens": given.tokens, "endpoints": []})
    folder = locate_verifier(params.verifier)
    verifier = params.verifier.model_copy(update={"model": str(folder)})
    params = params.model_copy(update={"generate": generate, "verifier": verifier})
    rows = prompt_rows(given.prompts)
    arms: dict[str, list[tuple[int, float]]] = {"offline": [], "ours": []}
    for pair in range(given.pairs):
        for arm in ("offline", "ours") if pair % 2 == 0 else ("ours", "offline"):
            run = run_offline(params, rows, folder) if arm == "offline" else run_ours(params, rows)
            arms[arm].append(run)
            print(f"{arm}: {run[0]:,} tokens in {run[1]:.1f} s, {run[0] / run[1]:.1f} tokens/s", flush=True)
    print(json.dumps(numbers(arms) | {"prompts": len(rows), "new_tokens": given.tokens}))


def numbers(arms: dict[str, list[tuple[int, float]]]) -> dict[str, Any]:
    """The result, from (tokens, seconds) of each run of an arm."""
    offline, ours = ([tokens / seconds for tokens, seconds in arms[arm]] for arm in ("offline", "ours"))
    ratios = [b / a for a, b in zip(offline, ours, strict=True)]
    return {
        "ratio_to_offline": round(statistics.median(ratios), 4),
        "tokens_per_second_offline": round(statistics.median(offline), 1),
        "tokens_per_second_ours": round(statistics.median(ours), 1),
        "pairs": [round(ratio, 4) for ratio in ratios],
        "tokens_offline": [tokens for tokens, _ in arms["offline"]],
        "tokens_ours": [tokens for tokens, _ in arms["ours"]],
    }


def prompt_rows(count: int) -> list[Row]:
    """The first prompts of the starter set as rows of schemas.PROMPTS."""
    with (ROOT / "data/prompts/starter.jsonl").open() as lines:
        texts = [json.loads(line)["prompt"] for line in islice(lines, count)]
    common = {"source": "starter", "category": "c", "split": "train", "reference": None}
    return [
        {"prompt_id": digest(text), "source_row": i, "messages": [{"role": "user", "content": text}], **common}
        for i, text in enumerate(texts)
    ]


def run_ours(params: Params, rows: list[Row]) -> tuple[int, float]:
    """(tokens, seconds) of the stage's machinery with a cold work store."""
    with tempfile.TemporaryDirectory() as temporary:
        identity = identify_verifier(params.verifier, params.reasoning)
        write_splits(Path(temporary) / "prompts", rows)
        os.environ["EAGLE3_WORK_DIR"] = temporary
        try:
            with work_folder("generate") as folder, RowStore(folder / "responses.sqlite") as store:
                run = Generation(
                    Path(temporary) / "prompts",
                    params.verifier,
                    params.engine,
                    params.reasoning,
                    params.generate,
                    identity,
                    store,
                )
                run.find_engine()
                run.ask_missing()
        finally:
            del os.environ["EAGLE3_WORK_DIR"]
        return run.output_tokens, run.seconds


def run_offline(params: Params, rows: list[Row], folder: Path) -> tuple[int, float]:
    """(tokens, seconds) of LLM.chat in a process of its own."""
    questions = [make_question(row, params.generate) for row in rows]
    work = [(question.messages, question.sampling) for question in questions]
    arguments = engine_arguments(params.verifier, params.engine, folder)
    with tempfile.TemporaryDirectory() as temporary:
        log = Path(temporary) / "offline.log"
        given = (arguments, work, params.generate.chat_template_kwargs)
        with EngineProcess(
            "benchmarks.offline_chat:chat", given, engine_environment(params.engine), log, "LLM.chat"
        ) as process:
            tokens, seconds = process.receive(PATIENCE_S)
    return tokens, seconds


if __name__ == "__main__":
    main()
