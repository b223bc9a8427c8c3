"""What a person sees of a training run: plots, TensorBoard's event files, and warnings, all of real runs."""

import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from eagle3.console import Interrupted
from eagle3.draft.data import Batch
from eagle3.draft.training import Trainer
from eagle3.draft.watching import overfit_warning, validation_rise
from stages.train import train
from tests.draft_data import make_states, random_texts
from tests.draft_runs import PLAIN, Run

MEMORISES = PLAIN | {
    "epochs": 40,
    "validations": 8,
    "freeze_lm_head": False,
    "learning_rate": 0.01,
    "gradient_accumulation": 2,
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def run(tmp_path: Path, recorded: Path, tiny_verifier: Path) -> Run:
    return Run(tmp_path, recorded, tiny_verifier)


def plotted(run: Run) -> dict[str, list[tuple[int, float]]]:
    """What DVCLive wrote: step and value by metric."""
    folder = run.root / "plots/plots/metrics"
    found = {}
    for path in folder.rglob("*.tsv"):
        rows = [line.split("\t") for line in path.read_text().splitlines()[1:]]
        found[path.relative_to(folder).with_suffix("").as_posix()] = [(int(step), float(value)) for step, value in rows]
    return found


def events(run: Run) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard reads."""
    (folder,) = (run.root / "work/train").glob("*/tensorboard")
    read = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_tensorboard_shows_the_points_of_the_plots_also_after_an_interruption(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = Trainer._step

    def interrupted(self: Trainer, group: list[Batch]) -> None:
        if self.state.step == 7:
            raise Interrupted
        original(self, group)

    monkeypatch.setattr(Trainer, "_step", interrupted)
    with pytest.raises(Interrupted):
        run.stage(tensorboard=True)
    monkeypatch.setattr(Trainer, "_step", original)
    run.stage(tensorboard=True)
    expected = plotted(run)
    assert {"train/loss", "validation/loss", "validation/expected_acceptance_length"} <= expected.keys()
    assert len(expected["train/loss"]) > 7
    assert events(run) == {
        name: [(step, pytest.approx(value, rel=1e-6)) for step, value in points] for name, points in expected.items()
    }


def test_event_files_can_be_had_of_a_finished_run_and_are_not_written_unasked(run: Run) -> None:
    run.stage()
    assert not list((run.root / "work/train").glob("*/tensorboard"))
    run.stage(tensorboard=True)
    assert len(events(run)["train/loss"]) == len(plotted(run)["train/loss"])


def test_without_tensorboard_the_error_names_the_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ValueError, match=r"train.tensorboard needs the package .* pip install -e '\.\[tensorboard\]'"):
        run.stage(tensorboard=True)


def test_a_draft_that_learns_by_heart_is_told_once_with_the_best_step(
    tmp_path: Path, tiny_verifier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_states(tiny_verifier, tmp_path, random_texts(8))
    metrics = Run(tmp_path, tmp_path, tiny_verifier).stage(**MEMORISES)
    said = [line for line in capsys.readouterr().err.splitlines() if "overfitting" in line]
    assert said and "Set train.epochs lower, or give it more prompts" in said[0]
    assert metrics["validation_loss_rise"] > 0.01
    assert metrics["best_step"] < metrics["steps"]


def test_a_draft_that_goes_on_learning_is_not_told_so(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = run.stage(epochs=2)
    assert "overfitting" not in capsys.readouterr().err
    assert metrics["validation_loss_rise"] == 0
    assert metrics["validation_vocab_coverage"] > 0


def history(validation: list[float], training: list[float]) -> list[dict[str, float]]:
    points: list[dict[str, float]] = []
    for step, (there, here) in enumerate(zip(validation, training, strict=True), 1):
        points += [{"step": float(step), "train/loss": here}, {"step": float(step), "validation/loss": there}]
    return points


@pytest.mark.parametrize(
    ("validation", "training", "told"),
    [
        ([3.0, 2.0, 2.1], [3.0, 2.0, 1.0], True),
        ([2.0, 2.1], [3.0, 2.0], True),
        ([3.0, 2.0, 2.1, 2.2], [3.0, 2.0, 1.0, 0.9], False),  # it was told before
        ([3.0, 2.0, 2.1, 1.9, 2.0], [3.0, 2.0, 1.0, 0.9, 0.8], True),
        ([3.0, 2.0, 2.01], [3.0, 2.0, 1.0], False),  # hardly risen
        ([3.0, 2.0, 2.1], [3.0, 2.0, 2.5], False),  # the training loss rises as well: no overfitting
        ([3.0], [3.0], False),
        ([], [], False),
    ],
)
def test_overfitting_is_a_validation_loss_that_rises_while_the_training_loss_falls(
    validation: list[float], training: list[float], told: bool
) -> None:
    warning = overfit_warning(history(validation, training), best_step=2)
    assert (warning is not None) == told
    if warning is not None:
        assert "step 2, which is what will be exported" in warning
        assert f"to {validation[-1]:.3f} " in warning and f"from {min(validation):.3f} " in warning


def test_the_rise_is_measured_from_the_lowest_loss() -> None:
    assert validation_rise(history([3.0, 2.0, 2.5], [1.0] * 3)) == pytest.approx(0.25)
    assert validation_rise(history([3.0, 2.0], [1.0] * 2)) == validation_rise([]) == 0


def test_a_vocabulary_that_lacks_much_of_the_validation_split_is_told(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = run.stage(epochs=1, draft_vocab_coverage=0.5)
    outside = 1 - metrics["validation_vocab_coverage"]
    said = capsys.readouterr().err
    assert outside > 0.05
    assert f"{outside:.1%} of the validation tokens are outside the draft vocabulary of" in said
    assert "raise train.draft_vocab_size or train.draft_vocab_coverage" in said


def test_tokens_that_only_the_validation_split_has_are_told(
    tmp_path: Path, tiny_verifier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_states(tiny_verifier, tmp_path, random_texts(6))
    metrics = Run(tmp_path, tmp_path, tiny_verifier).stage(epochs=1)
    assert metrics["draft_vocab_coverage"] == 1 and metrics["validation_vocab_coverage"] < 0.5
    assert "the train split has none of them: give it more prompts" in capsys.readouterr().err


def test_a_repository_without_a_commit_is_a_clear_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """DVCLive would end in a stack trace there."""
    monkeypatch.chdir(run.root)
    subprocess.run(["git", "init", "--quiet"], check=True)
    with pytest.raises(ValueError, match="no commit yet; make one first: git add --all"):
        train(*run.arguments)
