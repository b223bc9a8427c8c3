"""Prompt files to raw records: JSON Lines and Parquet, streamed, with row numbers as an editor shows them.

What kind a file is comes from its first bytes, not from its name. Memory: one line, or one batch of a Parquet file.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

MAX_LINE_BYTES = 16 << 20
BATCH_ROWS = 256
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class RawRow:
    """One row of a source: a record, or the reason why there is none."""

    number: int  # 1-based; the line of a JSONL file (blank lines count), the ordinal of a Parquet row
    size: int  # bytes of the file that it stands for, about
    record: dict[str, Any] | None
    reason: str = ""
    detail: str = ""


def read_rows(path: Path, columns: set[str] | None) -> Iterator[RawRow]:
    """Rows of one file, in order; blank lines are passed over.

    columns: those of a Parquet file to read where it has them, None = all; JSONL records come whole.
    Raises ValueError for a file that is missing, empty, or neither JSONL in UTF-8 nor Parquet.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; see prompts.sources in params.yaml") from None
    with file:
        start = file.read(4)
        file.seek(0)
        if not start:
            raise ValueError(f"{path}: the file is empty")
        if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise ValueError(f"{path}: UTF-16 text; convert it to UTF-8, e.g. iconv -f UTF-16 -t UTF-8")
        if start[:2] == b"\x1f\x8b" or start == b"\x28\xb5\x2f\xfd" or start[:2] == b"PK":
            raise ValueError(f"{path}: compressed; decompress it first")
        yield from _parquet_rows(path, columns) if start == b"PAR1" else _json_rows(file)


def _json_rows(file: BinaryIO) -> Iterator[RawRow]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if number == 1:
            line = line.removeprefix(BOM)
        if len(line) > MAX_LINE_BYTES:
            size = len(line) + _skip_line(file, line)
            yield RawRow(number, size, None, "line too long", f"more than {MAX_LINE_BYTES} bytes")
        elif line.strip():
            yield _parsed(number, line)


def _skip_line(file: BinaryIO, piece: bytes) -> int:
    """Read on to the end of the line; returns the bytes passed over."""
    skipped = 0
    while piece and not piece.endswith(b"\n"):
        piece = file.readline(1 << 20)
        skipped += len(piece)
    return skipped


def _parsed(number: int, line: bytes) -> RawRow:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return RawRow(number, len(line), None, "not UTF-8", f"byte {error.start + 1} of the line")
    except (ValueError, RecursionError) as error:
        return RawRow(number, len(line), None, "broken JSON", str(error) or "nested too deep")
    if not isinstance(record, dict):
        return RawRow(number, len(line), None, "not a JSON object", f"found {type(record).__name__}")
    return RawRow(number, len(line), record)


def _parquet_rows(path: Path, columns: set[str] | None) -> Iterator[RawRow]:
    try:
        with pq.ParquetFile(path) as file:
            if not file.metadata.num_rows:
                raise ValueError(f"{path}: the file has no rows")
            wanted = [name for name in file.schema_arrow.names if columns is None or name in columns]
            if columns is not None and not wanted:
                names = ", ".join(file.schema_arrow.names)
                raise ValueError(f"{path}: none of the columns {', '.join(sorted(columns))}; it has {names}")
            size = path.stat().st_size // file.metadata.num_rows
            number = 0
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=wanted):
                for record in batch.to_pylist():
                    number += 1
                    yield RawRow(number, size, record)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not readable as Parquet: {error}") from None
