"""Whether training stays linear in time and flat in memory while the states stay on disk: 10 million tokens.

    python -m benchmarks.train_scale [--tokens 10000000] [--folder DIR]

The real stages `extract`, with the tests' fake engine whose states follow a rule (64 values in each of 4 layers,
float32; samples of 400 to 600 tokens), and `train` with the defaults of params.yaml but one epoch, each in a process of
its own, for a tenth, 55 % and all of the tokens. Takes a kB of disk a token, and a quarter of an hour.

The last line of output is one JSON object, and the exit code is 1 when one of these fails:

    memory_growth_mb    below 100: most anonymous memory of the trainer with all tokens, less that with a tenth
    linear              at most 1.2: seconds that the second 45 % of the tokens take, over those of the first
"""

import json
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.scale import (
    MOST_CURVATURE,
    MOST_GROWTH_MB,
    SHARES,
    curvature,
    read_arguments,
    run_arm,
    write_arm,
    write_inputs,
)
from eagle3.verifier import read_identity, verifier_digest, write_identity
from stages.train import train
from tests.fake_recording_engine import HIDDEN, VOCABULARY
from tests.token_tables import write_params

SHORTEST, LONGEST = 400, 600
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 4 * HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2 * LONGEST,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Run:
    """What so many tokens took to train on. memory_mb: the most anonymous memory of the process."""

    tokens: int
    seconds: float
    memory_mb: float
    tokens_per_second: float


def main() -> None:
    given = read_arguments(__doc__, "tokens", 10_000_000, ARMS)
    runs = []
    for share in SHARES:
        with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
            runs.append(measure(Path(temporary), int(share * given.tokens)))
            print(runs[-1], flush=True)
    found = numbers(*runs)
    print(json.dumps(found | {"runs": [asdict(run) for run in runs]}))
    sys.exit(0 if found["holds"] else 1)


def numbers(small: Run, middle: Run, large: Run) -> dict[str, Any]:
    """The result, from the runs at SHARES of the tokens."""
    growth = large.memory_mb - small.memory_mb
    linear = curvature(small.seconds, middle.seconds, large.seconds)
    return {
        "holds": growth < MOST_GROWTH_MB and linear <= MOST_CURVATURE,
        "memory_growth_mb": round(growth, 1),
        "linear": round(linear, 3),
    }


def measure(folder: Path, tokens: int) -> Run:
    """Record about so many tokens in `folder` and train on them."""
    write_inputs(folder, 2 * tokens // (SHORTEST + LONGEST), (SHORTEST, LONGEST))
    (folder / "model/config.json").write_text(json.dumps(CONFIG))
    changes = {"verifier__max_model_len": LONGEST, "train__epochs": 1, "train__validations": 1}
    params = write_params(folder / "params.yaml", folder / "model", **changes)
    identity = replace(read_identity(folder / "verifier.json"), digest=verifier_digest(params.verifier))
    write_identity(identity, folder / "verifier.json")
    run_arm("write", folder, "benchmarks.train_scale")
    seconds, memory_mb = run_arm("train", folder, "benchmarks.train_scale")
    metrics = json.loads((folder / "train.json").read_text())
    return Run(metrics["tokens"], seconds, memory_mb, metrics["tokens_per_second"])


def train_arm(folder: Path) -> None:
    """The stage."""
    names = ("hidden_states", "verifier.json", "draft", "train.json", "plots", "params.yaml")
    train(*(folder / name for name in names))


ARMS = {"write": write_arm, "train": train_arm}

if __name__ == "__main__":
    main()
