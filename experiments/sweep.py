"""Which settings of `train` give the best draft: one DVC experiment for each, on the verifier's own GSM8K answers.

    python -m experiments.sweep --train gsm8k-train.jsonl --test gsm8k-test.jsonl --folder DIR [--only loss]

One setting at a time is changed from the defaults of params.yaml. The states are recorded once; every experiment is
queued with `dvc exp run --queue` and trains and evaluates its own draft. A run that was interrupted goes on with what
is missing. The last output is a table in Markdown, best draft first; all of it stays in DIR for `dvc exp show`.
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.gsm8k import STAGES, make_project
from benchmarks.project import Project
from experiments.finished import finished

BASE = "defaults"
#: What is tried, by what it is about: settings as for `dvc exp run -S`, several for one experiment joined by a blank.
TRIED: dict[str, list[str]] = {
    BASE: [""],
    "learning_rate": [f"train.learning_rate={rate}" for rate in ("1e-3", "2e-3", "4e-3")],
    "optimiser": [f"train.optimiser=adamw train.learning_rate={rate}" for rate in ("1e-3", "2e-3")],
    "schedule": ["train.final_learning_rate_share=1.0", "train.warmup_share=0.0", "train.warmup_share=0.2"],
    "batch": ["train.batch_tokens=256", "train.batch_tokens=1024", "train.batch_tokens=2048"],
    "epochs": ["train.epochs=1", "train.epochs=4"],
    "steps": ["train.ttt_steps=1", "train.ttt_steps=2", "train.ttt_steps=5"],
    "decay": ["train.ttt_loss_decay=0.8", "train.ttt_loss_decay=0.5"],
    "loss": [
        "train.loss=hard_labels",
        "train.loss=reverse_kl",
        "train.loss=total_variation",
        "train.acceptance_share=0.5",
    ],
    "head": ["train.freeze_lm_head=false"],
    "vocabulary": [
        "train.draft_vocab_size=2000",
        "train.draft_vocab_coverage=0.99",
        "train.draft_vocab_coverage=0.99 train.out_of_vocabulary=skip",
    ],
    "layers": ["train.num_layers=2"],
    "norms": ["train.norm_before_fc=true", "train.fc_norm=true", "train.norm_output=true"],
}
COLUMNS = {
    "acceptance_length": "acceptance length",
    "expected_acceptance_length": "expected (validation)",
    "speedup": "speed-up",
    "loss": "validation loss",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="the project; goes on where it was")
    parser.add_argument("--train-rows", type=int, default=500)
    parser.add_argument("--test-rows", type=int, default=40)
    parser.add_argument("--only", choices=TRIED, action="append", help="only this (and the defaults); may be repeated")
    given = parser.parse_args()
    project = make_project(given.folder, given.train, given.test, (given.train_rows, given.test_rows), {})
    project.repro(STAGES[: STAGES.index("extract") + 1])
    project.commit("recorded")
    tried = [setting for about in [BASE, *(given.only or TRIED)] for setting in TRIED[about]]
    queue(project, list(dict.fromkeys(tried)))
    print(table(results(project)))


def queue(project: Project, tried: list[str]) -> None:
    """Queue what has no result yet, and run the queue, one after the other."""
    there = results(project)
    waiting = [setting for setting in tried if name_of(setting) not in there]
    for setting in waiting:
        settings = [word for part in setting.split() for word in ("-S", part)]
        project.run("dvc", "exp", "run", "--queue", "--name", name_of(setting), *settings)
    if waiting:
        project.run("dvc", "exp", "run", "--run-all")


def name_of(setting: str) -> str:
    """Name of its experiment: train.loss=reverse_kl is `loss-reverse_kl`."""
    return setting.replace("train.", "").replace("=", "-").replace(" ", "-").replace(".", "_") or BASE


def results(project: Project) -> dict[str, dict[str, Any]]:
    """For each finished experiment, by name, the numbers that COLUMNS asks for."""
    return {name: {column: row.get(column) for column in COLUMNS} for name, row in finished(project).items()}


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown, the longest acceptance length first, with the difference to the defaults."""
    base = found[BASE]["acceptance_length"]
    lines = [
        f"| changed | {' | '.join(COLUMNS.values())} | against the defaults |",
        f"| --- |{' --- |' * (len(COLUMNS) + 1)}",
    ]
    for name, numbers in sorted(found.items(), key=lambda item: -item[1]["acceptance_length"]):
        cells = [f"{numbers[column]:.3f}" if numbers[column] is not None else "" for column in COLUMNS]
        lines.append(f"| {name} | {' | '.join(cells)} | {numbers['acceptance_length'] / base - 1:+.1%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
