"""Rows in = rows out + rows rejected; parts are deterministic, checked, and an edit rewrites few of them."""

import json
import tracemalloc
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle3 import tables
from eagle3.digests import digest
from eagle3.tables import (
    Account,
    PartRows,
    list_parts,
    read_parts,
    read_table,
    write_metrics,
    write_parts,
    write_table,
)

SCHEMA = pa.schema([("key", pa.string()), ("text", pa.string())])


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PART_BYTES", (20_000, 160_000))


def rows(count: int) -> list[dict[str, str]]:
    return [{"key": digest(i), "text": f"row {i} " * 20} for i in range(count)]


def write(out: Path, given: list[dict[str, str]], rejected: int = 0, share: float = 0.5) -> Account:
    account = Account("some-stage", share)

    def counted() -> Iterator[dict[str, str]]:
        for number, row in enumerate(given):
            account.rows_in += 1
            if number < rejected:
                account.reject(row["key"], "bad", "because")
                continue
            account.rows_out += 1
            yield row

    write_parts(out, counted(), SCHEMA, "key", account)
    return account


def test_round_trip_in_order(tmp_path: Path) -> None:
    write(tmp_path / "out", rows(500))
    assert list(read_parts(tmp_path / "out", SCHEMA)) == rows(500)
    assert len(list((tmp_path / "out").glob("part-*"))) > 4
    assert not (tmp_path / "out.tmp").exists()


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    write(tmp_path / "a", rows(300))
    write(tmp_path / "b", rows(300))
    assert {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()
    }


def test_more_rows_leave_most_parts_alone(tmp_path: Path) -> None:
    write(tmp_path / "a", rows(1000))
    write(tmp_path / "b", rows(1100))
    old = {p.name: p.read_bytes() for p in (tmp_path / "a").glob("part-*")}
    new = {p.name: p.read_bytes() for p in (tmp_path / "b").glob("part-*")}
    assert len(set(old) - set(new)) <= 1
    assert all(new[name] == data for name, data in old.items() if name in new)


def test_rejected_rows_are_listed_with_their_reason(tmp_path: Path) -> None:
    account = write(tmp_path / "out", rows(10), rejected=3)
    assert account.settle() == {"rows_in": 10, "rows_out": 7, "rows_rejected": {"bad": 3}}
    assert pq.read_table(tmp_path / "out" / "rejected.parquet").column("detail").to_pylist() == ["because"] * 3


def test_any_number_of_rejected_rows_is_listed_in_little_memory() -> None:
    account = Account("s", 1)
    tracemalloc.start()
    for number in range(50_000):
        account.reject(f"row {number}", "bad", "because " * 10)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * tables.REJECTED_BYTES
    assert account.reasons() == {"bad": 50_000}
    listed = [row["row"] for row in account.rejected]
    account.reject("late", "odd")
    assert [row["row"] for row in account.rejected] == [*listed, "late"]
    assert listed == [f"row {number}" for number in range(50_000)]


def test_too_many_rejected_rows_fail_and_leave_no_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"some-stage: 3 of 10 rows rejected \(3 bad\).*some_stage.max_rejected_share"):
        write(tmp_path / "out", rows(10), rejected=3, share=0.2)
    assert not list(tmp_path.iterdir())


def test_nothing_left_is_an_error_whatever_the_share(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no row is left of 0"):
        write(tmp_path / "out", [], share=1)
    with pytest.raises(ValueError, match="no row is left of 4"):
        write(tmp_path / "out", rows(4), rejected=4, share=1)


def test_lost_rows_are_a_bug_that_shows() -> None:
    account = Account("s", 1)
    account.rows_in, account.rows_out = 10, 9
    with pytest.raises(AssertionError, match="10 in, 9 out, 0 rejected"):
        account.settle()


def test_duplicates_do_not_count_against_the_share() -> None:
    account = Account("s", 0)
    account.rows_in, account.rows_out = 3, 1
    account.reject("2", "duplicate", tolerated=True)
    account.reject("3", "duplicate", tolerated=True)
    assert account.settle()["rows_rejected"] == {"duplicate": 2}


def test_an_old_out_is_replaced_whole(tmp_path: Path) -> None:
    write(tmp_path / "out", rows(300))
    write(tmp_path / "out", rows(5))
    assert list(read_parts(tmp_path / "out", SCHEMA)) == rows(5)
    assert len(list((tmp_path / "out").glob("part-*"))) == 1


def test_rows_from_any_one_on_and_only_the_parts_that_hold_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "out", rows(900))
    parts = list(list_parts(tmp_path / "out"))
    assert len(parts) > 3
    read: list[Path] = []
    check = tables.check_part
    monkeypatch.setattr(tables, "check_part", lambda part: (read.append(part.path), check(part)))
    table, expected = PartRows(tmp_path / "out", SCHEMA), list(enumerate(rows(900)))
    for start in (0, parts[0].rows - 1, parts[0].rows, 700, 899, 900):
        assert list(table.since(start)) == expected[start:]
    read.clear()
    first, last = table.since(0), parts[0].rows
    assert [next(first) for _ in range(last)] == expected[:last]
    assert list(islice(table.since(3), 5)) == expected[3:8]
    assert read == [parts[0].path]


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_part_is_named(tmp_path: Path, damage: str) -> None:
    write(tmp_path / "out", rows(50))
    part = next((tmp_path / "out").glob("part-*"))
    data = part.read_bytes()
    part.unlink()
    if damage == "truncate":
        part.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        part.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    with pytest.raises(ValueError, match=part.name):
        list(read_parts(tmp_path / "out", SCHEMA))


def test_a_part_outside_the_folder_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "out", rows(5))
    (tmp_path / "secret.parquet").write_bytes(b"x")
    index = [{"file": "../secret.parquet", "rows": 1, "bytes": 1, "sha256": "0"}]
    write_table(tmp_path / "out" / "index.parquet", index, tables.PARTS)
    with pytest.raises(ValueError, match=r"secret\.parquet"):
        list(read_parts(tmp_path / "out", SCHEMA))


@pytest.mark.parametrize("content", [b"", b"not parquet at all", b"PAR1" + b"\0" * 50 + b"PAR1"])
def test_a_file_that_is_not_parquet_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.parquet").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.parquet"):
        list(read_table(tmp_path / "x.parquet", SCHEMA))


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    write_table(tmp_path / "x.parquet", [{"key": "1"}], pa.schema([("key", pa.string())]))
    with pytest.raises(ValueError, match="column text is missing"):
        list(read_table(tmp_path / "x.parquet", SCHEMA))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "text", None, True, [1]])
def test_metrics_are_finite_numbers(tmp_path: Path, value: object) -> None:
    with pytest.raises(ValueError, match="inner: bad"):
        write_metrics(tmp_path / "m.json", {"good": 1, "inner": {"bad": value}})
    write_metrics(tmp_path / "m.json", {"good": 1, "inner": {"fine": 0.5}})
    assert json.loads((tmp_path / "m.json").read_text())["inner"]["fine"] == 0.5
