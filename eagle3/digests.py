"""Content keys: the SHA-256 of canonical JSON, of a file, of token ids."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def canonical_json(value: Any) -> str:
    """One spelling per value: sorted keys, no spaces, ASCII. Raises ValueError for NaN and infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest(value: Any) -> str:
    """SHA-256 (hex) of a JSON-like value."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def digest_bytes(data: bytes) -> str:
    """SHA-256 (hex) of bytes."""
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    """SHA-256 (hex) of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_tokens(input_ids: npt.ArrayLike, loss_mask: npt.ArrayLike) -> str:
    """SHA-256 (hex) of a sample: the number of ids, ids as little-endian int32, then one byte per mask entry."""
    ids = np.asarray(input_ids, dtype="<i4")
    state = hashlib.sha256(struct.pack("<q", len(ids)))
    state.update(ids.tobytes())
    state.update(np.asarray(loss_mask, dtype=np.bool_).tobytes())
    return state.hexdigest()


def fraction(hex_digest: str) -> float:
    """A digest as a number in [0, 1), uniform over digests."""
    return int(hex_digest[:13], 16) / 16**13


def derived_seed(seed: int, *names: str | int) -> int:
    """A seed for one named item, independent of order and concurrency. In [0, 2**31)."""
    return int(digest([seed, *names])[:8], 16) & 0x7FFFFFFF
