"""Which shards a token table has: a function of its samples alone, and an edit changes only those that it touches."""

import random
import tempfile
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.hidden_states import PlannedShard, TokenTable, plan_shards
from eagle3.params import ExtractParams
from eagle3.tables import Account, Row
from tests.test_extract import IDENTITY
from tests.test_gates import extract_params
from tests.token_tables import token_row, write_tokens

SETTINGS: ExtractParams = extract_params(0.95).model_copy(update={"shard_min_mib": 0.1, "shard_max_mib": 0.5})


def make_row(number: int) -> Row:
    choice = random.Random(number)
    return token_row([choice.randrange(64) for _ in range(choice.randrange(10, 60))], 5)


def plan(folder: Path, rows: list[Row], extract: ExtractParams = SETTINGS) -> list[PlannedShard]:
    table = TokenTable(write_tokens(folder / "tokens", rows), 256)
    return plan_shards(table, IDENTITY, extract, Account("extract", 0))


def common(one: list[str], other: list[str]) -> int:
    """Length of the common beginning."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


EDITS = {
    "append": lambda rows, at, more: [*rows, *more],
    "insert": lambda rows, at, more: [*rows[:at], *more, *rows[at:]],
    "delete": lambda rows, at, more: [*rows[:at], *rows[at + len(more) :]],
    "reorder": lambda rows, at, more: [
        *rows[:at],
        *reversed(rows[at : at + 2 + len(more)]),
        *rows[at + 2 + len(more) :],
    ],
}


@pytest.mark.parametrize("edit", EDITS)
@settings(max_examples=15)
@given(at=st.integers(0, 110), count=st.integers(1, 6), seed=st.integers(0, 1000))
def test_an_edit_changes_only_the_shards_that_it_touches(edit: str, at: int, count: int, seed: int) -> None:
    """Those before the edit stay, and from the first boundary that both have after it on, all others."""
    rows = [make_row(1000 * seed + number) for number in range(120)]
    edited = EDITS[edit](rows, at, [make_row(-1000 * seed - number) for number in range(1, count + 1)])
    with tempfile.TemporaryDirectory() as folder:
        before, after = plan(Path(folder), rows), plan(Path(folder), edited)
    ids, ids_after = ([row["sample_digest"] for row in table] for table in (rows, edited))
    start, end = common(ids, ids_after), common(ids[::-1], ids_after[::-1])
    whole = sum(place < start for place in accumulate(shard.samples for shard in before))
    assert [shard.key for shard in after[:whole]] == [shard.key for shard in before[:whole]]
    from_end = [
        {place for place in accumulate(shard.samples for shard in reversed(shards)) if place <= end}
        for shards in (before, after)
    ]
    shared = max(from_end[0] & from_end[1], default=0)
    kept = sum(place <= shared for place in accumulate(shard.samples for shard in reversed(after)))
    assert [shard.key for shard in after[len(after) - kept :]] == [shard.key for shard in before[len(before) - kept :]]
    untouched = {shard.key for shard in before} & {shard.key for shard in after}
    assert len(untouched) >= whole + kept - 1


def test_edits_touch_few_shards() -> None:
    """What the edits of 3 samples in 600 cost, on average over many places."""
    rows = [make_row(number) for number in range(600)]
    new = []
    with tempfile.TemporaryDirectory() as folder:
        before = {shard.key for shard in plan(Path(folder), rows)}
        for edit in EDITS.values():
            for at in range(50, 550, 50):
                edited = edit(rows, at, [make_row(-at - number) for number in range(3)])
                new.append(len({shard.key for shard in plan(Path(folder), edited)} - before))
    assert len(before) > 50
    assert 1 <= sum(new) / len(new) < 4, new


def test_d12_the_number_of_files_grows_with_bytes_and_not_with_rows(tmp_path: Path) -> None:
    short = [token_row([n % 64, n // 64 % 64, n // 4096, 1, 2], 2) for n in range(10_000)]
    shards = plan(tmp_path, short, SETTINGS.model_copy(update={"shard_min_mib": 8, "shard_max_mib": 32}))
    assert sum(shard.samples for shard in shards) == 10_000
    assert len(shards) <= sum(shard.size for shard in shards) / (8 << 20) + 1
    assert len(list((tmp_path / "tokens").iterdir())) == 3  # one part, the index, the rejected rows
