"""The training loop: optimiser, schedule, validation, plots, resume.

A run is keyed by everything that determines its weights. After an interruption or a kill, the same call goes on from
the last checkpoint and arrives at the same bits; a finished run is only read back.

Several processes take the same optimiser steps as one, each with its share of every step's batches; the first of them
keeps the checkpoints and everything that a person sees. Sums in another order round differently, so the weights then
agree with those of one process to rounding only; neither the number of processes nor their sharding is part of the key.
"""

import json
import math
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from eagle3.console import Interrupted, Progress, say, visible
from eagle3.digests import digest, digest_file
from eagle3.draft.checkpoint import CheckpointStore, TrainingState
from eagle3.draft.data import Batch, BatchStream, Corpus, SampleRef, empty_batch, plan_epoch
from eagle3.draft.loss import Objective
from eagle3.draft.model import DraftModel, DraftSizes, initialise
from eagle3.draft.optimiser import Optimiser
from eagle3.draft.processes import Processes
from eagle3.draft.sharding import shard, spread, whole
from eagle3.draft.ttt import Score, Scoring, Teacher, empty_score, full_choices, make_teacher
from eagle3.draft.vocab import DraftVocabulary
from eagle3.draft.warm_start import Checkpoint
from eagle3.draft.watching import Display, display, overfit_warning, validation_rise
from eagle3.params import TrainParams
from eagle3.schemas import SCHEMA_VERSION
from eagle3.verifier import VerifierIdentity
from eagle3.verifier_head import HeadWeights

PLOTTED_POINTS = 200
_LOWER_RATE = "Lower train.learning_rate or train.max_gradient_norm"
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Schedule:
    """What each optimiser step reads. epochs: for each epoch its optimiser steps, each a list of batches of samples."""

    epochs: list[list[list[list[SampleRef]]]]
    waste: float  # share of the packed capacity that stays empty

    @property
    def total(self) -> int:
        """Optimiser steps of the whole run."""
        return sum(map(len, self.epochs))

    def after(self, step: int) -> Iterator[list[list[SampleRef]]]:
        """The optimiser steps that come after the first `step` ones."""
        for epoch in self.epochs:
            yield from epoch[step:]
            step = max(0, step - len(epoch))

    def batches(self, step: int) -> int:
        """Batches of optimiser step number `step` (from 0), over all processes."""
        for epoch in self.epochs:
            if step < len(epoch):
                return len(epoch[step])
            step -= len(epoch)
        raise IndexError(step)

    def begins_epoch(self, step: int) -> bool:
        """Whether an epoch begins with optimiser step number `step` (from 0)."""
        return step in {sum(map(len, self.epochs[:count])) for count in range(len(self.epochs))}


def make_schedule(samples: list[SampleRef], params: TrainParams) -> Schedule:
    """Plan all epochs: a function of the samples' lengths and the parameters alone."""
    lengths = [ref.length for ref in samples]
    epochs, batches = [], 0
    for number in range(params.epochs):
        plan = [
            [samples[index] for index in batch]
            for batch in plan_epoch(lengths, params.batch_tokens, params.seed, number)
        ]
        batches += len(plan)
        group = params.gradient_accumulation
        epochs.append([plan[at : at + group] for at in range(0, len(plan), group)])
    fitting = sum(min(length, params.batch_tokens) for length in lengths) * params.epochs
    return Schedule(epochs, 1 - fitting / (batches * params.batch_tokens))


def learning_rate(step: int, total: int, params: TrainParams) -> float:
    """Rate of optimiser step number `step` (from 0): linear warm-up, then half a cosine down to the final share."""
    warmup = math.ceil(params.warmup_share * total)
    if step < warmup:
        return params.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    final = params.final_learning_rate_share
    return params.learning_rate * (final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2)


