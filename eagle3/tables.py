"""Parquet in and out: single files, and folders of parts whose boundaries are content-defined.

A folder is written aside and renamed when its index is complete, so a reader never meets half of one.
"""

import json
import math
import os
import shutil
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from eagle3.boundaries import cut_points
from eagle3.digests import digest, digest_file
from eagle3.schemas import PARTS, REJECTED
from eagle3.workstore import naming, write_file

INDEX = "index.parquet"
PART_BYTES = 8 << 20, 64 << 20
REJECTED_BYTES = 1 << 20  # of rejected rows in memory

Row = dict[str, Any]


class Rejected:
    """Rows of schemas.REJECTED, in order. A few stay in memory, more of them in a temporary file."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=REJECTED_BYTES)  # noqa: SIM115 - lives as long as this
        self._count = 0

    def append(self, row: Row) -> None:
        with naming(Path(tempfile.gettempdir())):
            self._file.seek(0, os.SEEK_END)
            self._file.write(json.dumps(row).encode() + b"\n")
        self._count += 1

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Row]:
        self._file.seek(0)
        for line in self._file:
            yield json.loads(line)


class Account:
    """Row accounting of one stage: rows in = rows out + rows rejected, each with a reason."""

    def __init__(self, stage: str, max_rejected_share: float, setting: str = "max_rejected_share"):
        """setting: the key of max_rejected_share in the stage's section."""
        self.stage, self.max_rejected_share = stage, max_rejected_share
        self._setting = f"{stage.replace('-', '_')}.{setting}"
        self.rows_in = self.rows_out = 0
        self.rejected = Rejected()
        self._first = ""
        self._reasons: Counter[str] = Counter()
        self.tolerated: Counter[str] = Counter()

    def reject(self, row: str, reason: str, detail: str = "", *, tolerated: bool = False) -> None:
        """Count a row out. `tolerated` reasons (duplicates) never fail the stage."""
        self.rejected.append({"row": row, "reason": reason, "detail": detail[:500]})
        self._first = self._first or f"; first: {row}: {reason} {detail[:500]}".rstrip()
        self._reasons[reason] += 1
        self.tolerated[reason] += tolerated

    def reasons(self) -> dict[str, int]:
        """Rejected rows by reason."""
        return dict(sorted(self._reasons.items()))

    def settle(self) -> dict[str, Any]:
        """The counts as metrics. Raises ValueError when too many rows were rejected or none is left."""
        if self.rows_in != self.rows_out + len(self.rejected):
            raise AssertionError(f"{self.stage}: {self.rows_in} in, {self.rows_out} out, {len(self.rejected)} rejected")
        failed = len(self.rejected) - self.tolerated.total()
        listed = ", ".join(f"{count} {reason}" for reason, count in self.reasons().items())
        if not self.rows_out:
            raise ValueError(
                f"{self.stage}: no row is left of {self.rows_in} ({listed or 'the input is empty'}){self._first}"
            )
        if failed > self.max_rejected_share * self.rows_in:
            raise ValueError(
                f"{self.stage}: {failed} of {self.rows_in} rows rejected ({listed}){self._first}; "
                f"more than {self._setting} = {self.max_rejected_share} allows"
            )
        return {"rows_in": self.rows_in, "rows_out": self.rows_out, "rows_rejected": self.reasons()}


