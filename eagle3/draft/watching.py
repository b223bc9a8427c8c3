"""What a person watches while a draft is trained: progress, plots (DVCLive, TensorBoard), and warnings that help.

A point is a `step` and values by name, e.g. train/loss (its mean since the point before) and validation/loss. The
history of a run is its points in order.
"""

import importlib
import importlib.util
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dvclive import Live

from eagle3.console import Progress
from eagle3.draft.vocab import DraftVocabulary

Point = dict[str, float]

EVENT_FILES = "eagle3.draft.event_files"
RISE = 0.01  # of the validation loss above its lowest value, from which on it is worth a warning
OUTSIDE = 0.05  # so much of what validation holds may be outside the draft vocabulary without one


def require_tensorboard() -> None:
    """Raise ValueError where train.tensorboard needs what is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError(
            "train.tensorboard needs the package tensorboard: pip install -e '.[tensorboard]', or set it to false"
        )


@dataclass(frozen=True)
class Display:
    """The plots and the progress line of a run; `events` is TensorBoard's writer, or None."""

    live: Live
    events: Any
    progress: Progress

    def plot(self, point: Point) -> None:
        """Add a point to every plot."""
        self.live.step = int(point["step"])
        for name, value in point.items():
            if name != "step":
                self.live.log_metric(name, value)
                if self.events is not None:
                    self.events.add_scalar(name, value, self.live.step)


@contextmanager
def display(plots: Path, events: Path | None, progress: Progress, history: Sequence[Point]) -> Iterator[Display]:
    """Plots anew what was plotted before an interruption. events: the folder of event files; None = write none."""
    with ExitStack() as stack:
        live = stack.enter_context(Live(str(plots), dvcyaml=None, save_dvc_exp=False))
        writer = None
        if events is not None:
            shutil.rmtree(events, ignore_errors=True)
            writer = stack.enter_context(importlib.import_module(EVENT_FILES).open_events(events))
        shown = Display(live, writer, stack.enter_context(progress))
        for point in history:
            shown.plot(point)
        yield shown


def validation_rise(history: Sequence[Point]) -> float:
    """How far the last validation loss is above the lowest one, as a share of it; 0 without validation."""
    losses = _values(history, "validation/loss")
    lowest = min((loss for _, loss in losses), default=0.0)
    return losses[-1][1] / lowest - 1 if lowest > 0 else 0.0


def overfit_warning(history: Sequence[Point], best_step: int) -> str | None:
    """One line when the last validation is the first at which the loss there has risen while the training loss fell.

    best_step: the step with the weights that would be exported.
    """
    validated = [number for number, point in enumerate(history) if "validation/loss" in point]
    if not _overfits(history) or (len(validated) > 1 and _overfits(history[: validated[-1]])):
        return None
    losses = _values(history, "validation/loss")
    lowest, low = min(losses, key=lambda pair: pair[1])
    return (
        f"train: warning: overfitting: the validation loss has risen from {low:.3f} after step {lowest} to "
        f"{losses[-1][1]:.3f} "
        f"while the training loss falls; best so far is step {best_step}, which is what will be exported. Set "
        "train.epochs lower, or give it more prompts"
    )


def vocabulary_warning(vocabulary: DraftVocabulary, validation_coverage: float) -> str | None:
    """One line when much of what the verifier generated in the validation split cannot be drafted."""
    outside = 1 - validation_coverage
    if outside <= OUTSIDE:
        return None
    remedy = (
        "raise train.draft_vocab_size or train.draft_vocab_coverage"
        if vocabulary.coverage < 1
        else "the train split has none of them: give it more prompts"
    )
    return (
        f"train: warning: {outside:.1%} of the validation tokens are outside the draft vocabulary of "
        f"{len(vocabulary):,}, and no draft can propose them; {remedy}"
    )


def _overfits(history: Sequence[Point]) -> bool:
    """Whether the validation loss rose since its lowest value, and the mean training loss fell in the meantime."""
    losses = _values(history, "validation/loss")
    if validation_rise(history) <= RISE:
        return False
    lowest = min(range(len(losses)), key=lambda number: losses[number][1])
    start = losses[lowest - 1][0] if lowest else 0
    until, now = losses[lowest][0], losses[-1][0]
    before = [loss for step, loss in _values(history, "train/loss") if start < step <= until]
    since = [loss for step, loss in _values(history, "train/loss") if until < step <= now]
    return bool(before and since) and sum(since) / len(since) < sum(before) / len(before)


def _values(history: Sequence[Point], name: str) -> list[tuple[int, float]]:
    return [(int(point["step"]), point[name]) for point in history if name in point]
