"""Whether lossless compression of recorded hidden states pays: zstd over their byte planes, ratio and speed.

    python -m benchmarks.compression [HIDDEN_STATES] [--mib 256] [--levels 1 3]

Takes real shards (default data/hidden_states) of 2-byte values. Each tensor of a sample is compressed for itself, so
that a sample can still be read alone: as it lies (`whole`), and split into planes (`low`: all low bytes, `high`: all
high bytes, `planes`: both together). On one core. The last line of output is one JSON object: for each level the bytes
of original per byte compressed (`ratio`) by plane and tensor, and MB of original per second of processor time for
compressing and restoring (`planes` with splitting and merging). Then what the disk of the folder writes and reads by
itself, for comparison.
"""

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.disk import drop_from_cache, read_sequentially, write_sequentially
from benchmarks.project import ROOT
from eagle3.shards import open_shard, tensor_bytes

MIB = 1 << 20


@dataclass
class Tally:
    """Bytes and seconds, to be summed up."""

    original: int = 0
    compressed: int = 0
    compress_s: float = 0.0
    restore_s: float = 0.0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.original + other.original,
            self.compressed + other.compressed,
            self.compress_s + other.compress_s,
            self.restore_s + other.restore_s,
        )

    def numbers(self) -> dict[str, float]:
        """Ratio and speeds."""
        return {
            "ratio": round(self.original / self.compressed, 4),
            "compress_mb_per_second": round(self.original / self.compress_s / 1e6),
            "restore_mb_per_second": round(self.original / self.restore_s / 1e6),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("states", type=Path, nargs="?", default=ROOT / "data/hidden_states", metavar="HIDDEN_STATES")
    parser.add_argument("--mib", type=int, default=256, help="so much of the shards")
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 3])
    given = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    shards = sorted(given.states.glob("*.safetensors"))
    if not shards:
        raise SystemExit(f"{given.states}: no shards; `dvc repro extract` makes them")
    result: dict[str, Any] = {}
    for level in given.levels:
        tallies: dict[str, Tally] = defaultdict(Tally)
        for tensor, piece in pieces(shards, given.mib * MIB):
            for name, tally in compress(piece, level).items():
                tallies[f"{tensor} {name}"] += tally
                tallies[name] += tally
        result[f"level {level}"] = {name: tally.numbers() for name, tally in sorted(tallies.items())}
        for name, numbers in result[f"level {level}"].items():
            print(f"level {level}, {name}: {numbers}", flush=True)
    print(json.dumps(result | disk_rates(shards, given.states)))


def pieces(shards: list[Path], size: int) -> Iterator[tuple[str, np.ndarray]]:
    """Evenly chosen samples of about `size` bytes in all: each tensor's name and its bytes, uint8 [values, 2]."""
    step = max(1, sum(path.stat().st_size for path in shards) // size)
    for path in shards:
        shard = open_shard(path)
        for position in range(0, len(shard), step):
            sample = shard.sample(position)
            for name, states in (("aux", sample.aux_hidden_states), ("last", sample.last_hidden_states)):
                if states.element_size() != 2:
                    raise SystemExit(f"{path}: {states.dtype}; only values of 2 bytes are measured")
                yield name, np.frombuffer(tensor_bytes(states), dtype=np.uint8).reshape(-1, 2)


def compress(piece: np.ndarray, level: int) -> dict[str, Tally]:
    """Of one piece, by the names of the module's docstring. The first byte of a pair is the low one."""
    codec = pa.Codec("zstd", compression_level=level)
    raw = piece.tobytes()
    whole, back = _timed(codec, raw)
    assert back == raw
    started = time.process_time()
    split = [np.ascontiguousarray(piece[:, plane]).tobytes() for plane in range(2)]
    split_s = time.process_time() - started
    low, high = (_timed(codec, plane) for plane in split)
    started = time.process_time()
    merged = np.empty_like(piece)
    for plane, (_, bytes_back) in enumerate((low, high)):
        merged[:, plane] = np.frombuffer(bytes_back, dtype=np.uint8)
    merge_s = time.process_time() - started
    assert np.array_equal(merged, piece)
    both = low[0] + high[0] + Tally(compress_s=split_s, restore_s=merge_s)
    return {"whole": whole, "low": low[0], "high": high[0], "planes": both}


def _timed(codec: pa.Codec, raw: bytes) -> tuple[Tally, bytes]:
    started = time.process_time()
    small = codec.compress(raw, asbytes=True)
    compressed = time.process_time()
    back = codec.decompress(small, len(raw), asbytes=True)
    return Tally(len(raw), len(small), compressed - started, time.process_time() - compressed), back


def disk_rates(shards: list[Path], folder: Path) -> dict[str, float]:
    """MB per second of the disk by itself: writing as many bytes beside the shards, reading the shards."""
    size = sum(path.stat().st_size for path in shards)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        write_s = write_sequentially(Path(temporary) / "sequential", size)
    drop_from_cache(shards)
    return {
        "disk_write_mb_per_second": round(size / write_s / 1e6),
        "disk_read_mb_per_second": round(size / read_sequentially(shards) / 1e6),
    }


if __name__ == "__main__":
    main()
