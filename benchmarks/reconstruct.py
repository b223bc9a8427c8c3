"""How fast `reconstruct-tokens` is, and whether its memory grows with the rows.

    python -m benchmarks.reconstruct [--rows 200000] [--markers single|several] [--folder DIR]

Makes synthetic responses (prompts of about 100 tokens, outputs of about 1,000, half of them with thinking) and runs the
real stage on a tenth of them and on all of them, each as a process bound to one core. The last line of output is one
JSON object:

    tokens_per_second    input tokens per second of processor time, start-up left out (the difference of the two runs)
    memory_growth_mb     peak memory of the large run less that of the small one
    seconds              of the large run by the clock, start-up included

markers: single = each marker is one token; several = the tokenizer splits it, and it is searched for as text.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from ruamel.yaml import YAML

from eagle3.digests import canonical_json, digest
from eagle3.params import Params, load_params
from eagle3.reasoning import Markers
from eagle3.schemas import RESPONSES
from eagle3.tables import Account, Row, write_parts
from eagle3.verifier import VerifierIdentity, identify_verifier, write_identity

ROOT = Path(__file__).parent.parent
MAX_LENGTH = 8192
#: Texts that the bundled verifier's tokenizer has as tokens of its own, and texts that it splits.
MARKERS = {"single": ("<issue_start>", "<issue_comment>"), "several": ("<think>", "</think>")}
SAMPLING = canonical_json(
    {"temperature": 0.6, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
)


@dataclass(frozen=True)
class Run:
    """What one run of the stage took."""

    rows: int
    tokens: int
    seconds: float
    processor_seconds: float
    peak_mb: float


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--markers", choices=MARKERS, default="single")
    parser.add_argument("--folder", type=Path, help="work here instead of in a temporary folder (about 4 GB)")
    given = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # the stage inherits it
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        params = write_params(folder / "params.yaml", *MARKERS[given.markers])
        identity = identify_verifier(params.verifier, params.reasoning)
        write_identity(identity, folder / "verifier.json")
        small, large = (measure(folder, identity, rows) for rows in (given.rows // 10, given.rows))
    result = {
        "markers": given.markers,
        "tokens_per_second": round((large.tokens - small.tokens) / (large.processor_seconds - small.processor_seconds)),
        "memory_growth_mb": round(large.peak_mb - small.peak_mb, 1),
        "seconds": round(large.seconds, 1),
        "runs": [asdict(small), asdict(large)],
    }
    print(json.dumps(result))


def write_params(path: Path, start: str, end: str) -> Params:
    """params.yaml with these markers."""
    yaml = YAML()
    values = yaml.load((ROOT / "params.yaml").read_text())
    values["verifier"]["max_model_len"] = MAX_LENGTH
    values["reasoning"] |= {"format": "custom", "start": start, "end": end}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        yaml.dump(values, file)
    return load_params(path)


def measure(folder: Path, identity: VerifierIdentity, rows: int) -> Run:
    """Make so many responses and run the stage on them, on one core."""
    account = Account("generate", 0)
    account.rows_in = account.rows_out = rows
    write_parts(folder / "responses", responses(identity, rows), RESPONSES, "prompt_id", account)
    words = [str(folder / name) for name in ("responses", "verifier.json", "tokens", "metrics.json", "params.yaml")]
    started = time.monotonic()
    stage = subprocess.Popen([sys.executable, "-m", "stages.reconstruct_tokens", *words], cwd=ROOT)
    _, status, usage = os.wait4(stage.pid, 0)
    if status:
        raise SystemExit(f"the stage failed ({status})")
    return Run(
        rows=rows,
        tokens=json.loads((folder / "metrics.json").read_text())["tokens"],
        seconds=time.monotonic() - started,
        processor_seconds=usage.ru_utime + usage.ru_stime,
        peak_mb=usage.ru_maxrss / 1024,
    )


def responses(identity: VerifierIdentity, rows: int) -> Iterator[Row]:
    """Rows of schemas.RESPONSES with ids that are spread as in text: few of them often, many of them seldom."""
    random = np.random.default_rng(0)
    common = random.permutation(np.arange(100, identity.vocab_size))
    stop = identity.stop_token_ids[0]
    for number in range(rows):
        prompt = ids_like_text(random, common, random.lognormal(4.5, 0.5))
        output = ids_like_text(random, common, random.lognormal(6.7, 0.65))
        if number % 2:
            output = with_thinking(output, identity.markers)
        output = np.append(output, np.int32(stop))
        yield {
            "prompt_id": digest(number),
            "sample": 0,
            "source": "synthetic",
            "category": f"category {number % 10}",
            "split": "train",
            "messages": [{"role": "user", "content": "word " * len(prompt)}],
            "reference": None,
            "prompt_token_ids": prompt,
            "output_token_ids": output,
            "reasoning": None,
            "content": f"{number} word" * len(output),
            "finish_reason": "stop",
            "stop_reason": None,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(output),
            "latency_s": 1.0,
            "attempts": 1,
            "sampling": SAMPLING,
            "chat_template_kwargs": "{}",
            "verifier_digest": identity.digest,
            "engine": identity.engine,
        }


def ids_like_text(random: np.random.Generator, common: np.ndarray, length: float) -> np.ndarray:
    """About `length` ids, int32, never above the limit of a row."""
    size = int(np.clip(length, 8, MAX_LENGTH // 2 - 100))
    places = np.exp(random.random(size) * np.log(len(common))).astype(np.int64)  # by Zipf's law
    return common[np.minimum(places, len(common) - 1)].astype(np.int32)


def with_thinking(output: np.ndarray, markers: Markers) -> np.ndarray:
    """The output with its first half as thinking."""
    assert markers.start is not None and markers.end is not None
    half = len(output) // 2
    parts = [markers.start.ids, output[:half], markers.end.ids, output[half:]]
    return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])


if __name__ == "__main__":
    main()
