"""What a draft is worth that this trainer made, against one that speculators 0.9.0 made of the same states.

    python -m benchmarks.draft_quality --train gsm8k-train.jsonl --test gsm8k-test.jsonl [--folder DIR]

The files are GSM8K's own (see benchmarks.gsm8k). States are recorded once; both trainers read the same train samples,
choose the better epoch or step on the same validation samples, and both drafts are measured by the stage `evaluate` on
the same test prompts. The last line of output is one JSON object; ratio_vs_speculators is the ratio of the two
acceptance lengths, ratio_interval its 95 % interval over the prompts (paired bootstrap; the training seed is one). With
--folder a run that was interrupted goes on.

The peer is installed into an environment of its own (see benchmarks.train_step) and trains by its own `train` command
(see peer_speculators_draft.py) on the CPU. The same for both: train and validation samples, epochs, draft vocabulary
(size and tokens), auxiliary layers, number of layers, TTT steps, tokens packed into one optimiser step, frozen head.
All else is the peer's own default (Muon and AdamW with a learning rate of 1e-3 that falls to 0, KL divergence with
equal weights for the steps, norms of input and output), but for what PEERS names. Chosen for it, and why:

- total_seq_len is our train.batch_tokens: its default of 8,192 would be some 17 steps an epoch on 500 answers. A longer
  sample would be cut off; `cut_off` counts them, and there were none.
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
from ruamel.yaml import YAML
from safetensors.torch import save_file

from benchmarks.gsm8k import STAGES, make_project
from benchmarks.project import ROOT, Project
from benchmarks.train_step import PEER, peer_interpreter
from eagle3.digests import digest, digest_file
from eagle3.draft.data import Corpus, read_corpus
from eagle3.draft.export import load_draft
from eagle3.draft.vocab import DraftVocabulary
from eagle3.lineage import LINEAGE
from eagle3.params import Params, load_params
from eagle3.schemas import STEPS
from eagle3.serving.engine import usable_cores
from eagle3.shards import open_shard
from eagle3.tables import new_folder, read_table
from eagle3.verifier import locate_verifier, read_identity
from eagle3.workstore import link_or_copy

#: Settings of the peer that may be tried, as arguments of its `train` beyond those that follow from ours.
PEERS: dict[str, list[str]] = {
    "defaults": [],
    "examples": ["--lr", "1e-4"],  # what its example scripts for EAGLE-3 set
    "adamw": ["--optimizer", "adamw"],
}
EVALUATION = "data/evaluation"
RESAMPLES = 2000


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
        rows = (given.train_rows, given.test_rows)
        folder = given.folder or Path(temporary) / "gsm8k"
        project = make_project(folder.absolute(), given.train, given.test, rows, {"evaluate.lossless_prompts": 0})
        project.repro(STAGES)
        peers = {name: Peer(project, name) for name in given.peer or ["defaults"]}
        for peer in peers.values():
            peer.train(interpreter)
            peer.evaluate()
        print(json.dumps(numbers(project, peers)))


class Peer:
    """The peer's draft with one of the settings of PEERS, in the work store of the project."""

    def __init__(self, project: Project, name: str):
        self.project, self.flags = project, PEERS[name]
        self.params = load_params(project.folder / "params.yaml")
        self.verifier = read_identity(project.folder / "data/verifier.json")
        self.corpus = read_corpus(project.folder / "data/hidden_states", self.verifier)
        if not self.corpus.validation:
            raise SystemExit("the validation split is empty, and the peer needs one; raise --train-rows")
        self.vocabulary = load_draft(project.folder / "data/draft")[1]
        states = digest([self.corpus.fingerprint, self.vocabulary.token_ids.tolist()])[:16]
        self.data = project.folder / ".work/draft_quality" / states
        run = digest([PEER, self.flags, self.arguments(Path(), Path())])[:16]
        self.run = self.data.with_name(f"{states}-{run}")
        asked = [self.params.evaluate.model_dump(), digest_file(project.folder / "data/prompts/evaluation.parquet")]
        self.evaluation = self.run / digest(asked)[:16]

    def arguments(self, verifier: Path, checkpoints: Path) -> list[str]:
        """Of the peer's `train`: paths, what both trainers have in common, what this machine asks for, the flags."""
        train = self.params.train
        settings = {
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
        words = [word for name, value in settings.items() for word in (f"--{name}", value) if word is not None]
        layers = ["--target-layer-ids", *self.verifier.aux_layer_ids]
        return [str(word) for word in (*words, *layers, *self.flags)]

    def train(self, interpreter: Path) -> None:
        """Write the states as the peer reads them, train, and keep its best checkpoint as a draft; each part once."""
        if not self.data.exists():
            write_data(self.corpus, self.vocabulary, self.data)
        draft = self.run / "draft"
        if draft.exists():
            return
        self.run.mkdir(exist_ok=True)
        checkpoints = self.run / "checkpoints"
        script = ROOT / "benchmarks/peer_speculators_draft.py"
        files = [self.data / "rows.jsonl", self.data / "dataset", self.run / "training.json"]
        arguments = self.arguments(locate_verifier(self.params.verifier), checkpoints)
        threads = {name: str(len(usable_cores())) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        environment = os.environ | threads | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [str(word) for word in (interpreter, script, *files, *arguments)]
        subprocess.run(command, cwd=self.run, env=environment, check=True)
        with new_folder(draft) as out:
            for name in ("config.json", "model.safetensors"):
                link_or_copy((checkpoints / "checkpoint_best").resolve() / name, out / name)
            made = {
                "draft": {"model.safetensors": digest_file(out / "model.safetensors")},
                "verifier": {"digest": self.verifier.digest},
                "trainer": PEER,
            }
            (out / LINEAGE).write_text(json.dumps(made))

    def evaluate(self) -> None:
        """The command of the stage `evaluate` with this draft, and outs of its own."""
        if self.evaluation.exists():
            return
        stage = YAML(typ="safe").load(self.project.folder / "dvc.yaml")["stages"]["evaluate"]
        outs = {str(out) for kind in ("outs", "metrics", "plots") for entry in stage.get(kind, []) for out in
                ([entry] if isinstance(entry, str) else entry)}  # fmt: skip
        with new_folder(self.evaluation) as aside:
            moved = {out: aside / out for out in outs} | {"data/draft": self.run / "draft"}
            for out in outs:
                moved[out].parent.mkdir(parents=True, exist_ok=True)
            self.project.run(*(str(moved.get(word, word)) for word in stage["cmd"].split()))

    def numbers(self) -> dict[str, Any]:
        """What the peer's training and the stage `evaluate` say of it. A draft that learnt nothing is an error."""
        training = json.loads((self.run / "training.json").read_text())
        loss, tenth = training["train_loss"], max(1, len(training["train_loss"]) // 10)
        best = min(training["validation"], key=lambda numbers: numbers["loss_epoch"])
        found = {
            "settings": self.flags,
            "steps": len(loss),
            "seconds_in_steps": round(training["seconds"], 1),
            "train_loss_first": round(statistics.mean(loss[:tenth]), 4),
            "train_loss_last": round(statistics.mean(loss[-tenth:]), 4),
            **measured(json.loads((self.evaluation / "data/metrics/evaluate.json").read_text())),
            "expected_acceptance_length": round(
                1 + sum(best[f"full_acc_{step}_epoch"] for step in range(self.params.train.ttt_steps)), 4
            ),
        }
        if not found["train_loss_last"] < found["train_loss_first"]:
            raise SystemExit(f"the peer's training loss did not fall: {found}")
        check_served(found)
        return found


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


def numbers(project: Project, peers: dict[str, Peer]) -> dict[str, Any]:
    """What the benchmark is read for; ours against the best of the peer's settings."""
    train = project.metrics("train")
    ours = {
        "steps": train["steps"],
        "seconds_in_steps": round(train["epochs"] * train["tokens"] / train["tokens_per_second"], 1),
        **measured(project.metrics("evaluate")),
        "expected_acceptance_length": round(train["expected_acceptance_length"], 4),
    }
    check_served(ours)
    theirs = {name: peer.numbers() for name, peer in peers.items()}
    best = max(theirs, key=lambda name: theirs[name]["acceptance_length"])
    steps = [path / "steps.parquet" for path in (project.folder / EVALUATION, peers[best].evaluation / EVALUATION)]
    return {
        "ratio_vs_speculators": round(ours["acceptance_length"] / theirs[best]["acceptance_length"], 4),
        "ratio_interval": [round(end, 4) for end in ratio_interval(counts(steps[0]), counts(steps[1]))],
        "best_of_speculators": best,
        "ours": ours,
        "speculators": theirs,
        "settings": settings(peers[best].params, peers[best].corpus, train["draft_vocab_size"]),
    }


def measured(metrics: dict[str, Any]) -> dict[str, float]:
    """From the metrics of a stage `evaluate`."""
    rates = sorted(name for name in metrics if name.startswith("acceptance_rate_"))
    return {name: round(metrics[name], 4) for name in ("acceptance_length", *rates)}


def check_served(found: dict[str, Any]) -> None:
    """A draft that is worth less than half of what its validation promises is not served as it was trained."""
    served, promised = found["acceptance_length"] - 1, found["expected_acceptance_length"] - 1
    if not served > promised / 2 > 0:
        raise SystemExit(f"this draft is not served as it was trained, or has learnt nothing: {found}")


def settings(params: Params, corpus: Corpus, vocabulary: int) -> dict[str, Any]:
    """What both trainers have in common."""
    return {
        "train_samples": len(corpus.train),
        "tokens": sum(ref.length for ref in corpus.train),
        "cut_off": sum(ref.length > params.train.batch_tokens for ref in corpus.train),
        "test_prompts": params.evaluate.num_prompts,
        "draft_vocab_size": vocabulary,
        "num_speculative_tokens": params.evaluate.num_speculative_tokens,
        **{name: getattr(params.train, name) for name in ("epochs", "ttt_steps", "num_layers", "batch_tokens")},
    }


def counts(steps: Path) -> dict[str, tuple[int, int]]:
    """Of each prompt: tokens that came out of the steps that judged a draft, and the number of these steps."""
    found: dict[str, tuple[int, int]] = {}
    for row in read_table(steps, STEPS):
        emitted, number = found.get(row["prompt_id"], (0, 0))
        found[row["prompt_id"]] = (emitted + row["emitted"], number + 1)
    return found


def ratio_interval(
    ours: dict[str, tuple[int, int]], theirs: dict[str, tuple[int, int]], seed: int = 0
) -> tuple[float, float]:
    """95 % interval of the ratio of two acceptance lengths: the prompts are drawn again, the same for both."""
    prompts = sorted(ours.keys() & theirs.keys())
    table = np.array([[*ours[prompt], *theirs[prompt]] for prompt in prompts], dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(0, len(prompts), (RESAMPLES, len(prompts)))
    emitted, number, other_emitted, other_number = table[drawn].sum(1).T
    low, high = np.quantile(emitted / number / (other_emitted / other_number), [0.025, 0.975])
    return float(low), float(high)


if __name__ == "__main__":
    main()