def run_key(
    corpus: Corpus,
    verifier: VerifierIdentity,
    params: TrainParams,
    device: torch.device,
    warm_start: Checkpoint | None = None,
) -> str:
    """Digest of everything that determines the weights of a run, this package's code included."""
    settings = params.model_dump(
        exclude={"checkpoint_every_s", "export_dtype", "nproc", "sharding", "tensorboard", "warm_start"}
    )
    code = {path.name: digest_file(path) for path in sorted(Path(__file__).parent.glob("*.py"))}
    return digest(
        {
            "schema": SCHEMA_VERSION,
            "params": settings,
            "warm_start": warm_start and warm_start.digest,
            "states": corpus.fingerprint,
            "verifier": verifier.digest,
            "aux_layer_ids": verifier.aux_layer_ids,
            "torch": torch.__version__,
            "device": device.type,
            "code": code,
        }
    )


class DeferredSignals:
    """SIGTERM and Ctrl-C wait for the end of the optimiser step; a second one does not. `pending`: one has arrived."""

    def __init__(self) -> None:
        self.pending: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "DeferredSignals":
        self._previous = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.pending is not None:
            self.deliver()
        self.pending = number

    def deliver(self) -> None:
        """Raise what arrived."""
        raise KeyboardInterrupt if self.pending == signal.SIGINT else Interrupted