def write_table(path: Path, rows: Iterable[Row], schema: pa.Schema, batch_rows: int = 1000) -> int:
    """Write one Parquet file aside and rename it; returns the number of rows. Memory: one batch."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.tmp")
    count = 0
    with naming(path), pq.ParquetWriter(aside, schema, compression="zstd") as writer:
        for batch in _batches(rows, batch_rows):
            writer.write_table(_table(batch, schema))
            count += len(batch)
    aside.replace(path)
    return count


#: A column and some of its values: only rows that have one of them are wanted.
Only = tuple[str, Collection[str]]


def read_table(
    path: Path, schema: pa.Schema, batch_rows: int = 256, *, arrays: bool = False, only: Only | None = None
) -> Iterator[Row]:
    """Rows of one Parquet file, a batch at a time. Raises ValueError for a file that is missing, damaged or foreign.

    arrays: lists of numbers come as NumPy arrays, which is many times faster; a list with a null in it stays a list.
    """
    wanted = None if only is None else pa.array(sorted(only[1]), pa.string())
    with _reading(path), pq.ParquetFile(path) as file:
        _check_columns(path, file, schema)
        for batch in file.iter_batches(batch_size=batch_rows, columns=schema.names):
            if only is not None:
                batch = batch.filter(pc.is_in(batch.column(only[0]), value_set=wanted))
            yield from _rows(batch) if arrays else batch.to_pylist()


def read_columns(path: Path, schema: pa.Schema) -> pa.Table:
    """Some columns of one Parquet file, whole; of a part without a look at its digest. Raises like read_table."""
    with _reading(path), pq.ParquetFile(path) as file:
        _check_columns(path, file, schema)
        return file.read(columns=schema.names)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; `dvc repro` makes it") from None
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not readable as Parquet: {error}") from None


def _check_columns(path: Path, file: pq.ParquetFile, schema: pa.Schema) -> None:
    absent = [name for name in schema.names if name not in file.schema_arrow.names]
    if absent:
        raise ValueError(f"{path}: column {', '.join(absent)} is missing; has {', '.join(file.schema_arrow.names)}")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` to fill; renamed to `out` when the block ends well, removed when it does not."""
    aside = out.with_name(out.name + ".tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        with naming(aside):
            yield aside
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    shutil.rmtree(out, ignore_errors=True)
    aside.rename(out)


def write_parts(out: Path, rows: Iterable[Row], schema: pa.Schema, key: str, account: Account) -> None:
    """Write rows as parts with an index, and the account's rejected rows beside them. Memory: one part.

    key: the column (text) whose digest decides the boundaries.
    """
    with new_folder(out) as folder:
        index = []
        for part in _parts(rows, key):
            name = f"part-{digest([row[key] for row in part])[:16]}.parquet"
            pq.write_table(_table(part, schema), folder / name, compression="zstd")
            size = (folder / name).stat().st_size
            index.append({"file": name, "rows": len(part), "bytes": size, "sha256": digest_file(folder / name)})
        write_table(folder / "rejected.parquet", account.rejected, REJECTED)
        account.settle()
        write_table(folder / INDEX, index, PARTS)


def read_parts(folder: Path, schema: pa.Schema, *, arrays: bool = False, only: Only | None = None) -> Iterator[Row]:
    """Rows of a folder of parts, in order. Raises ValueError for a missing, damaged or foreign part.

    arrays, only: see read_table.
    """
    for part in list_parts(folder):
        check_part(part)
        yield from read_table(part.path, schema, arrays=arrays, only=only)


@dataclass(frozen=True)
class Part:
    """One part of a folder, as the index has it."""

    path: Path
    rows: int
    bytes: int
    sha256: str


def list_parts(folder: Path) -> Iterator[Part]:
    """The parts of a folder, in order. Raises ValueError for one that is missing or lies elsewhere."""
    for row in read_table(folder / INDEX, PARTS):
        part = Part(folder / row["file"], row["rows"], row["bytes"], row["sha256"])
        if part.path.parent != folder or not part.path.is_file():
            raise ValueError(
                f"{part.path}: named by {folder / INDEX} but not there; `dvc checkout` or `dvc repro` restores it"
            )
        yield part


def check_part(part: Part) -> None:
    """Raises ValueError for a part that differs from its digest."""
    if part.path.stat().st_size != part.bytes or digest_file(part.path) != part.sha256:
        index = part.path.with_name(INDEX)
        raise ValueError(f"{part.path}: differs from its digest in {index}; `dvc checkout --force` restores it")


class PartRows:
    """Rows of a folder of parts from any row on; reads only the parts that are asked for. Memory: one part.

    Raises ValueError as read_parts.
    """

    def __init__(self, folder: Path, schema: pa.Schema):
        self._schema, self._parts = schema, list(list_parts(folder))
        self._starts = list(accumulate((part.rows for part in self._parts), initial=0))
        self._held: tuple[int, pa.Table] | None = None

    def since(self, row: int) -> Iterator[tuple[int, Row]]:
        """The rows from number `row` on, each with its number."""
        for number in range(bisect_right(self._starts, row) - 1, len(self._parts)):
            table = self._part(number).slice(row - self._starts[number])
            for batch in table.to_batches(max_chunksize=256):
                yield from enumerate(batch.to_pylist(), row)
                row += len(batch)

    def _part(self, number: int) -> pa.Table:
        if self._held is None or self._held[0] != number:
            self._held = None
            check_part(self._parts[number])
            self._held = number, read_columns(self._parts[number].path, self._schema)
        return self._held[1]


def count_parts(folder: Path) -> int:
    """Number of rows in a folder of parts, from its index."""
    return sum(part["rows"] for part in read_table(folder / INDEX, PARTS))


def write_metrics(path: Path, metrics: dict[str, Any]) -> None:
    """Metrics as JSON: finite numbers and nested maps of them. Raises ValueError that names any other value."""
    _refuse_other_than_numbers(metrics, path.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, (json.dumps(metrics, indent=2) + "\n").encode())


def _refuse_other_than_numbers(value: Any, name: str) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _refuse_other_than_numbers(inner, f"{name}: {key}")
    elif isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"metric {name} is {value!r}; only finite numbers may be written")


