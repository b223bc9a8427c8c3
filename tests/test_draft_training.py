"""The training loop: schedule, resume, damage, interruption, and the stage around it."""

import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.console import Interrupted
from eagle3.draft.checkpoint import CheckpointStore, TrainingState
from eagle3.draft.data import Batch, Corpus, SampleRef, build_batch, count_generated, load_batch, read_corpus
from eagle3.draft.export import load_draft
from eagle3.draft.processes import alone
from eagle3.draft.training import Trainer, learning_rate, make_schedule, run_key
from eagle3.draft.vocab import DraftVocabulary, choose_vocabulary
from eagle3.shards import open_shard
from eagle3.verifier import read_identity
from eagle3.verifier_head import load_head
from tests.draft_data import generate_texts, make_states
from tests.draft_runs import PARAMS, PLAIN, SETTINGS, Run, checkpoints, make_trainer, start, wait_until
from tests.tiny_verifiers import build_tiny_verifier

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def run(tmp_path: Path, recorded: Path, tiny_verifier: Path) -> Run:
    return Run(tmp_path, recorded, tiny_verifier)


def refs(count: int) -> list[SampleRef]:
    return [SampleRef(f"s{n}", "", "train", "x", n, 10 + n % 7, 5) for n in range(count)]


def test_the_rate_warms_up_and_decays_to_its_share() -> None:
    params = PARAMS.model_copy(update={"learning_rate": 1.0, "warmup_share": 0.1, "final_learning_rate_share": 0.2})
    rates = [learning_rate(step, 100, params) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert rates[10] == 1.0 and rates[100] == pytest.approx(0.2)
    assert all(before >= after for before, after in pairwise(rates[10:]))
    assert learning_rate(0, 1, params.model_copy(update={"warmup_share": 0.0})) == 1.0


def test_accumulation_counts_optimiser_steps_not_batches() -> None:
    plain = make_schedule(refs(200), PARAMS.model_copy(update=SETTINGS))
    grouped = make_schedule(refs(200), PARAMS.model_copy(update=SETTINGS | {"gradient_accumulation": 4}))
    for one, four in zip(plain.epochs, grouped.epochs, strict=True):
        assert [batch for group in four for batch in group] == [batch for group in one for batch in group]
        assert len(four) == -(-len(one) // 4)
    assert grouped.total == sum(map(len, grouped.epochs))


def test_a_schedule_goes_on_anywhere() -> None:
    schedule = make_schedule(refs(60), PARAMS.model_copy(update=SETTINGS))
    everything = list(schedule.after(0))
    assert len(everything) == schedule.total
    for step in (1, len(schedule.epochs[0]), schedule.total - 1, schedule.total):
        assert list(schedule.after(step)) == everything[step:]
    starts = [step for step in range(schedule.total) if schedule.begins_epoch(step)]
    assert len(starts) == SETTINGS["epochs"] and starts[1] == len(schedule.epochs[0])


def test_two_accumulated_batches_are_one_batch(run: Run) -> None:
    corpus = read_corpus(run.recorded / "hidden_states", read_identity(run.recorded / "verifier.json"))
    samples = []
    for ref in corpus.train[:4]:
        samples.append((ref.sample_id, training_sample(corpus, ref)))
    together, apart = (make_trainer(run, corpus, PLAIN) for _ in range(2))
    together._step([build_batch(samples, 3)])
    apart._step([build_batch(samples[:1], 3), build_batch(samples[1:], 3)])
    assert together.state.loss_sum == pytest.approx(apart.state.loss_sum, rel=1e-5)
    for name, value in together.trained.items():
        torch.testing.assert_close(value, apart.trained[name], atol=2e-6, rtol=1e-4)


def training_sample(corpus: Corpus, ref: SampleRef) -> Any:
    return open_shard(corpus.folder / ref.shard).sample(ref.position)


def test_the_stage_learns_and_writes_everything(run: Run) -> None:
    metrics = run.stage(epochs=10)
    assert metrics["rows_in"] == metrics["rows_out"] == 24
    assert metrics["train_samples"] == 20 and metrics["validation_samples"] == 4
    assert metrics["steps"] > 20 and metrics["draft_vocab_size"] % 64 == 0 and metrics["draft_vocab_coverage"] == 1.0
    lengths = [metrics[f"prefix_agreement_{k}"] for k in range(3)]
    assert metrics["expected_acceptance_length"] == pytest.approx(1 + sum(lengths))
    assert 0 <= metrics["packing_waste"] < 0.5 and 0 <= metrics["data_wait_share"] < 1
    lines = (run.root / "plots/plots/metrics/train/loss.tsv").read_text().splitlines()
    assert lines[0] == "step\tloss" and len(lines) > 20
    losses = [float(line.split("\t")[1]) for line in lines[1:]]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert metrics["train_loss"] < losses[0]
    assert (run.root / "plots/plots/metrics/validation/expected_acceptance_length.tsv").exists()
    model, vocabulary = load_draft(run.root / "draft")
    assert torch.equal(model.lm_head.weight, load_head(run.verifier).lm_head[vocabulary.token_ids])


def test_a_finished_run_goes_straight_to_export(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run.stage()
    weights = run.weights()
    monkeypatch.setattr(Trainer, "_step", None)
    assert run.stage(export_dtype="bfloat16", checkpoint_every_s=99) == first  # neither changes the weights
    for name, value in run.weights().items():
        assert torch.equal(value, weights[name].to(value.dtype))
    lines = (run.root / "plots/plots/metrics/train/loss.tsv").read_text().splitlines()
    assert len(lines) == 1 + first["steps"]


def test_another_setting_is_another_run(run: Run) -> None:
    verifier = read_identity(run.recorded / "verifier.json")
    corpus = read_corpus(run.recorded / "hidden_states", verifier)
    params = PARAMS.model_copy(update=SETTINGS)
    cpu = torch.device("cpu")
    key = run_key(corpus, verifier, params, cpu)
    assert key == run_key(corpus, verifier, params.model_copy(update={"checkpoint_every_s": 5}), cpu)
    for change in ({"seed": 1}, {"draft_vocab_size": 500}, {"learning_rate": 1.0}):
        assert key != run_key(corpus, verifier, params.model_copy(update=change), cpu)


def test_without_validation_the_last_weights_are_exported(tmp_path: Path, tiny_verifier: Path) -> None:
    make_states(tiny_verifier, tmp_path, generate_texts(tiny_verifier, 4, validation=0))
    metrics = Run(tmp_path, tmp_path, tiny_verifier).stage(epochs=1)
    assert "expected_acceptance_length" not in metrics and metrics["validation_samples"] == 0
    load_draft(tmp_path / "draft")


@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_several_layers_stay_finite(run: Run, layers: int, precision: str) -> None:
    metrics = run.stage(num_layers=layers, precision=precision, epochs=1, freeze_lm_head=False, feature_loss_weight=0.0)
    assert 0 < metrics["train_loss"] < 20
    assert load_draft(run.root / "draft")[0].sizes.num_layers == layers


def test_training_mode_is_back_after_validation_and_validation_changes_nothing(run: Run) -> None:
    once = run.stage(validations=1)
    often = run.stage(validations=8)
    assert once["train_loss"] == often["train_loss"]
    trainer = run.trainer()
    trainer.train(run.root / "other")
    assert trainer.scoring.training


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_weights(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = run.trainer(validations=1)
    original = Trainer._step

    def poisoned(self: Trainer, group: list[Batch]) -> None:
        if self.state.step == 3:
            group[0].aux_hidden_states[0] = float("nan")
        original(self, group)

    monkeypatch.setattr(Trainer, "_step", poisoned)
    with pytest.raises(ValueError, match=r"at optimiser step 4 \(samples sample-.*kept in"):
        trainer.train(run.root / "plots")
    found = CheckpointStore(run.root / "store").load()
    assert found is not None and found[0].step == 3
    assert all(torch.isfinite(value).all() for value in found[1].values())


def test_a_verifier_that_changed_is_refused(run: Run, tmp_path: Path, recorded: Path) -> None:
    other = build_tiny_verifier(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match="the model changed since"):
        Run(tmp_path, recorded, other).stage()


def test_killed_twice_and_resumed_the_weights_are_the_same_bits(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run.stage(epochs=6, validations=3)
    expected = run.weights()
    work = run.root / "killed"
    for enough in (3, 9):
        process = start(run, work)
        try:
            wait_until(lambda: any(int(p.name[5:]) >= enough for p in checkpoints(work)) or process.poll() is not None)  # noqa: B023
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert not (run.root / "draft.tmp").exists()
    reached = int(checkpoints(work)[-1].name[5:])
    assert 9 <= reached < plain["steps"], "the kill came too late to prove anything"
    monkeypatch.setenv("EAGLE3_WORK_DIR", str(work))
    resumed = run.stage(epochs=6, validations=3)
    assert {name: value.numpy().tobytes() for name, value in run.weights().items()} == {
        name: value.numpy().tobytes() for name, value in expected.items()
    }
    timed = ("tokens_per_second", "data_wait_share")
    assert {k: v for k, v in resumed.items() if k not in timed} == {k: v for k, v in plain.items() if k not in timed}


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_sigterm_saves_where_it_stands(run: Run, monkeypatch: pytest.MonkeyPatch, optimiser: str) -> None:
    changes = {"checkpoint_every_s": 1000, "validations": 1, "optimiser": optimiser, "freeze_lm_head": False}
    trainer = run.trainer(**changes)
    original = Trainer._step

    def interrupted(self: Trainer, group: list[Batch]) -> None:
        if self.state.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        original(self, group)

    monkeypatch.setattr(Trainer, "_step", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted):
        trainer.train(run.root / "plots")
    assert signal.getsignal(signal.SIGTERM) == before
    found = CheckpointStore(run.root / "store").load()
    assert found is not None and found[0].step == 3
    monkeypatch.setattr(Trainer, "_step", original)
    again = run.trainer(**changes)
    again.train(run.root / "plots")
    whole = Trainer(
        again.corpus,
        again.draft.sizes,
        vocabulary_of(again),
        load_head(run.verifier),
        again.params,
        CheckpointStore(run.root / "whole"),
        alone(),
    )
    whole.train(run.root / "plots")
    for name, value in whole.trained.items():
        assert torch.equal(value, again.trained[name])


def test_muon_takes_the_matrices_and_learns(run: Run) -> None:
    """Its steps are scaled so that both can have one learning rate: AdamW's first step is its largest, of size 1."""
    metrics = run.stage(optimiser="muon", epochs=10, freeze_lm_head=False)
    losses = [float(line.split("\t")[1]) for line in losses_of(run)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5]) and metrics["steps"] == len(losses)
    by_muon, by_adamw = (moved(run.trainer(optimiser=kind, freeze_lm_head=False)) for kind in ("muon", "adamw"))
    matrices = [name for name in by_muon if name.endswith("weight") and "norm" not in name and name != "lm_head.weight"]
    assert len(matrices) == 8
    for name, size in by_muon.items():
        if name in matrices:
            assert size != by_adamw[name] and 0.1 < size / by_adamw[name] < 0.4, name
        else:
            assert size == by_adamw[name], name


def losses_of(run: Run) -> list[str]:
    return (run.root / "plots/plots/metrics/train/loss.tsv").read_text().splitlines()[1:]


def moved(trainer: Trainer) -> dict[str, float]:
    """How far one optimiser step moves the weights, root mean square, as a share of the learning rate."""
    before = {name: value.detach().clone() for name, value in trainer.trained.items()}
    refs = next(trainer.schedule.after(0))
    trainer._step([load_batch(trainer.corpus.folder, batch, 3) for batch in refs])
    rate = learning_rate(0, trainer.schedule.total, trainer.params)
    return {
        name: float((value.detach() - before[name]).square().mean().sqrt()) / rate
        for name, value in trainer.trained.items()
    }


def vocabulary_of(trainer: Trainer) -> DraftVocabulary:
    return choose_vocabulary(count_generated(trainer.corpus.folder, trainer.corpus.train, 640), [2], None, 1.0)


def fill(store: CheckpointStore, steps: int) -> None:
    for step in range(1, steps + 1):
        weights = {"w": torch.full((3,), float(step))}
        store.save(TrainingState(step=step, best_step=min(step, 2)), weights, {"m": torch.zeros(3)})


def test_two_checkpoints_and_the_best_weights_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    fill(store, 5)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000004", "step-00000005"]
    assert store.best_weights()["w"].tolist() == [2.0] * 3


@pytest.mark.parametrize("damage", ["truncated", "no marker", "empty folder", "flipped", "best flipped"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = CheckpointStore(tmp_path)
    fill(store, 4)
    newest = tmp_path / "step-00000004"
    weights = newest / ("best.safetensors" if damage == "best flipped" else "weights.safetensors")
    if damage == "truncated":
        os.truncate(weights, 20)
    elif damage == "no marker":
        (newest / "complete.json").unlink()
    elif damage == "empty folder":
        for path in newest.iterdir():
            path.unlink()
    else:
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
    found = CheckpointStore(tmp_path).load()
    assert found is not None and found[0].step == 3 and found[1]["w"].tolist() == [3.0] * 3
    assert "step-00000004 is damaged" in capsys.readouterr().err
    fill(store, 4)
    assert CheckpointStore(tmp_path).best_weights()["w"].tolist() == [2.0] * 3


def test_a_half_written_checkpoint_is_not_seen(tmp_path: Path) -> None:
    fill(CheckpointStore(tmp_path), 2)
    (tmp_path / "step-00000003.tmp").mkdir()
    found = CheckpointStore(tmp_path).load()
    assert found is not None and found[0].step == 2
    assert not (tmp_path / "step-00000003.tmp").exists()
    assert CheckpointStore(tmp_path / "none").load() is None
