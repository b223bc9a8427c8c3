"""Whether the store of hidden states stays small and linear: 200,000 samples through planning, writing, index, reading.

    python -m benchmarks.scale [--samples 200000] [--folder DIR]

The real stage `extract` with the tests' fake engine, whose states follow a rule (64 values in each of 4 layers,
float32; samples of 8 to 24 tokens), then a trainer's reading: corpus, token counts, the batches of all epochs. Each in
a process of its own, for a tenth, 55 % and all of the samples. Then `dvc commit` of the largest result. Takes 4 GB of
the disk, and ten minutes.

The last line of output is one JSON object, and the exit code is 1 when one of these fails:

    memory_growth_mb    below 100: most anonymous memory of the process with all samples, less that with a tenth;
                        pages of mapped files are not counted: the kernel takes those back when it likes
    linear              at most 1.2: seconds that the second 45 % of the samples take, over those of the first
    dvc_commit_seconds  below 60
    files               at most 100: all files of data/tokens and data/hidden_states together
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.project import ROOT
from eagle3.draft.data import BatchStream, count_generated, read_corpus
from eagle3.draft.training import make_schedule
from eagle3.params import load_params
from eagle3.schemas import TOKENS
from eagle3.serving import recorder
from eagle3.tables import Account, Row, write_parts
from eagle3.verifier import read_identity, write_identity
from stages.extract import extract
from tests.fake_recording_engine import HIDDEN, VOCABULARY, following
from tests.test_extract import IDENTITY
from tests.token_tables import token_row, write_params

MOST_GROWTH_MB, MOST_CURVATURE, MOST_COMMIT_S, MOST_FILES = 100.0, 1.2, 60.0, 100
SHARES = (0.1, 0.55, 1.0)
PROMPT, LENGTHS = 6, (8, 25)


@dataclass(frozen=True)
class Run:
    """What one number of samples took. Memory: the most anonymous memory of the process, in MB."""

    samples: int
    write_seconds: float
    write_mb: float
    read_seconds: float
    read_mb: float
    files: int
    shard_bytes: int


def main() -> None:
    given = read_arguments(__doc__, "samples", 200_000, ARMS)
    runs = []
    for share in SHARES:
        with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
            runs.append(measure(Path(temporary), int(share * given.samples)))
            print(runs[-1], flush=True)
            if share == SHARES[-1]:
                commit_s = commit(Path(temporary))
    found = numbers(runs, commit_s)
    print(json.dumps(found | {"runs": [asdict(run) for run in runs]}))
    sys.exit(0 if found["holds"] else 1)


def read_arguments(
    doc: str | None, unit: str, default: int, arms: dict[str, Callable[[Path], None]]
) -> argparse.Namespace:
    """The command line: `--folder`, and how many of the `unit`. In a process of `run_arm`: runs that arm, and ends."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(f"--{unit}", type=int, default=default)
    parser.add_argument("--folder", type=Path, help="an existing folder to work in; else a temporary one")
    parser.add_argument("--arm", choices=arms, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.arm:
        arms[given.arm](given.folder)
        sys.exit()
    return given


def curvature(small: float, middle: float, large: float) -> float:
    """Seconds at SHARES: what the second 45 % take, over what the first do."""
    return (large - middle) / (middle - small)


def numbers(runs: list[Run], commit_s: float) -> dict[str, Any]:
    """The result, from the runs at SHARES of the samples and the seconds of `dvc commit`."""
    small, middle, large = runs
    growth = {"write": large.write_mb - small.write_mb, "read": large.read_mb - small.read_mb}
    linear = {
        "write": curvature(small.write_seconds, middle.write_seconds, large.write_seconds),
        "read": curvature(small.read_seconds, middle.read_seconds, large.read_seconds),
    }
    return {
        "holds": max(growth.values()) < MOST_GROWTH_MB
        and max(linear.values()) <= MOST_CURVATURE
        and commit_s < MOST_COMMIT_S
        and large.files <= MOST_FILES,
        "memory_growth_mb": {name: round(value, 1) for name, value in growth.items()},
        "linear": {name: round(value, 3) for name, value in linear.items()},
        "dvc_commit_seconds": round(commit_s, 1),
        "files": large.files,
    }


def measure(folder: Path, samples: int) -> Run:
    """Make so many samples in `folder`, record them, read them."""
    write_inputs(folder, samples, LENGTHS)
    write_seconds, write_mb = run_arm("write", folder, "benchmarks.scale")
    read_seconds, read_mb = run_arm("read", folder, "benchmarks.scale")
    outs = [path for name in ("tokens", "hidden_states") for path in (folder / name).iterdir()]
    size = sum(path.stat().st_size for path in outs if path.suffix == ".safetensors")
    return Run(samples, write_seconds, write_mb, read_seconds, read_mb, len(outs), size)


def write_inputs(folder: Path, samples: int, lengths: tuple[int, int]) -> None:
    """params.yaml, a verifier whose head obeys the fake engine's rule, its identity, and the token table."""
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"rms_norm_eps": 1e-5, "tie_word_embeddings": True}))
    weights = {"model.embed_tokens.weight": torch.eye(VOCABULARY), "model.norm.weight": torch.ones(HIDDEN)}
    save_file(weights, model / "model.safetensors")
    shards = load_params(ROOT / "params.yaml").extract
    sizes = {"extract__shard_min_mib": shards.shard_min_mib, "extract__shard_max_mib": shards.shard_max_mib}
    write_params(folder / "params.yaml", model, **sizes)
    write_identity(IDENTITY, folder / "verifier.json")
    account = Account("scale", 0)
    account.rows_in = account.rows_out = samples
    write_parts(folder / "tokens", token_rows(samples, lengths), TOKENS, "sample_digest", account)


