"""The peer's side of benchmarks.draft_quality: the `train` command of speculators 0.9.0, run by a Python that has it.

Arguments: ROWS_JSONL DATA_FOLDER RESULT_JSON, then those of `speculators train` (--verifier-name-or-path among them).

ROWS_JSONL has `input_ids` and `loss_mask`, the form that the peer's prepare-data passes through; its own function makes
the dataset of them, without the shuffle of prepare-data, so that row i goes with hs_i.safetensors and the last rows are
those that the peer holds out. Configuration, model, packing, loss, optimisers, schedule, validation and checkpoints are
the peer's own. It asks for an accelerator in three places, and there the CPU is put in: the device that model and
batches move to, the device type of autocast, and the synchronisation before a step's times are taken.

RESULT_JSON: {"train_loss": [of each step], "seconds": of all steps, "validation": [numbers of each epoch]}.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from speculators.data_generation.preprocessing import build_speculator_training_dataset, load_processor
from speculators.train import cli
from speculators.train.config import TrainConfig
from speculators.train.trainer import Trainer

METRICS = logging.getLogger("speculators.metrics")


class Kept(logging.Handler):
    """Keeps what the trainer reports about itself."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, dict):
            self.reports.append(record.msg)


class CpuTrainer(Trainer):
    """The peer's trainer on the CPU: it sets both of these to an accelerator's, there or not."""

    kept = Kept()
    local_rank = property(lambda _: torch.device("cpu"), lambda _, accelerator: None)
    device_type = property(lambda _: "cpu", lambda _, accelerator: None)

    def __init__(self, *arguments: Any) -> None:
        METRICS.addHandler(self.kept)  # here, because the peer's set-up of logging takes away earlier ones
        METRICS.propagate = False  # a paragraph on the terminal for each step
        super().__init__(*arguments)


def main() -> None:
    rows_path, data, result = map(Path, sys.argv[1:4])
    config = TrainConfig.resolve(sys.argv[4:])
    rows = [json.loads(line) for line in rows_path.read_text().splitlines()]
    longest = max(len(row["input_ids"]) for row in rows)
    processor = load_processor(config.verifier.verifier_name_or_path)
    dataset = build_speculator_training_dataset(Dataset.from_list(rows), processor, longest, num_proc=1)
    if len(dataset) != len(rows):
        raise SystemExit(f"the peer takes {len(dataset)} of {len(rows)} rows; its states would belong to other rows")
    dataset.save_to_disk(data)
    cli.Trainer = CpuTrainer
    torch.accelerator.synchronize = lambda: None
    cli.main(config)
    reports = CpuTrainer.kept.reports
    train = [report for report in reports if "train" in report]
    validation = [report["val"] for report in reports if "val" in report]
    if len(validation) != config.trainer.epochs:
        raise SystemExit(f"interrupted after {len(validation)} of {config.trainer.epochs} epochs")
    found = {
        "train_loss": [report["train"]["loss"] for report in train],
        "seconds": sum(report["profile"]["step_ms"] for report in train) / 1000,
        "validation": validation,
    }
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
