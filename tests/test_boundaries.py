"""Boundaries are a function of the items, and an edit disturbs only the shards that touch it."""

import random
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.boundaries import cut_points
from eagle3.digests import digest

MINIMUM, MAXIMUM = 2_000, 12_000


def items(count: int, seed: int = 0) -> list[tuple[str, int]]:
    rng = random.Random(seed)
    return [(digest([seed, i]), rng.randint(50, 400)) for i in range(count)]


def shards(of: list[tuple[str, int]]) -> list[tuple[tuple[str, int], ...]]:
    places = [0, *accumulate(cut_points(of, MINIMUM, MAXIMUM))]
    assert places[-1] == len(of)
    return [tuple(of[a:b]) for a, b in pairwise(places)]


@given(st.lists(st.tuples(st.integers(), st.integers(1, 20_000)), max_size=200))
@settings(max_examples=100, deadline=None)
def test_sizes_stay_between_the_limits(raw: list[tuple[int, int]]) -> None:
    cut = shards([(digest(value), size) for value, size in raw])
    for shard in cut[:-1]:
        total = sum(size for _, size in shard)
        assert total <= MAXIMUM or len(shard) == 1
    for shard, following in pairwise(cut):
        assert sum(size for _, size in shard) >= MINIMUM or sum(s for _, s in shard) + following[0][1] > MAXIMUM


ITEMS = st.lists(st.tuples(st.integers().map(digest), st.integers(1, 6_000)), max_size=80)


@given(ITEMS)
def test_the_same_items_give_the_same_cuts(cut: list[tuple[str, int]]) -> None:
    """A function of the items alone, however they come and whatever was cut before."""
    expected = list(cut_points(cut, MINIMUM, MAXIMUM))
    list(cut_points(items(50), MINIMUM, MAXIMUM))
    assert list(cut_points(iter(cut), MINIMUM, MAXIMUM)) == expected


@given(ITEMS)
def test_behind_a_boundary_nothing_before_it_matters(cut: list[tuple[str, int]]) -> None:
    """What follows a boundary is cut as if it stood alone; so two lists that share one share all that follows."""
    whole = shards(cut)
    for number in range(len(whole)):
        rest = [item for shard in whole[number:] for item in shard]
        assert shards(rest) == whole[number:]


@given(ITEMS, ITEMS)
def test_before_an_edit_nothing_behind_it_matters(first: list[tuple[str, int]], second: list[tuple[str, int]]) -> None:
    """Whatever is appended, inserted, removed or reordered behind them: of their shards only the last may change."""
    settled = shards(first)[:-1]
    assert shards(first + second)[: len(settled)] == settled


@pytest.mark.parametrize("edit", ["append", "insert", "delete", "reorder", "change"])
def test_an_edit_disturbs_few_shards(edit: str) -> None:
    disturbed = []
    for seed in range(20):
        before = items(2_000, seed)
        place = random.Random(seed).randrange(100, 1_900)
        after = list(before)
        if edit == "append":
            after += items(30, seed + 100)
        elif edit == "insert":
            after[place:place] = items(3, seed + 100)
        elif edit == "delete":
            del after[place : place + 3]
        elif edit == "reorder":
            after[place : place + 5] = reversed(after[place : place + 5])
        else:
            after[place] = (digest(["other", seed]), before[place][1])
        disturbed.append(len(set(shards(after)) - set(shards(before))))
    assert sum(disturbed) / len(disturbed) < 5, disturbed
    assert len(shards(items(2_000))) > 50


def test_natural_cuts_are_the_rule() -> None:
    sizes = [sum(size for _, size in shard) for shard in shards(items(20_000))][:-1]
    assert sum(size > MAXIMUM - 400 for size in sizes) / len(sizes) < 0.1


def test_a_minimum_above_the_maximum_is_refused() -> None:
    with pytest.raises(ValueError, match="above the maximum"):
        list(cut_points([("00", 1)], 2, 1))
