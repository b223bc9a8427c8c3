"""Checkpoints of a training run: whole or absent, self-contained, the last two kept.

A checkpoint is a folder `step-<number>` with the weights, the optimiser's moments, the best weights so far and the
state as JSON; `complete.json` holds the digest of each file. It is written aside, synced and renamed; nothing is
pickled.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eagle3.console import say
from eagle3.digests import digest_file
from eagle3.workstore import naming, write_in_pieces

WEIGHTS, OPTIMISER, BEST, STATE, COMPLETE = (
    "weights.safetensors",
    "optimiser.safetensors",
    "best.safetensors",
    "state.json",
    "complete.json",
)
KEEP = 2


@dataclass
class TrainingState:
    """Where a run stands: everything that is not a tensor. Training draws no random numbers after initialisation."""

    step: int = 0  # optimiser steps done
    updates: int = 0  # those of them in which any position counted; without one the optimiser changes nothing
    validated_step: int = -1  # the last step after which the draft was validated
    best_step: int = -1
    best: dict[str, Any] = field(default_factory=dict)  # validation numbers of the best step
    loss_sum: float = 0.0  # over the optimiser steps of this epoch
    loss_steps: int = 0
    recent: dict[str, list[float]] = field(default_factory=dict)  # sums and counts since the last plotted point
    tokens: int = 0  # read in all epochs so far
    train_s: float = 0.0
    wait_s: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)  # what was plotted, by step
    finished: bool = False


class CheckpointStore:
    """The checkpoints of one run in one folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob("*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)

    def save(self, state: TrainingState, weights: dict[str, torch.Tensor], moments: dict[str, torch.Tensor]) -> None:
        """Write a checkpoint of this step, then drop all but the last two.

        When best_step is this step, these weights become the best ones; else the best ones are carried over.
        """
        target = self.folder / f"step-{state.step:08d}"
        aside = target.with_name(target.name + ".tmp")
        shutil.rmtree(aside, ignore_errors=True)
        with naming(aside):
            aside.mkdir()
            save_file(weights, aside / WEIGHTS)
            save_file(moments, aside / OPTIMISER)
            if state.best_step == state.step:
                write_in_pieces(aside / WEIGHTS, aside / BEST)
            elif state.best_step >= 0:
                write_in_pieces(self._best_of(state.best_step), aside / BEST)
            (aside / STATE).write_text(json.dumps(asdict(state), allow_nan=False))
            _write_marker(aside)
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)
        _sync(self.folder)
        for old in self._found()[:-KEEP]:
            shutil.rmtree(old)

    def load(self) -> tuple[TrainingState, dict[str, torch.Tensor], dict[str, torch.Tensor]] | None:
        """The newest whole checkpoint, or None. A damaged one is reported, removed, and the one before it is taken."""
        for path in reversed(self._found()):
            problem = _damage(path)
            if problem is None:
                state = TrainingState(**json.loads((path / STATE).read_text()))
                return state, load_file(path / WEIGHTS), load_file(path / OPTIMISER)
            say(f"train: checkpoint {path} is damaged ({problem}); going back to the one before it")
            shutil.rmtree(path)
        return None

    def best_weights(self) -> dict[str, torch.Tensor]:
        """The weights to export: the best validated ones, else the last ones."""
        newest = self._found()[-1]
        best: dict[str, torch.Tensor] = load_file(newest / (BEST if (newest / BEST).exists() else WEIGHTS))
        return best

    def _found(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step-*") if not path.name.endswith(".tmp"))

    def _best_of(self, step: int) -> Path:
        """A file with the best weights; every later checkpoint carries them on."""
        for path in reversed(self._found()):
            if json.loads((path / STATE).read_text())["best_step"] == step:
                return path / BEST
        raise AssertionError(f"no checkpoint holds the weights of step {step}")


def _write_marker(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    for name in names:
        _sync(folder / name)
    (folder / COMPLETE).write_text(json.dumps({name: digest_file(folder / name) for name in names}))
    _sync(folder / COMPLETE)
    _sync(folder)


def _damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        digests = json.loads((folder / COMPLETE).read_text())
        for name in (WEIGHTS, OPTIMISER, STATE):
            if name not in digests:
                return f"{name} is not listed"
        return next((f"{name} differs" for name, value in digests.items() if digest_file(folder / name) != value), None)
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (ValueError, AttributeError, TypeError):
        return f"{COMPLETE} is not readable"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
