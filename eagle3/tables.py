"""Parquet in and out: single files, and folders of parts whose boundaries are content-defined.

A folder is written aside and renamed when its index is complete, so a reader never meets half of one.
"""

import json
import math
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
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

Row = dict[str, Any]


class Account:
    """Row accounting of one stage: rows in = rows out + rows rejected, each with a reason."""

    def __init__(self, stage: str, max_rejected_share: float, setting: str = "max_rejected_share"):
        """setting: the key of max_rejected_share in the stage's section."""
        self.stage, self.max_rejected_share = stage, max_rejected_share
        self._setting = f"{stage.replace('-', '_')}.{setting}"
        self.rows_in = self.rows_out = 0
        self.rejected: list[Row] = []
        self.tolerated: Counter[str] = Counter()

    def reject(self, row: str, reason: str, detail: str = "", *, tolerated: bool = False) -> None:
        """Count a row out. `tolerated` reasons (duplicates) never fail the stage."""
        self.rejected.append({"row": row, "reason": reason, "detail": detail[:500]})
        self.tolerated[reason] += tolerated

    def reasons(self) -> dict[str, int]:
        """Rejected rows by reason."""
        return dict(sorted(Counter(row["reason"] for row in self.rejected).items()))

    def settle(self) -> dict[str, Any]:
        """The counts as metrics. Raises ValueError when too many rows were rejected or none is left."""
        if self.rows_in != self.rows_out + len(self.rejected):
            raise AssertionError(f"{self.stage}: {self.rows_in} in, {self.rows_out} out, {len(self.rejected)} rejected")
        failed = len(self.rejected) - self.tolerated.total()
        listed = ", ".join(f"{count} {reason}" for reason, count in self.reasons().items())
        first = next((f"; first: {r['row']}: {r['reason']} {r['detail']}".rstrip() for r in self.rejected), "")
        if not self.rows_out:
            raise ValueError(
                f"{self.stage}: no row is left of {self.rows_in} ({listed or 'the input is empty'}){first}"
            )
        if failed > self.max_rejected_share * self.rows_in:
            raise ValueError(
                f"{self.stage}: {failed} of {self.rows_in} rows rejected ({listed}){first}; "
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
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))
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
    try:
        with pq.ParquetFile(path) as file:
            absent = [name for name in schema.names if name not in file.schema_arrow.names]
            if absent:
                raise ValueError(
                    f"{path}: column {', '.join(absent)} is missing; has {', '.join(file.schema_arrow.names)}"
                )
            for batch in file.iter_batches(batch_size=batch_rows, columns=schema.names):
                if only is not None:
                    batch = batch.filter(pc.is_in(batch.column(only[0]), value_set=wanted))
                yield from _rows(batch) if arrays else batch.to_pylist()
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; `dvc repro` makes it") from None
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not readable as Parquet: {error}") from None


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
            table = pa.Table.from_pylist(part, schema=schema)
            name = f"part-{digest([row[key] for row in part])[:16]}.parquet"
            pq.write_table(table, folder / name, compression="zstd")
            size = (folder / name).stat().st_size
            index.append({"file": name, "rows": len(part), "bytes": size, "sha256": digest_file(folder / name)})
        write_table(folder / "rejected.parquet", account.rejected, REJECTED)
        account.settle()
        write_table(folder / INDEX, index, PARTS)


def read_parts(folder: Path, schema: pa.Schema, *, arrays: bool = False, only: Only | None = None) -> Iterator[Row]:
    """Rows of a folder of parts, in order. Raises ValueError for a missing, damaged or foreign part.

    arrays, only: see read_table.
    """
    for path in part_paths(folder):
        yield from read_table(path, schema, arrays=arrays, only=only)


def part_paths(folder: Path) -> Iterator[Path]:
    """The parts of a folder, in order, each checked. Raises ValueError for a missing or damaged one."""
    for part in read_table(folder / INDEX, PARTS):
        path = folder / part["file"]
        if path.parent != folder or not path.is_file():
            raise ValueError(
                f"{path}: named by {folder / INDEX} but not there; `dvc checkout` or `dvc repro` restores it"
            )
        if path.stat().st_size != part["bytes"] or digest_file(path) != part["sha256"]:
            raise ValueError(f"{path}: differs from its digest in {folder / INDEX}; `dvc checkout --force` restores it")
        yield path


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
