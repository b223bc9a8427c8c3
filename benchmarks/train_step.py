"""One optimiser step of EAGLE-3 training against speculators 0.9.0: tokens per second, memory, share of the machine.

    python -m benchmarks.train_step [--tokens 2048 8192] [--rounds 2]

Forward, backward and optimiser (AdamW on both sides); K = 3 TTT steps, 8,192 draft tokens, documents of 256 tokens of
which 90 are prompt, the bundled verifier's sizes, random inputs. The peer is installed into an environment of its own
under the work root (about 1 GB, once) and runs in its best setting of those that its CPU backward supports: attention
sdpa, float32 or bfloat16. The arms take turns, each in a process of its own. The last line of output is one JSON
object.

matmul_fraction: multiply-adds of the matrix products that cannot be avoided, per second, over the rate of one large
matrix product in the same precision in the same process. What cannot be avoided, with N context rows, R query rows, U
target rows, C counted rows over all steps:
    fc                  2 N A H H              (no gradient for its input)
    q, k, v, o, mlp     3 of each              (forward, gradient of the input, gradient of the weight)
    attention           scores and values of the visible pairs; backward 2.5 times forward
    targets             U H D
    draft head          2 C H D                (frozen: no gradient of the weight)
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from eagle3.draft.data import Batch, build_batch
from eagle3.draft.loss import Objective
from eagle3.draft.model import DraftModel, DraftSizes, choose_sizes, initialise
from eagle3.draft.optimiser import Optimiser
from eagle3.draft.training import PRECISIONS
from eagle3.draft.ttt import Teacher, score_batch
from eagle3.params import load_params
from eagle3.shards import Sample
from eagle3.verifier import locate_verifier
from eagle3.workstore import work_root

ROOT = Path(__file__).parent.parent
PEER = "speculators==0.9.0"
STEPS, DRAFT_VOCAB, DOCUMENT, PROMPT, REPETITIONS = 3, 8192, 256, 90, 4
PEER_SETTINGS = [("sdpa", "float32"), ("sdpa", "bfloat16")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192], help="packed tokens of a step")
    parser.add_argument("--rounds", type=int, default=2, help="how often the arms take turns")
    parser.add_argument("--arm", choices=sorted(PRECISIONS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.arm:
        print(json.dumps(run_ours(given.tokens[0], given.arm)))
        return
    folder = locate_verifier(load_params(ROOT / "params.yaml").verifier)
    peer = peer_interpreter()
    result: dict[str, Any] = {}
    for tokens in given.tokens:
        result |= compare(tokens, given.rounds, peer, folder)
    print(json.dumps(result))


def compare(tokens: int, rounds: int, peer: Path, folder: Path) -> dict[str, Any]:
    """Ours in both precisions and the peer in its settings, in turns."""
    sizes = [str(n) for n in (tokens, STEPS, DRAFT_VOCAB, DOCUMENT, PROMPT, REPETITIONS)]
    arms = {
        f"ours {precision}": [
            sys.executable, "-m", "benchmarks.train_step", "--arm", precision, "--tokens", str(tokens)
        ]
        for precision in sorted(PRECISIONS)
    } | {
        f"speculators {attention} {precision}": [
            str(peer), str(ROOT / "benchmarks/peer_speculators_step.py"), str(folder), attention, precision, *sizes
        ]
        for attention, precision in PEER_SETTINGS
    }  # fmt: skip
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for number in range(rounds):
        for name in list(arms) if number % 2 == 0 else reversed(arms):
            outcome = run(arms[name])
            found[name].append(outcome)
            rate = tokens / statistics.median(outcome["seconds"])
            print(
                f"{tokens} tokens, {name}: {rate:,.0f} tokens/s, peak {outcome['peak_bytes'] / 2**30:.2f} GiB",
                flush=True,
            )
    speed = {
        name: tokens / statistics.median(second for outcome in outcomes for second in outcome["seconds"])
        for name, outcomes in found.items()
    }
    ours = max((name for name in speed if name.startswith("ours")), key=lambda name: speed[name])
    theirs = max((name for name in speed if name.startswith("spec")), key=lambda name: speed[name])
    memory = {name: min(outcome["peak_bytes"] for outcome in found[name]) for name in found}
    return {
        f"ratio_vs_speculators_{tokens}": round(speed[ours] / speed[theirs], 2),
        f"best_{tokens}": [ours, theirs],
        f"tokens_per_second_{tokens}": {name: round(value) for name, value in speed.items()},
        f"peak_memory_ratio_{tokens}": round(memory[ours] / memory[theirs], 3),
        f"matmul_fraction_{tokens}": {
            name: round(statistics.median(outcome["matmul_fraction"] for outcome in found[name]), 3)
            for name in found
            if name.startswith("ours")
        },
    }


def run(command: list[str]) -> dict[str, Any]:
    """The JSON that an arm prints last. Its output is shown when it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    outcome: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return outcome


