"""The whole pipeline on GSM8K: what a draft trained on 1,500 self-generated answers is worth on held-out questions.

    python -m benchmarks.gsm8k --train gsm8k-train.jsonl --test gsm8k-test.jsonl [--folder DIR] [--set train.epochs=2]

The files are GSM8K's own (openai/grade-school-math): JSON lines with `question` and `answer`. The last line of output
is one JSON object: acceptance_length, speedup, seconds per stage. About 50 minutes on two cores.
"""

import argparse
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from benchmarks.project import Project

STAGES = ["check", "verifier", "prompts", "generate", "reconstruct-tokens", "extract", "train", "evaluate"]
RECIPE: dict[str, Any] = {
    "verifier.model": "bundled:smollm2-135m-instruct",
    "verifier.max_model_len": 1024,
    "prompts.validation_share": 0.04,
    "prompts.evaluation_share": 0.0,
    "generate.max_new_tokens": 256,
    "generate.temperature": 0.0,
    "train.epochs": 2,
    "train.ttt_steps": 3,
    "evaluate.max_new_tokens": 256,
    "evaluate.num_speculative_tokens": 3,
    "evaluate.batch_size": 1,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--train-rows", type=int, default=1500)
    parser.add_argument("--test-rows", type=int, default=60)
    parser.add_argument("--folder", type=Path, help="keep the project there and go on where it was")
    parser.add_argument("--until", choices=STAGES, default=STAGES[-1], help="last stage to run")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        own = {k: YAML(typ="safe").load(v) for k, _, v in (item.partition("=") for item in given.set)}
        rows = (given.train_rows, given.test_rows)
        project = make_project(given.folder or Path(temporary) / "gsm8k", given.train, given.test, rows, own)
        seconds = project.repro(STAGES[: STAGES.index(given.until) + 1])
        result: dict[str, Any] = {"seconds": seconds}
        if given.until == STAGES[-1]:
            result |= numbers(project)
        print(json.dumps(result))


def make_project(folder: Path, train: Path, test: Path, rows: tuple[int, int], own: dict[str, Any]) -> Project:
    """The pipeline on the first rows of both files (train, test), with the recipe and settings of one's own."""
    project = Project(folder)
    copy_rows(train, folder / "data/prompts/gsm8k-train.jsonl", rows[0])
    copy_rows(test, folder / "data/prompts/gsm8k-test.jsonl", rows[1])
    settings = RECIPE | {"evaluate.num_prompts": rows[1]} | own
    project.edit([source("train", "auto"), source("test", "evaluation")], settings)
    return project


def numbers(project: Project) -> dict[str, float]:
    """What the benchmark is read for."""
    evaluate, train = project.metrics("evaluate"), project.metrics("train")
    return {
        "acceptance_length": round(evaluate["acceptance_length"], 4),
        "speedup": round(evaluate["speedup"], 3),
        **{name: round(evaluate[name], 4) for name in evaluate if name.startswith("acceptance_rate_")},
        "tokens_per_second_plain": round(evaluate["tokens_per_second_plain"], 1),
        "tokens_per_second_draft": round(evaluate["tokens_per_second_draft"], 1),
        "lossless_float32": evaluate["lossless_float32"]["share"],
        "expected_acceptance_length": round(train["expected_acceptance_length"], 4),
        "tokens": project.metrics("reconstruct_tokens")["tokens"],
        "head_agreement": round(project.metrics("extract")["head_agreement"], 5),
    }


def source(name: str, split: str) -> dict[str, Any]:
    """One entry of prompts.sources."""
    return {
        "path": f"data/prompts/gsm8k-{name}.jsonl",
        "name": f"gsm8k-{name}",
        "category": "gsm8k",
        "text_column": "question",
        "reference_column": "answer",
        "split": split,
    }


def copy_rows(source_path: Path, target: Path, rows: int) -> None:
    """The first `rows` lines of a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with source_path.open() as lines:
        content = "".join(itertools.islice(lines, rows))
    if not target.exists() or target.read_text() != content:
        target.write_text(content)


if __name__ == "__main__":
    main()
