"""The draft vocabulary and its tables."""

import pytest
import torch

from eagle3.draft.vocab import DraftVocabulary, choose_vocabulary, validate_mapping


def counts_of(pairs: dict[int, int], vocab: int = 1000) -> torch.Tensor:
    counts = torch.zeros(vocab, dtype=torch.int64)
    for token, count in pairs.items():
        counts[token] = count
    return counts


COUNTS = counts_of({7: 50, 900: 30, 3: 15, 500: 5})


def check(vocabulary: DraftVocabulary) -> list[int]:
    validate_mapping(vocabulary.d2t, vocabulary.t2d, vocabulary.verifier_size)
    ids = vocabulary.token_ids.tolist()
    assert ids == sorted(set(ids))
    assert [vocabulary.draft_ids[token] for token in ids] == list(range(len(ids)))
    assert int((vocabulary.draft_ids >= 0).sum()) == len(ids)
    return ids


def test_a_fixed_size_takes_the_most_frequent_tokens_and_the_stop_ids() -> None:
    vocabulary = choose_vocabulary(COUNTS, [2], 3, 1.0)
    assert check(vocabulary) == [2, 7, 900]
    assert vocabulary.coverage == 0.8
    assert vocabulary.d2t.tolist() == [2, 6, 898]


def test_a_size_above_the_distinct_tokens_is_filled_up() -> None:
    ids = check(choose_vocabulary(COUNTS, [2], 800, 1.0))
    assert len(ids) == 800 and {2, 3, 7, 500, 900} <= set(ids)


def test_the_full_vocabulary_is_the_identity() -> None:
    vocabulary = choose_vocabulary(COUNTS, [2], 1000, 1.0)
    assert check(vocabulary) == list(range(1000)) and not vocabulary.d2t.any() and vocabulary.t2d.all()


@pytest.mark.parametrize(("size", "message"), [(1001, "verifier has 1000 tokens"), (1, "2 stop ids")])
def test_impossible_sizes_are_refused(size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_vocabulary(COUNTS, [2, 5], size, 1.0)


@pytest.mark.parametrize(
    ("coverage", "needed"), [(0.5, {7}), (0.51, {7, 900}), (0.95, {7, 900, 3}), (1.0, {7, 900, 3, 500})]
)
def test_coverage_takes_the_smallest_set_rounded_up(coverage: float, needed: set[int]) -> None:
    vocabulary = choose_vocabulary(COUNTS, [2], None, coverage)
    ids = check(vocabulary)
    assert len(ids) == 64 and needed | {2} <= set(ids)
    assert vocabulary.coverage >= coverage


def test_rounding_counts_the_stop_ids_and_stays_inside_the_vocabulary() -> None:
    many = counts_of(dict.fromkeys(range(10, 74), 1))
    assert len(check(choose_vocabulary(many, [], None, 1.0))) == 64
    assert len(check(choose_vocabulary(many, [2], None, 1.0))) == 128
    assert len(check(choose_vocabulary(counts_of({1: 1}, vocab=50), [2], None, 1.0))) == 50


def test_no_generated_token_at_all_keeps_the_stop_ids() -> None:
    assert 2 in check(choose_vocabulary(counts_of({}), [2], None, 1.0))


def test_stop_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="outside the verifier's vocabulary"):
        choose_vocabulary(COUNTS, [1000], None, 1.0)


def test_a_table_of_absolute_ids_is_refused() -> None:
    good = choose_vocabulary(COUNTS, [2], 64, 1.0)
    with pytest.raises(ValueError, match="offsets"):
        validate_mapping(good.token_ids, good.t2d, 1000)


def test_other_damage_is_refused() -> None:
    good = choose_vocabulary(COUNTS, [2], 64, 1.0)
    for d2t, t2d, message in (
        (good.d2t.int(), good.t2d, "int64"),
        (good.d2t, good.t2d.int(), "bool"),
        (good.d2t, good.t2d[:-1], "do not fit"),
        (good.d2t - 5, good.t2d, "outside"),
        (good.d2t.clone().index_fill_(0, torch.tensor([1]), -1), good.t2d, "two draft ids"),
        (good.d2t, ~good.t2d, "differ"),
    ):
        with pytest.raises(ValueError, match=message):
            validate_mapping(d2t, t2d, 1000)