def run_ours(tokens: int, precision: str) -> dict[str, Any]:
    """Seconds of each step, peak memory, share of the matrix-product rate."""
    torch.manual_seed(0)
    params = load_params(ROOT / "params.yaml")
    config = json.loads((locate_verifier(params.verifier) / "config.json").read_text())
    sizes = choose_sizes(config, 3, DRAFT_VOCAB, config["max_position_embeddings"], params.train)
    draft = DraftModel(sizes, PRECISIONS[precision])
    teacher = random_teacher(sizes)
    initialise(draft, teacher.draft_head, teacher.norm, seed=0)
    draft.lm_head.weight.requires_grad_(False)
    trained = {name: value for name, value in draft.named_parameters() if value.requires_grad}
    optimiser = Optimiser(trained, params.train.model_copy(update={"optimiser": "adamw"}))
    batch = random_batch(tokens, sizes)
    weights = torch.ones(STEPS) / batch.counted.sum(1)
    objective = Objective("forward_kl", 0.0, 0.0, "renormalise")
    seconds = []
    for _ in range(REPETITIONS + 1):  # the first one warms up
        start = time.perf_counter()
        score_batch(draft, batch, teacher, weights, None, objective)[0].backward()
        optimiser.step(params.train.learning_rate)
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    rate = multiply_adds(batch, sizes) / statistics.median(seconds[1:])
    return {
        "seconds": seconds[1:],
        "peak_bytes": peak,
        "matmul_fraction": rate / matmul_rate(PRECISIONS[precision]),
    }


def random_batch(tokens: int, sizes: DraftSizes) -> Batch:
    """Documents of DOCUMENT tokens with PROMPT prompt tokens each."""
    mask = torch.arange(DOCUMENT) >= PROMPT

    def sample() -> Sample:
        ids = torch.randint(0, DRAFT_VOCAB, (DOCUMENT,), dtype=torch.int32)
        aux = torch.randn(DOCUMENT, sizes.num_aux_layers * sizes.hidden_size).to(torch.bfloat16)
        return Sample(ids, mask, aux, torch.randn(DOCUMENT, sizes.hidden_size).to(torch.bfloat16))

    return build_batch([(str(number), sample()) for number in range(tokens // DOCUMENT)], STEPS)


def random_teacher(sizes: DraftSizes) -> Teacher:
    """A verifier's embedding and head with random values, the first DRAFT_VOCAB tokens in the draft vocabulary."""
    head = torch.randn(sizes.vocab_size, sizes.hidden_size).to(torch.bfloat16) * 0.05
    ids = torch.arange(sizes.vocab_size)
    return Teacher(
        head, torch.ones(sizes.hidden_size), head, head[:DRAFT_VOCAB], ids.where(ids < DRAFT_VOCAB, -1), 1e-5
    )


def multiply_adds(batch: Batch, sizes: DraftSizes) -> float:
    """Multiply-adds of one step that cannot be avoided; the formula stands at the top."""
    hidden, wide = sizes.hidden_size, sizes.num_heads * sizes.head_dim
    narrow = sizes.num_kv_heads * sizes.head_dim
    context, queries, targets = len(batch.context_ids), len(batch.rows), len(batch.target_states)
    counted = int(batch.counted.sum())
    count = 2.0 * context * sizes.num_aux_layers * hidden * hidden
    for step in range(STEPS):
        keys = context if step == 0 else queries
        count += 3 * (queries * 2 * hidden * wide + keys * 2 * hidden * 2 * narrow + queries * wide * hidden)
        count += 3 * 3 * queries * hidden * sizes.intermediate_size
        pairs = sum(row - start + 1 for start, first, end in batch.documents for row in range(first, end))
        count += 3.5 * 2 * pairs * wide
    return count + targets * hidden * DRAFT_VOCAB + 2 * counted * hidden * DRAFT_VOCAB


def matmul_rate(dtype: torch.dtype, size: int = 2048, repetitions: int = 8) -> float:
    """Multiply-adds per second of a large square matrix product."""
    left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - start)
    return size**3 / min(seconds)


def peer_interpreter() -> Path:
    """The Python of an environment with the peer; made once. TORCH_ARGS is passed to pip as in the Makefile."""
    folder = work_root() / "benchmarks" / PEER
    python, done = folder / "bin/python", folder / ".complete"
    if not done.exists():
        print(f"installing {PEER} into {folder}, once", flush=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        torch_args = os.environ.get("TORCH_ARGS", "").split()
        subprocess.run([*pip, "install", *torch_args, f"torch=={torch.__version__.partition('+')[0]}"], check=True)
        subprocess.run([*pip, "install", PEER], check=True)
        subprocess.run([*pip, "uninstall", "--yes", "torchvision", "torchaudio"], check=True)
        done.touch()
    return python


if __name__ == "__main__":
    main()
