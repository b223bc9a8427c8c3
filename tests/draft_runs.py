"""Runs of the stage `train` on a tiny corpus, in this process and in others."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file

from eagle3.draft.checkpoint import CheckpointStore
from eagle3.draft.data import Corpus, count_generated, read_corpus
from eagle3.draft.model import choose_sizes
from eagle3.draft.processes import alone
from eagle3.draft.training import Trainer
from eagle3.draft.vocab import choose_vocabulary
from eagle3.params import load_params
from eagle3.verifier import read_identity
from eagle3.verifier_head import load_head
from stages.train import train
from tests.draft_data import verifier_params

ROOT = Path(__file__).parent.parent
PARAMS = load_params(ROOT / "params.yaml").train
SETTINGS: dict[str, Any] = {
    "epochs": 4,
    "batch_tokens": 128,
    "precision": "float32",
    "export_dtype": "float32",
    "validations": 2,
    "checkpoint_every_s": 0,
    "learning_rate": 0.003,
}
#: The KL divergence alone, and an optimiser whose own products are not in bfloat16: what the tightest bounds hold for.
PLAIN: dict[str, Any] = {"optimiser": "adamw", "feature_loss_weight": 0.0, "ttt_loss_decay": 0.8}


class Run:
    """One project folder in which the stage can run."""

    def __init__(self, root: Path, recorded: Path, verifier: Path):
        self.root, self.recorded, self.verifier = root, recorded, verifier
        self.params = root / "params.yaml"
        self.write_params({})

    def write_params(self, changes: dict[str, Any]) -> None:
        yaml = YAML(typ="safe", pure=True)
        values = yaml.load((ROOT / "params.yaml").read_text())
        values["verifier"] = verifier_params(self.verifier).model_dump()
        values["train"] |= SETTINGS | changes
        yaml.dump(values, self.params)

    @property
    def arguments(self) -> list[Path]:
        names = ("draft", "train.json", "plots")
        inputs = [self.recorded / "hidden_states", self.recorded / "verifier.json"]
        return [*inputs, *(self.root / name for name in names), self.params]

    def stage(self, **changes: Any) -> dict[str, Any]:
        self.write_params(changes)
        train(*self.arguments)
        metrics: dict[str, Any] = json.loads((self.root / "train.json").read_text())
        return metrics

    def weights(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = load_file(self.root / "draft" / "model.safetensors")
        return found

    def trainer(self, **changes: Any) -> Trainer:
        corpus = read_corpus(self.recorded / "hidden_states", read_identity(self.recorded / "verifier.json"))
        return make_trainer(self, corpus, changes)


def make_trainer(run: Run, corpus: Corpus, changes: dict[str, Any]) -> Trainer:
    params = PARAMS.model_copy(update=SETTINGS | changes)
    vocabulary = choose_vocabulary(count_generated(corpus.folder, corpus.train, 640), [2], None, 1.0)
    config = json.loads((run.verifier / "config.json").read_text())
    sizes = choose_sizes(config, 3, len(vocabulary), 512, params)
    return Trainer(
        corpus, sizes, vocabulary, load_head(run.verifier), params, CheckpointStore(run.root / "store"), alone()
    )


def start(run: Run, work: Path) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "EAGLE3_WORK_DIR": str(work), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "stages.train", *map(str, run.arguments)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE)


def checkpoints(work: Path) -> list[Path]:
    return sorted(path for path in work.glob("train/*/step-*") if path.suffix != ".tmp")


def wait_until(condition: Any, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