def token_rows(samples: int, lengths: tuple[int, int]) -> Iterator[Row]:
    """Samples that obey the fake engine's rule; most of them differ. lengths: the least, and one above the most."""
    choice = random.Random(0)
    for number in range(samples):
        ids = [choice.randrange(VOCABULARY) for _ in range(PROMPT)]
        for _ in range(choice.randrange(*lengths) - PROMPT):
            ids.append(following(ids[-1]))
        row = token_row(ids, PROMPT, split="train" if number % 20 else "validation")
        yield row | {"sample_id": f"{number:064x}"}


def run_arm(arm: str, folder: Path, module: str) -> tuple[float, float]:
    """Seconds and the most anonymous memory (MB) of one of the module's ARMS in a process of its own."""
    environment = os.environ | {"EAGLE3_WORK_DIR": str(folder / "work"), "EAGLE3_FAKE_REQUESTS": os.devnull}
    command = [sys.executable, "-m", module, "--arm", arm, "--folder", str(folder)]
    started = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    most: list[float] = [0.0]
    watcher = threading.Thread(target=watch_memory, args=(process.pid, most))
    watcher.start()
    status = process.wait()
    seconds = time.monotonic() - started
    watcher.join()
    if status:
        raise SystemExit(f"{arm} failed ({status})")
    return seconds, most[0]


def watch_memory(pid: int, most: list[float], every_s: float = 0.02) -> None:
    """Keep the most anonymous memory (MB) of a process in most[0] until it ends."""
    while True:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return
        anonymous = [line for line in status.splitlines() if line.startswith("RssAnon:")]
        if not anonymous:
            return  # it is a zombie
        most[0] = max(most[0], int(anonymous[0].split()[1]) / 1024)
        time.sleep(every_s)


def write_arm(folder: Path) -> None:
    """The stage."""
    recorder.ENGINE = "tests.fake_recording_engine:run_engine"
    extract(*(folder / name for name in ("tokens", "verifier.json", "hidden_states", "metrics.json", "params.yaml")))


def read_arm(folder: Path) -> None:
    """What a trainer reads."""
    params = load_params(folder / "params.yaml").train
    corpus = read_corpus(folder / "hidden_states", read_identity(folder / "verifier.json"))
    count_generated(corpus.folder, corpus.train, VOCABULARY)
    steps = make_schedule(corpus.train, params).after(0)
    with BatchStream(corpus.folder, steps, params.ttt_steps) as stream:
        tokens = sum(batch.tokens for group in stream for batch in group)
    assert tokens == params.epochs * sum(ref.length for ref in corpus.train)


def commit(folder: Path) -> float:
    """Seconds of `dvc commit` of data/hidden_states as DVC has never seen it."""
    (folder / "dvc.yaml").write_text("stages:\n  extract:\n    cmd: 'false'\n    outs: [hidden_states]\n")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for words in (["git", "init", "--quiet"], ["dvc", "init", "--quiet"]):
        subprocess.run(words, cwd=folder, env=os.environ | {"PATH": path}, check=True)
    (folder / ".dvc/config").write_text((ROOT / ".dvc/config").read_text())
    started = time.monotonic()
    subprocess.run(["dvc", "commit", "--quiet", "--force"], cwd=folder, env=os.environ | {"PATH": path}, check=True)
    return time.monotonic() - started


ARMS = {"write": write_arm, "read": read_arm}

if __name__ == "__main__":
    main()