def _table(rows: list[Row], schema: pa.Schema) -> pa.Table:
    """Rows as a table; lists of numbers that are arrays in every row are copied whole, not number by number."""
    return pa.Table.from_arrays([_filled([row[f.name] for row in rows], f.type) for f in schema], schema=schema)


def _filled(values: list[Any], kind: pa.DataType) -> pa.Array:
    if not pa.types.is_list(kind) or not values or not all(isinstance(value, np.ndarray) for value in values):
        return pa.array(values, kind)
    edges = np.cumsum([0, *map(len, values)], dtype=np.int32)
    return pa.ListArray.from_arrays(edges, pa.array(np.concatenate(values), kind.value_type), type=kind)


def _rows(batch: pa.RecordBatch) -> Iterator[Row]:
    columns = [_column(batch.column(place)) for place in range(batch.num_columns)]
    for values in zip(*columns, strict=True):
        yield dict(zip(batch.schema.names, values, strict=True))


def _column(column: pa.Array) -> list[Any]:
    """The values of a column; lists of numbers without nulls inside as arrays."""
    if not pa.types.is_list(column.type) or not pa.types.is_primitive(column.type.value_type):
        return list(column.to_pylist())
    if column.flatten().null_count:
        return list(column.to_pylist())
    values = column.values.to_numpy(zero_copy_only=False)
    edges = column.offsets.to_numpy()
    return [
        values[start:end] if there else None
        for start, end, there in zip(edges[:-1], edges[1:], column.is_valid().to_pylist(), strict=True)
    ]


def _batches(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    batch: list[Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _parts(rows: Iterable[Row], key: str) -> Iterator[list[Row]]:
    held: list[Row] = []

    def measured() -> Iterator[tuple[str, int]]:
        for row in rows:
            held.append(row)
            yield digest(row[key]), _weight(row)

    for count in cut_points(measured(), *PART_BYTES):
        yield held[:count]
        del held[:count]


def _weight(row: Row) -> int:
    """Roughly the bytes of a row in memory: what bounds a part."""
    return sum(len(value) * 4 if isinstance(value, str | list | np.ndarray) else 8 for value in row.values())
