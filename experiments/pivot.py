"""Does it matter whose answers a draft learns from: the verifier's own, people's, or a mixture, on GSM8K.

    python -m experiments.pivot --train gsm8k-train.jsonl --test gsm8k-test.jsonl --folder DIR [--shares 0 0.5 1] \
        [--plot pivot.svg]

One DVC experiment for each share of human answers. All of them learn from about the same number of supervised tokens
(answers of people are shorter, so more prompts are used) in about the same number of optimiser steps (batches are made
larger or smaller); the table says how many. All are evaluated on the same held-out questions, answered by the verifier.
A run that was interrupted goes on with what is missing. The last output is a table in Markdown; `eagle3 compare` in DIR
says which differences are real.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import dvc.api

from benchmarks.gsm8k import STAGES, make_project, source
from benchmarks.project import Project
from experiments.finished import finished

BATCH = 8  # prompts decoded at a time: acceptance is what counts here, not speed
TRAIN = "data/metrics/train.json:"
COLUMNS = {
    "human answers": "{share:.0%}",
    "prompts": "{train_samples:,.0f}",
    "supervised tokens": "{loss_tokens:,.0f}",
    "steps": "{steps:,.0f}",
    "validation promised": "{expected_acceptance_length:.2f}",
    "acceptance length": "{acceptance_length:.3f}",
    "95 % interval": "{acceptance_length_low:.2f} to {acceptance_length_high:.2f}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="the project; goes on where it was")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.5, 1.0], help="of human answers")
    parser.add_argument("--train-rows", type=int, default=1500, help="with human answers alone; the others use fewer")
    parser.add_argument("--test-rows", type=int, default=60)
    parser.add_argument("--plot", type=Path, help="an SVG file of the table")
    given = parser.parse_args()
    project, human, own = measured(given)
    size = dvc.api.params_show(repo=str(project.folder))["train"]["batch_tokens"]
    for share in given.shares:
        if name_of(share) not in results(project):
            run(project, share, human, own, size)
    print(table(results(project), given.shares))
    if given.plot is not None:
        given.plot.write_text(plot(results(project), given.shares))
    if len(given.shares) > 1:
        names = [name_of(share) for share in given.shares]
        project.run(sys.executable, "-m", "eagle3.cli", "compare", *names)


def measured(given: argparse.Namespace) -> tuple[Project, dict[str, Any], dict[str, Any]]:
    """The project, and the token counts of all human answers and of a few of the verifier's own."""

    def counted(rows: int, share: float) -> tuple[Project, dict[str, Any]]:
        settings = {"generate.reference_share": share, "evaluate.batch_size": BATCH}
        project = make_project(given.folder, given.train, given.test, (given.train_rows, given.test_rows), settings)
        few = [source("train", "auto") | {"limit": rows}, source("test", "evaluation")]
        project.edit(few, settings)
        project.repro(STAGES[: STAGES.index("reconstruct-tokens") + 1])
        return project, project.metrics("reconstruct_tokens")

    _, own = counted(max(16, given.train_rows // 20), 0.0)
    project, human = counted(given.train_rows, 1.0)
    return project, human, own


def run(project: Project, share: float, human: dict[str, Any], own: dict[str, Any], size: int) -> None:
    """One experiment: as many prompts as give the supervised tokens of all the human answers. size: train.batch_tokens
    with those."""

    def mean(key: str) -> float:
        return float(share * human[key] / human["rows_out"] + (1 - share) * own[key] / own["rows_out"])

    prompts = round(human["loss_tokens"] / mean("loss_tokens"))
    settings = {
        "generate.reference_share": share,
        # validation and rejected rows are a share of these
        "prompts.sources.0.limit": round(prompts * human["rows_in"] / human["rows_out"]),
        # as many batches as the human answers make at the default size
        "train.batch_tokens": round(size * prompts * mean("tokens") / human["tokens"]),
    }
    words = [word for name, value in settings.items() for word in ("-S", f"{name}={value}")]
    project.run("dvc", "exp", "run", "--name", name_of(share), *words)


def name_of(share: float) -> str:
    """Name of the experiment with this share of human answers."""
    return f"human-{round(100 * share)}"


def results(project: Project) -> dict[str, dict[str, Any]]:
    """For each finished experiment, by name, its metrics; where stages share a name, those of `train`."""
    return {
        name: {column.removeprefix(TRAIN): value for column, value in row.items()}
        for name, row in finished(project).items()
    }


def table(found: dict[str, dict[str, Any]], shares: list[float]) -> str:
    """Markdown, one line for each share."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    for share in shares:
        numbers = {"share": share, **found[name_of(share)]}
        lines.append(f"| {' | '.join(shown.format(**numbers) for shown in COLUMNS.values())} |")
    return "\n".join(lines)


def plot(found: dict[str, dict[str, Any]], shares: list[float]) -> str:
    """The acceptance lengths with their intervals, as SVG that can be read on light and dark ground."""
    ends = [found[name_of(share)][f"acceptance_length_{end}"] for share in shares for end in ("low", "high")]
    low, high = min(ends) - 0.05, max(ends) + 0.05

    def down(value: float) -> float:
        return round(20 + 190 * (high - value) / (high - low), 1)

    marks = [
        f'<line x1="60" x2="450" y1="{down(value)}" y2="{down(value)}"/>'
        f'<text x="55" y="{down(value) + 4}" text-anchor="end">{value:.2f}</text>'
        for value in (low, (low + high) / 2, high)
    ]
    for number, share in enumerate(shares):
        numbers, across = found[name_of(share)], 110 + 290 * number / max(1, len(shares) - 1)
        bottom, top = (down(numbers[f"acceptance_length_{end}"]) for end in ("low", "high"))
        middle = down(numbers["acceptance_length"])
        marks += [
            f'<line class="mark" x1="{across:.0f}" x2="{across:.0f}" y1="{top}" y2="{bottom}"/>',
            f'<circle class="mark" cx="{across:.0f}" cy="{middle}" r="5"/>',
            f'<text x="{across + 12:.0f}" y="{middle + 4}">{numbers["acceptance_length"]:.2f}</text>',
            f'<text x="{across:.0f}" y="232" text-anchor="middle">{share:.0%}</text>',
        ]
    marks.append('<text x="255" y="254" text-anchor="middle">share of human answers</text>')
    marks.append('<text x="22" y="115" text-anchor="middle" transform="rotate(-90 22 115)">acceptance length</text>')
    style = "line { stroke: #888 } text { fill: #888; font: 13px sans-serif } .mark { stroke: #3b7dd8; fill: #3b7dd8 }"
    style += " line.mark { stroke-width: 3 }"
    drawn = "\n".join(marks)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 480 262"><style>{style}</style>\n{drawn}\n</svg>\n'


if __name__ == "__main__":
    main()
