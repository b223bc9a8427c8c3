"""report.html: one file without any other, from what an evaluation left behind.

Its numbers are those of the metrics and of data/evaluation; nothing is computed here but widths of bars.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from eagle3.acceptance import Row
from eagle3.breakdown import STEP
from eagle3.report.curves import line_chart, read_curve

HERE = files("eagle3.report")
#: What a bar at full width means: nothing is longer than one token for each proposed and one of the verifier.
RATE = 1.0


@dataclass(frozen=True)
class Report:
    """What the page shows; an empty part is left out.

    tokens_drafted: of the first setting. lineage, training, tokens: as their JSON files have them. curves: markup.
    comparison: rows of comparison.Difference as text.
    """

    title: str
    tokens_drafted: int
    batch_size: int
    metrics: Row
    breakdown: Sequence[Row]
    answers: Sequence[Row]
    num_answers: int
    lineage: Row = field(default_factory=dict)
    training: Row = field(default_factory=dict)
    tokens: Row = field(default_factory=dict)
    curves: Sequence[str] = ()
    comparison: Sequence[Row] = ()
    notes: Sequence[str] = ()


def render(report: Report) -> str:
    """The page."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": _number, "percent": _percent, "pretty": _pretty}
    template = environment.from_string((HERE / "page.html").read_text())
    return template.render(
        report=report,
        metrics=report.metrics,
        tables=_tables(report),
        worth=_worth(report),
        settings=report.metrics.get("settings", {}),
        style=(HERE / "page.css").read_text(),
        script=(HERE / "page.js").read_text(),
        data=_embedded(list(report.answers)),
        categories=sorted({answer["category"] for answer in report.answers}),
    )


def training_curves(plots: Path) -> list[str]:
    """Charts of a training run from data/plots/train; none where it is not there."""
    metrics = plots / "plots" / "metrics"
    agreement = {}
    for step in range(16):
        if line := read_curve(metrics / "validation" / f"agreement_{step}.tsv"):
            agreement[f"step {step}"] = line
    loss = {name: line for name in ("train", "validation") if (line := read_curve(metrics / name / "loss.tsv"))}
    expected = read_curve(metrics / "validation" / "expected_acceptance_length.tsv")
    charts = [
        line_chart("Loss, summed over the TTT steps", "optimiser step", loss),
        line_chart("Validation: the draft's choice is the verifier's", "optimiser step", agreement),
        line_chart(
            "Validation: expected acceptance length", "optimiser step", {"expected": expected} if expected else {}
        ),
    ]
    return [chart for chart in charts if chart]


def _tables(report: Report) -> list[Row]:
    """One table per dimension: rows with the widths of bar and whisker in percent."""
    found: dict[str, Row] = {}
    for row in report.breakdown:
        step = row["counts"] == STEP
        full = report.tokens_drafted + 1 if step else RATE
        table = found.setdefault(
            row["dimension"],
            {
                "name": row["dimension"],
                "what": "acceptance length" if step else "acceptance rate",
                "unit": "steps" if step else "judged tokens",
                "step": step,
                "rows": [],
            },
        )
        ends = {} if row["low"] is None else {name: row[name] for name in ("low", "high")}
        scaled = {f"{name}_at": _share(value, full) for name, value in {"value": row["value"], **ends}.items()}
        table["rows"].append({**row, **scaled})
    return list(found.values())


def _share(value: float, full: float) -> str:
    return f"{min(max(100 * value / full, 0), 100):.1f}"


def _worth(report: Report) -> Row:
    """Speed-up by batch size and drafted tokens, with the best of each batch size marked."""
    found = report.metrics.get("speedup_by_batch_size", {})
    best = report.metrics.get("best_by_batch_size", {})
    return {
        "tokens": sorted({int(tokens) for row in found.values() for tokens in row}),
        "rows": [
            {"size": size, "cells": {int(k): v for k, v in row.items()}, "best": best.get(size)}
            for size, row in found.items()
        ],
    }


def _embedded(value: Any) -> str:
    """JSON that may stand inside a script element, whatever it holds."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)
