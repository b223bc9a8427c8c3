"""What a page shows, gathered: by `evaluate` from what it holds, by `eagle3 report` from the files of a project."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle3.acceptance import Answer, Row, Setting
from eagle3.evaluation import read_answers, read_breakdown
from eagle3.lineage import LINEAGE
from eagle3.params import Params
from eagle3.reasoning import Pieces, ThinkingFinder
from eagle3.reconciliation import explain, is_large
from eagle3.report.page import Report, training_curves
from eagle3.report.tokens import viewer_answers
from eagle3.verifier import VerifierIdentity, load_tokenizer, read_identity


def evaluation_report(
    answers: Iterable[Answer],
    setting: Setting,
    metrics: Row,
    breakdown: Sequence[Row],
    draft: Path,
    identity: VerifierIdentity,
    tokenizer: Any,
    most_answers: int,
) -> Report:
    """The page of one evaluation. answers: with the draft, in the setting that is reported."""
    listed = list(answers)
    pieces = Pieces(tokenizer)
    finder = ThinkingFinder(identity.markers, pieces)
    return Report(
        title=f"EAGLE-3 draft for {identity.name}",
        tokens_drafted=setting.num_speculative_tokens,
        batch_size=setting.batch_size,
        metrics=metrics,
        breakdown=breakdown,
        answers=viewer_answers(listed, pieces, finder, most_answers),
        num_answers=len(listed),
        lineage=_json(draft / LINEAGE),
        notes=_notes(metrics),
    )


def project_report(project: Path, params: Params, comparison: Sequence[Row]) -> Report:
    """The page of a project: its evaluation, and beside it its training, its data and a comparison.

    Raises ValueError where the project has no evaluation.
    """
    data = project / "data"
    setting, answers = read_answers(data / "evaluation")
    metrics = _json(data / "metrics/evaluate.json")
    if not metrics:
        raise ValueError(f"{data / 'metrics/evaluate.json'} is not there; `dvc repro evaluate` makes it")
    identity = read_identity(data / "verifier.json")
    breakdown = read_breakdown(data / "evaluation")
    shown = load_tokenizer(params.verifier), params.evaluate.viewer_answers
    page = evaluation_report(answers, setting, metrics, breakdown, data / "draft", identity, *shown)
    return replace(
        page,
        training=_json(data / "metrics/train.json"),
        tokens=_json(data / "metrics/reconstruct_tokens.json"),
        curves=training_curves(data / "plots/train"),
        comparison=comparison,
    )


def _notes(metrics: Row) -> list[str]:
    notes = []
    if "estimate" in metrics:
        notes.append(explain(metrics["estimate"]).capitalize() + ".")
        if is_large(metrics["estimate"]):
            notes.append("The served draft proposes otherwise than the trained one: that is a bug.")
    gap = metrics["acceptance_length_counted"] - metrics["acceptance_length"]
    if gap > 0.01:
        notes.append(
            f"vLLM's own counter says {metrics['acceptance_length_counted']:.2f}: it also counts accepted tokens "
            "behind the end of an answer, which are never written."
        )
    return notes


def _json(path: Path) -> Row:
    try:
        found: Row = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return found