class Trainer:
    """One run: the draft, its optimiser and where it stands. After `train` the first process's `draft` is whole and has
    the best weights.

    store: None in all processes but the first.
    """

    def __init__(
        self,
        corpus: Corpus,
        sizes: DraftSizes,
        vocabulary: DraftVocabulary,
        head: HeadWeights,
        params: TrainParams,
        store: CheckpointStore | None,
        processes: Processes,
        warm_start: Checkpoint | None = None,
    ):
        self.corpus, self.params, self.store, self.processes = corpus, params, store, processes
        self.device = processes.device
        self.teacher: Teacher = make_teacher(head, vocabulary, self.device)
        self.draft = DraftModel(sizes, PRECISIONS[params.precision])
        initialise(self.draft, self.teacher.draft_head, self.teacher.norm, params.seed)
        if warm_start is not None:
            known = warm_start.load_into(self.draft, vocabulary)
            if processes.leads:
                told = f"{known:,} of {len(vocabulary):,} draft tokens"
                say(f"train: going on from {warm_start.folder}, which knows {told}")
        self.draft.to(self.device)
        self.draft.lm_head.weight.requires_grad_(not params.freeze_lm_head)
        processes.copy_from_first(value.data for value in self.draft.parameters())
        objective = Objective(
            params.loss, params.acceptance_share, params.feature_loss_weight, params.out_of_vocabulary
        )
        self.scoring = Scoring(self.draft, self.teacher, objective)
        self.sharded = params.sharding == "fsdp" and processes.count > 1
        if self.sharded:
            shard(self.scoring, self.draft, processes)
        self.trained = {name: value for name, value in self.draft.named_parameters() if value.requires_grad}
        self.optimiser = Optimiser(self.trained, params)
        self.schedule = make_schedule(corpus.train, params)
        self.nothing = empty_batch(sizes.num_aux_layers, sizes.hidden_size, params.ttt_steps).to(self.device)
        self.decay = [params.ttt_loss_decay**step for step in range(params.ttt_steps)]
        self.state = TrainingState()
        self._choices: list[torch.Tensor] = []  # the verifier's first choices on each validation batch, once known

    def train(self, plots: Path) -> None:
        """Go on from the last checkpoint, or start; raises ValueError at a loss that is not finite."""
        with self.processes.naming_lost_peers():
            self._train(plots)

    def _train(self, plots: Path) -> None:
        self._resume()
        total = self.schedule.total
        due = {round(total * part / self.params.validations) for part in range(1, self.params.validations + 1)}
        tokens = self.params.epochs * sum(ref.length for ref in self.corpus.train)
        with DeferredSignals() as signals, ExitStack() as stack:
            shown = None
            if self.store is not None:
                events = self.store.folder / "tensorboard" if self.params.tensorboard else None
                progress = Progress("train", tokens, "tokens", self.state.tokens)
                shown = stack.enter_context(display(plots, events, progress, self.state.history))
            if not self.state.finished:
                self._loop(total, due, signals, shown)
        if self.store is not None:
            frozen = {name: value for name, value in self.draft.named_parameters() if name not in self.trained}
            self.draft = DraftModel(self.draft.sizes, self.draft.compute_dtype)
            self.draft.load_state_dict(frozen | self.store.best_weights())

    def _loop(self, total: int, due: set[int], signals: DeferredSignals, shown: Display | None) -> None:
        state, saved = self.state, time.monotonic()
        shares = (self.processes.share(group) for group in self.schedule.after(state.step))
        with BatchStream(self.corpus.folder, shares, self.params.ttt_steps) as stream:
            groups = iter(stream)
            waited = state.wait_s
            while True:
                validated = (
                    state.step in due
                    and state.validated_step < state.step
                    and bool(self.corpus.validation)
                    and self._validate(signals, shown)
                )
                waiting = self.processes.leads and time.monotonic() - saved >= self.params.checkpoint_every_s
                save, interrupted = self.processes.any(validated or waiting, signals.pending is not None)
                if save:
                    self._save()
                    saved = time.monotonic()
                if interrupted:
                    self._save_and_wait()
                    signals.deliver()
                if state.step == total:
                    break
                started, tokens = time.monotonic(), state.tokens
                self._step(next(groups))
                state.wait_s = waited + stream.wait_s
                state.train_s += time.monotonic() - started
                if shown is not None:
                    self._report(state.tokens - tokens, shown)
        state.finished = True
        self._save()

    def _step(self, group: list[Batch]) -> None:
        """One optimiser step over the groups of all processes, each position weighted as if they were one batch."""
        state = self.state
        if self.schedule.begins_epoch(state.step):
            state.loss_sum, state.loss_steps = 0.0, 0
        batches = [batch.to(self.device) for batch in group]
        batches += [self.nothing] * (self.processes.most(self.schedule.batches(state.step)) - len(batches))
        counted = sum((batch.counted.sum(1) for batch in batches), torch.zeros(len(self.decay), device=self.device))
        self.processes.sum([counted])
        weights = torch.tensor(self.decay, device=self.device) / counted.clamp(min=1)
        score = empty_score(len(self.decay))
        if counted.any():
            for batch in batches:
                loss, part = self.scoring(batch, weights, None)
                loss.backward()
                score.add(part)
        if not self.sharded:
            self.processes.sum(value.grad for value in self.trained.values() if value.grad is not None)
        score, tokens = self._sum_scores(score, sum(batch.tokens for batch in group))
        norm = whole(torch.nn.utils.clip_grad_norm_(self.trained.values(), self.params.max_gradient_norm))
        loss_value = score.loss(self.params.ttt_loss_decay)
        if not math.isfinite(loss_value) or not torch.isfinite(norm):
            self._stop_at_nonfinite(loss_value, float(norm))
        self.optimiser.step(learning_rate(state.step, self.schedule.total, self.params))
        recent = Score(**state.recent) if state.recent else empty_score(len(self.decay))  # type: ignore[arg-type]
        recent.add(score)
        state.recent = asdict(recent)
        state.loss_sum += loss_value
        state.loss_steps += 1
        state.step += 1
        state.updates += any(score.counted)
        state.tokens += tokens

    def _sum_scores(self, score: Score, tokens: int) -> tuple[Score, int]:
        """Score and tokens of all processes together."""
        if self.processes.count == 1:
            return score, tokens
        flat = [tokens, *score.losses, *score.counted, *score.agreed, *score.prefix_agreed, *score.prefix_counted]
        total, *sums = self.processes.totals(flat)
        steps = len(self.decay)
        counts = [[int(value) for value in sums[at : at + steps]] for at in range(steps, len(sums), steps)]
        return Score(sums[:steps], *counts), int(total)

    def _stop_at_nonfinite(self, loss: float, norm: float) -> None:
        self._save_and_wait()
        names = [visible(ref.sample_id) for batch in next(self.schedule.after(self.state.step)) for ref in batch]
        listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        kept = self.store.folder if self.store is not None else "the work store"
        raise ValueError(
            f"train: loss {loss} and gradient norm {norm} at optimiser step {self.state.step + 1} (samples {listed}); "
            f"the weights before it are kept in {kept}. {_LOWER_RATE}, or look at these samples"
        )

    def _report(self, tokens: int, shown: Display) -> None:
        state = self.state
        recent = Score(**state.recent)  # type: ignore[arg-type]
        loss, length = recent.loss(self.params.ttt_loss_decay), recent.expected_acceptance_length()
        speed = state.tokens / max(state.train_s, 1e-9)
        note = f"step {state.step} of {self.schedule.total}, loss {loss:.3f}, agreement {recent.agreement()[0]:.3f}, "
        note += f"expected acceptance length {length:.2f}, {speed:,.0f} tokens/s"
        shown.progress.advance(tokens, note)
        if state.step % max(1, self.schedule.total // PLOTTED_POINTS) == 0 or state.step == self.schedule.total:
            rate = learning_rate(state.step - 1, self.schedule.total, self.params)
            point = {"train/loss": loss, "train/agreement_0": recent.agreement()[0], "train/learning_rate": rate}
            self._log(shown, point)
            state.recent = {}

    def _validate(self, signals: DeferredSignals, shown: Display | None) -> bool:
        """Score the validation split, each process its share; False when a signal cut it short."""
        state, score, refs = self.state, empty_score(len(self.decay)), self.corpus.validation
        plan = plan_epoch([ref.length for ref in refs], self.params.batch_tokens, self.params.seed, 0)
        groups = iter([[[refs[index] for index in batch]] for batch in self.processes.share(plan)])
        weights = torch.ones(len(self.decay), device=self.device)
        interrupted = False
        self.scoring.eval()
        with torch.no_grad(), BatchStream(self.corpus.folder, groups, self.params.ttt_steps) as stream:
            own = iter(stream)
            for number in range(self.processes.most(len(plan))):
                (interrupted,) = self.processes.any(signals.pending is not None)
                if interrupted:
                    break
                (batch,) = next(own, [self.nothing])
                score.add(self._score_validation(batch.to(self.device), number, weights))
        self.scoring.train()
        if interrupted:
            return False
        score, _ = self._sum_scores(score, 0)
        numbers = summarise(score, self.params.ttt_loss_decay)
        if not math.isfinite(numbers["loss"]):
            raise ValueError(f"train: validation loss {numbers['loss']} after step {state.step}; {_LOWER_RATE}")
        state.validated_step = state.step
        if not state.best or _merit(numbers) > _merit(state.best):
            state.best_step, state.best = state.step, numbers
        if shown is not None:
            self._log(shown, {f"validation/{name}": value for name, value in numbers.items()})
            say(
                f"train: after step {state.step}: validation loss {numbers['loss']:.3f}, "
                f"agreement {numbers['agreement_0']:.3f}, "
                f"expected acceptance length {numbers['expected_acceptance_length']:.3f}"
            )
            warning = overfit_warning(state.history, state.best_step)
            if warning is not None:
                say(warning)
        return True

    def _score_validation(self, batch: Batch, number: int, weights: torch.Tensor) -> Score:
        if number == len(self._choices):
            self._choices.append(full_choices(batch, self.teacher))
        choices = self._choices[number] if number < len(self._choices) else full_choices(batch, self.teacher)
        score: Score = self.scoring(batch, weights, choices)[1]
        return score

    def _log(self, shown: Display, values: dict[str, float]) -> None:
        point = {"step": float(self.state.step), **values}
        self.state.history.append(point)
        shown.plot(point)

    def _resume(self) -> None:
        """Take up the newest checkpoint, if there is one, in all processes."""
        found = self.store.load() if self.store is not None else None
        state = json.loads(self.processes.text_from_first(json.dumps(asdict(found[0]) if found else None)))
        if state is None:
            return
        self.state = TrainingState(**state)
        weights, moments = found[1:] if found else ({}, {})
        with torch.no_grad():
            for name, value in self.trained.items():
                value.copy_(spread(weights.get(name), value, self.processes))
        if self.state.updates:
            like = self.optimiser.like()
            spread_moments = {name: spread(moments.get(name), value, self.processes) for name, value in like.items()}
            self.optimiser.restore(spread_moments, self.state.updates)
        if self.store is not None:
            done = "finished" if self.state.finished else f"at step {self.state.step} of {self.schedule.total}"
            say(f"train: found this run {done} in {self.store.folder}")

    def _save_and_wait(self) -> None:
        """Save; no process goes on before it is done, so that none can end the first one in the midst of it."""
        self._save()
        self.processes.any(False)

    def _save(self) -> None:
        """All processes together: shards are gathered, one tensor at a time, and the first process writes."""
        weights = {name: self._gathered(value.detach()) for name, value in self.trained.items()}
        moments = {name: self._gathered(value) for name, value in self.optimiser.moments().items()}
        if self.store is not None:
            self.store.save(self.state, weights, moments)

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Whole and on the CPU in the first process; the others keep nothing."""
        gathered = whole(tensor)
        return gathered.cpu() if self.store is not None else gathered.new_empty(0)


def summarise(score: Score, decay: float) -> dict[str, float]:
    """A score as metrics."""
    numbers = {"loss": score.loss(decay), "expected_acceptance_length": score.expected_acceptance_length()}
    for step, (agreement, prefix) in enumerate(zip(score.agreement(), score.prefix_agreement(), strict=True)):
        numbers |= {f"agreement_{step}": agreement, f"prefix_agreement_{step}": prefix}
    return numbers


def run_metrics(trainer: Trainer, vocabulary: DraftVocabulary, validation_coverage: float) -> dict[str, Any]:
    """The metrics of a finished run; those of validation are of the exported weights.

    validation_coverage: the share of the generated tokens of the validation split that the vocabulary covers.
    validation_loss_rise: how far the last validation loss is above the lowest one, as a share of it.
    """
    state, corpus = trainer.state, trainer.corpus
    used = len(corpus.train) + len(corpus.validation)
    metrics: dict[str, Any] = {
        "rows_in": used + len(corpus.skipped),
        "rows_out": used,
        "rows_rejected": {"fewer_than_2_generated_tokens": len(corpus.skipped)} if corpus.skipped else {},
        "train_samples": len(corpus.train),
        "validation_samples": len(corpus.validation),
        "tokens": sum(ref.length for ref in corpus.train),
        "loss_tokens": sum(ref.loss_tokens for ref in corpus.train),
        "epochs": trainer.params.epochs,
        "steps": state.step,
        "draft_vocab_size": len(vocabulary),
        "draft_vocab_coverage": vocabulary.coverage,
        "train_loss": state.loss_sum / max(1, state.loss_steps),
        "tokens_per_second": state.tokens / max(state.train_s, 1e-9),
        "packing_waste": trainer.schedule.waste,
        "data_wait_share": state.wait_s / max(state.train_s, 1e-9),
    }
    if state.best:
        metrics |= {"best_step": state.best_step, "validation_loss": state.best["loss"]}
        metrics["validation_loss_rise"] = validation_rise(state.history)
        metrics["validation_vocab_coverage"] = validation_coverage
        metrics |= {name: value for name, value in state.best.items() if name != "loss"}
    return metrics


def _merit(numbers: dict[str, float]) -> tuple[float, float]:
    """What makes one validation better than another: expected acceptance length, then the loss."""
    return numbers["expected_acceptance_length"], -numbers["loss"]
