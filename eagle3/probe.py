"""Rates of this machine, measured: the pipeline itself on a few of the real prompts, in a folder that is then removed.

Each stage runs as dvc.yaml runs it, with params.yaml as it is but for one epoch and no limit on rejected rows. So the
engine, its settings, `generate.endpoints` and the length of the answers are the real ones.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from eagle3.console import interrupt, say
from eagle3.prompts import write_splits
from eagle3.schemas import PROMPTS
from eagle3.tables import Row, read_table
from eagle3.workstore import work_folder, work_root

CHANGES = {
    "generate": {"max_failed_share": 1.0},
    "reconstruct_tokens": {"max_rejected_share": 1.0, "audit_rows": 0},
    "extract": {"max_rejected_share": 1.0},
    "train": {"epochs": 1},
}


@dataclass(frozen=True)
class Probed:
    """rates: tokens per second by stage; the rest are sums over the rows that were answered."""

    rates: dict[str, float]
    rows: int
    prompt_tokens: int
    answer_tokens: int


def probe_rates(params_path: Path, prompts: Path, identity: Path, count: int) -> Probed:
    """Run the stages on `count` prompts, evenly spaced over those that train and validate. Takes minutes.

    identity: data/verifier.json, made aside where it is not there. Raises ValueError when a stage fails.
    """
    rows = [row for split in ("train", "validation") for row in read_table(prompts / f"{split}.parquet", PROMPTS)]
    if not rows:
        raise ValueError(f"{prompts}: there is no prompt to probe with")
    signal.signal(signal.SIGTERM, interrupt)
    with work_folder("probe") as held, _emptied(held / "run") as folder:
        write_splits(folder / "prompts", _spaced(rows, count))
        params = _changed_params(params_path, folder / "params.yaml")
        environment = os.environ | {"EAGLE3_WORK_DIR": str(_work_store(folder))}
        if not identity.is_file():
            identity = folder / "verifier.json"
            _run("verifier", [identity, params], environment)
        responses, tokens, states = folder / "responses", folder / "tokens", folder / "hidden_states"
        metrics = {stage: folder / f"{stage}.json" for stage in CHANGES}
        outs = {
            "generate": [folder / "prompts", identity, responses, metrics["generate"]],
            "reconstruct_tokens": [responses, identity, tokens, metrics["reconstruct_tokens"]],
            "extract": [tokens, identity, states, metrics["extract"]],
            "train": [states, identity, folder / "draft", metrics["train"], folder / "plots"],
        }
        for stage, paths in outs.items():
            _run(stage, [*paths, params], environment)
        return _probed({stage: json.loads(path.read_text()) for stage, path in metrics.items()})


@contextmanager
def _emptied(folder: Path) -> Iterator[Path]:
    """The folder, empty, and removed in the end; one that a killed probe left goes too."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _spaced(rows: Sequence[Row], count: int) -> list[Row]:
    count = min(count, len(rows))
    return [rows[number * len(rows) // count] for number in range(count)]


def _changed_params(path: Path, target: Path) -> Path:
    yaml = YAML()
    values = yaml.load(path.read_text(encoding="utf-8"))
    for section, changes in CHANGES.items():
        values[section].update(changes)
    with target.open("w", encoding="utf-8") as file:
        yaml.dump(values, file)
    return target


def _work_store(folder: Path) -> Path:
    """A work store of its own, so that nothing counts as done; only the converted verifier is the real one."""
    (work_root() / "verifiers").mkdir(exist_ok=True)
    (folder / "work").mkdir()
    (folder / "work" / "verifiers").symlink_to((work_root() / "verifiers").absolute())
    return folder / "work"


def _run(stage: str, paths: Sequence[Path], environment: dict[str, str]) -> None:
    say(f"probe: {stage}")
    command = [sys.executable, "-m", f"stages.{stage}", *map(str, paths)]
    guard = [sys.executable, "-m", "eagle3.serving.guard", str(os.getpid())]
    process = subprocess.Popen([*guard, *command], env=environment, stdout=sys.stderr, start_new_session=True)
    try:
        code = process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if code:
        raise ValueError(f"the probe ended in the stage {stage} (exit code {code}); what it said stands above")


def _probed(metrics: dict[str, Any]) -> Probed:
    rates = {stage: found["tokens_per_second"] for stage, found in metrics.items() if found.get("tokens_per_second")}
    tokens = metrics["reconstruct_tokens"]
    return Probed(rates, tokens["rows_out"], tokens["prompt_tokens"], tokens["loss_tokens"])
