"""What a draft is worth that this trainer made, against one that speculators 0.9.0 made of the same states.

    python -m benchmarks.draft_quality --train gsm8k-train.jsonl --test gsm8k-test.jsonl [--folder DIR]

The files are GSM8K's own (see benchmarks.gsm8k). States are recorded once. Both trainers read the same train samples
and choose among their checkpoints by the same validation samples; both drafts then answer the same test questions in
vLLM, by the decoder of the stage `evaluate` and its settings, without the plain engine beside it. The last line of
output is one JSON object: ratio_vs_speculators is the ratio of the two acceptance lengths; difference_interval is the
95 % interval, over the questions, of ours minus theirs. One training seed each. With --folder a run that was
interrupted goes on.

The peer is installed into an environment of its own (see benchmarks.train_step) and trains by its own `train` command
(see peer_speculators_draft.py) on the CPU. The same for both: train and validation samples, epochs, draft vocabulary
(size and tokens), auxiliary layers, number of layers, TTT steps, tokens packed into one optimiser step, frozen head.
All else is the peer's own default (Muon and AdamW with a learning rate of 1e-3 that falls to 0, KL divergence with
equal weights for the steps, norms of input and output), but for what PEERS names. Chosen for it, and why:

- total_seq_len is our train.batch_tokens: its default of 8,192 would be some 17 steps an epoch on 500 answers. A longer
  sample would be cut off; `cut_off` counts them.
- sdpa attention and the eager loss, which its documentation names for machines without flex attention and Triton.
- no data-loading processes: there are two cores, and reading takes nothing of them.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.gsm8k import STAGES, make_project
from benchmarks.project import ROOT, Project
from benchmarks.train_step import PEER, peer_interpreter
from eagle3.acceptance import count_steps, require_counters
from eagle3.console import Progress
from eagle3.digests import digest, digest_file
from eagle3.draft.data import Corpus, read_corpus
from eagle3.draft.export import load_draft
from eagle3.draft.vocab import DraftVocabulary
from eagle3.evaluation import choose_prompts
from eagle3.intervals import ratio_interval
from eagle3.params import load_params
from eagle3.serving.engine import usable_cores
from eagle3.serving.speculative import Decoder, sampling_fields, settings
from eagle3.shards import open_shard
from eagle3.tables import new_folder
from eagle3.verifier import locate_verifier, read_identity
from eagle3.workstore import write_file

#: Settings of the peer that may be tried, as arguments of its `train` beyond those that follow from ours.
PEERS: dict[str, list[str]] = {
    "defaults": [],
    "examples": ["--lr", "1e-4"],  # what its example scripts for EAGLE-3 set
    "adamw": ["--optimizer", "adamw"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--train-rows", type=int, default=500)
    parser.add_argument("--test-rows", type=int, default=40)
    parser.add_argument("--folder", type=Path, help="keep the project there and go on where it was")
    parser.add_argument("--peer", choices=PEERS, action="append", help="its settings; the best of several counts")
    given = parser.parse_args()
    interpreter = peer_interpreter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.folder or Path(temporary) / "gsm8k").absolute()
        project = make_project(folder, given.train, given.test, (given.train_rows, given.test_rows), {})
        project.repro(STAGES[: STAGES.index("evaluate")])
        ours = measure(project, project.folder / "data/draft")
        peers = {name: Peer(project, name) for name in given.peer or ["defaults"]}
        theirs = {name: measure(project, peer.train(interpreter)) for name, peer in peers.items()}
        print(json.dumps(numbers(project, peers, ours, theirs)))


def measure(project: Project, draft: Path) -> dict[str, Any]:
    """Answers to the test questions with this draft, one at a time: acceptance metrics, and of each question the tokens
    that came out of steps that judged a draft and the number of these steps. Kept in the work store."""
    params = load_params(project.folder / "params.yaml")
    own, prompts = params.evaluate, project.folder / "data/prompts/evaluation.parquet"
    asked = [digest_file(path) for path in (draft / "model.safetensors", draft / "config.json", prompts)]
    kept = project.folder / ".work/draft_quality" / f"{digest([asked, own.model_dump()])[:16]}.json"
    if not kept.exists():
        setting, decoded = settings(own)[0], []
        chosen = choose_prompts(prompts, params.verifier, params.generate, own)
        folder, tokens = locate_verifier(params.verifier), setting.num_speculative_tokens
        with (
            Decoder(params.verifier, params.engine, folder, draft, tokens) as decoder,
            Progress(f"answers with {draft}", len(chosen), "answers") as progress,
        ):
            decoder.wait_until_ready()
            for number, prompt in enumerate(chosen):
                fields = sampling_fields(own, prompt, params.verifier.max_model_len - len(prompt.ids))
                decoded.append(decoder.decode([prompt], [fields], setting, number))
                progress.advance()
        require_counters(decoded)
        answers = [answer for batch in decoded for answer in batch.answers]
        by_prompt = {a.prompt.prompt_id: [a.emitted, len(a.steps)] for a in answers}
        kept.parent.mkdir(parents=True, exist_ok=True)
        found = {"metrics": count_steps(answers, tokens).metrics(), "by_prompt": by_prompt}
        write_file(kept, json.dumps(found).encode())
    measured: dict[str, Any] = json.loads(kept.read_text())
    return measured


class Peer:
    """The peer's draft with one of the settings of PEERS, in the work store of the project."""

    def __init__(self, project: Project, name: str):
        self.flags, self.params = PEERS[name], load_params(project.folder / "params.yaml")
        self.verifier = read_identity(project.folder / "data/verifier.json")
        self.corpus = read_corpus(project.folder / "data/hidden_states", self.verifier)
        if not self.corpus.validation:
            raise SystemExit("the validation split is empty, and the peer needs one; raise --train-rows")
        self.vocabulary = load_draft(project.folder / "data/draft")[1]
        states = digest([self.verifier.digest, self.corpus.fingerprint, self.vocabulary.token_ids.tolist()])[:16]
        self.data = project.folder / ".work/draft_quality" / states
        self.run = self.data.with_name(f"{states}-{digest([PEER, self.arguments(Path(), Path())])[:16]}")

    def arguments(self, verifier: Path, checkpoints: Path) -> list[str]:
        """Of the peer's `train`: paths, what both trainers have in common, what this machine asks for, the flags."""
        train = self.params.train
        options = {
            "verifier-name-or-path": verifier,
            "data-path": self.data / "dataset",
            "hidden-states-path": self.data / "hidden_states",
            "on-missing": "raise",
            "save-path": checkpoints,
            "no-resume-from-checkpoint": None,
            "train-data-ratio": train_ratio(len(self.corpus.train), len(self.corpus.validation)),
            "d2t-path": self.data / "d2t.npy",
            "t2d-path": self.data / "t2d.npy",
            "num-layers": train.num_layers,
            "ttt-steps": train.ttt_steps,
            "epochs": train.epochs,
            "total-seq-len": train.batch_tokens,
            "draft-attn-impl": "sdpa",
            "loss-implementation": "eager",
            "num-workers": 0,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value) if word is not None]
        layers = ["--target-layer-ids", *self.verifier.aux_layer_ids]
        return [str(word) for word in (*words, *layers, *self.flags)]

    def train(self, interpreter: Path) -> Path:
        """Write the states as the peer reads them, and train; each once. The checkpoint that it calls the best."""
        checkpoints, training = self.run / "checkpoints", self.run / "training.json"
        if not self.data.exists():
            write_data(self.corpus, self.vocabulary, self.data)
        if not training.exists():
            self.run.mkdir(exist_ok=True)
            script = ROOT / "benchmarks/peer_speculators_draft.py"
            arguments = self.arguments(locate_verifier(self.params.verifier), checkpoints)
            threads = {name: str(len(usable_cores())) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
            environment = os.environ | threads | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
            command = [interpreter, script, self.data / "rows.jsonl", self.data / "dataset", training, *arguments]
            done = subprocess.run(list(map(str, command)), cwd=self.run, env=environment, check=False)
            if done.returncode:
                raise SystemExit(
                    f"the peer did not finish its training in {self.run}; the same command starts it again"
                )
        return (checkpoints / "checkpoint_best").resolve()

    def numbers(self, measured: dict[str, Any]) -> dict[str, Any]:
        """What its training and vLLM say of the draft. One that learnt nothing is an error."""
        training = json.loads((self.run / "training.json").read_text())
        loss, tenth = training["train_loss"], max(1, len(training["train_loss"]) // 10)
        first, last = statistics.mean(loss[:tenth]), statistics.mean(loss[-tenth:])
        if not last < first:
            raise SystemExit(f"the peer's training loss did not fall: from {first} to {last}")
        best = min(training["validation"], key=lambda epoch: epoch["loss_epoch"])
        expected = 1 + sum(best[f"full_acc_{step}_epoch"] for step in range(self.params.train.ttt_steps))
        return {
            "arguments": self.flags,
            "train_loss": [round(first, 4), round(last, 4)],
            "cut_off": sum(ref.length > self.params.train.batch_tokens for ref in self.corpus.train),
            **summary(measured, expected, len(loss), training["seconds"]),
        }


def train_ratio(train: int, validation: int) -> float:
    """The share of the samples that the peer makes `train` samples of: it multiplies and rounds down."""
    return (train + 0.5) / (train + validation)


def write_data(corpus: Corpus, vocabulary: DraftVocabulary, folder: Path) -> None:
    """The samples for the peer, those for training first: rows.jsonl, hidden_states/hs_<row>.safetensors with token_ids
    int64 [T] and hidden_states [T, A + 1, H] (the last layer last, before the final norm), d2t.npy, t2d.npy."""
    shard = functools.lru_cache(maxsize=64)(open_shard)
    with new_folder(folder) as out, (out / "rows.jsonl").open("w") as rows:
        (out / "hidden_states").mkdir()
        np.save(out / "d2t.npy", vocabulary.d2t.numpy())
        np.save(out / "t2d.npy", vocabulary.t2d.numpy())
        for number, ref in enumerate([*corpus.train, *corpus.validation]):
            sample = shard(corpus.folder / ref.shard).sample(ref.position)
            last = sample.last_hidden_states.unsqueeze(1)
            layers = sample.aux_hidden_states.view(len(last), -1, last.shape[2])
            states = {"token_ids": sample.input_ids.long(), "hidden_states": torch.cat([layers, last], dim=1)}
            save_file(states, out / f"hidden_states/hs_{number}.safetensors")
            row = {"input_ids": sample.input_ids.tolist(), "loss_mask": sample.loss_mask.int().tolist()}
            rows.write(json.dumps(row) + "\n")


def numbers(
    project: Project, peers: dict[str, Peer], ours: dict[str, Any], theirs: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """What the benchmark is read for; ours against the best of the peer's settings. ours, theirs: from `measure`."""
    train, params = project.metrics("train"), load_params(project.folder / "params.yaml")
    seconds = train["epochs"] * train["tokens"] / train["tokens_per_second"]
    best = max(theirs, key=lambda name: length(theirs[name]))
    return {
        "ratio_vs_speculators": round(length(ours) / length(theirs[best]), 4),
        "difference_interval": difference_interval(ours["by_prompt"], theirs[best]["by_prompt"]),
        "best_of_speculators": best,
        "ours": summary(ours, train["expected_acceptance_length"], train["steps"], seconds),
        "speculators": {name: peers[name].numbers(theirs[name]) for name in peers},
        "settings": {
            **{name: train[name] for name in ("train_samples", "tokens", "draft_vocab_size")},
            **{name: getattr(params.train, name) for name in ("epochs", "ttt_steps", "num_layers", "batch_tokens")},
            "test_questions": len(ours["by_prompt"]),
            "num_speculative_tokens": settings(params.evaluate)[0].num_speculative_tokens,
        },
    }


def length(measured: dict[str, Any]) -> float:
    """The acceptance length that `measure` found."""
    return float(measured["metrics"]["acceptance_length"])


def summary(measured: dict[str, Any], expected: float, steps: int, seconds: float) -> dict[str, Any]:
    """What is told of one draft. seconds: of its optimiser steps, without start-up, validation and checkpoints.

    A draft that is worth less than half of what its validation promises is not served as it was trained: SystemExit.
    """
    if not length(measured) - 1 > (expected - 1) / 2 > 0:
        raise SystemExit(
            f"acceptance length {length(measured):.3f} where validation promises {expected:.3f}: this draft is not "
            "served as it was trained, or has learnt nothing"
        )
    found = {"expected_acceptance_length": expected, "steps": steps, "seconds": seconds}
    return {name: round(value, 4) for name, value in (measured["metrics"] | found).items()}


def difference_interval(ours: dict[str, list[int]], theirs: dict[str, list[int]]) -> list[float] | None:
    """Both ends of the interval of ours - theirs, in acceptance length, questions drawn in pairs. None for too few."""
    sides = [np.array([side[prompt] for prompt in ours], dtype=float).T for side in (ours, theirs)]
    found = ratio_interval(sides[0][0], sides[0][1], (sides[1][0], sides[1][1]))
    return None if found is None else [round(found.low, 4), round(found.high, 4)]


if __name__ == "__main__":
    main()
