"""Content keys are a function of content alone."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.digests import canonical_json, derived_seed, digest, digest_file, digest_tokens, fraction


def test_canonical_json_has_one_spelling() -> None:
    assert canonical_json({"b": 1, "a": "é"}) == '{"a":"\\u00e9","b":1}'
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_without_a_spelling_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        digest([value])


def test_digest_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc" * 1000)
    assert digest_file(tmp_path / "x") == hashlib.sha256(b"abc" * 1000).hexdigest()


def test_token_digests_tell_ids_and_masks_apart() -> None:
    one = digest_tokens([1, 2, 3], [False, True, True])
    assert one == digest_tokens([1, 2, 3], [False, True, True])
    other_ids, other_mask = (
        digest_tokens([1, 2, 4], [False, True, True]),
        digest_tokens([1, 2, 3], [False, False, True]),
    )
    assert len({one, other_ids, other_mask}) == 3


@given(st.text())
def test_fraction_is_in_the_unit_interval(text: str) -> None:
    assert 0 <= fraction(digest(text)) < 1


@given(st.integers(), st.text())
def test_derived_seeds_fit_every_engine(seed: int, name: str) -> None:
    assert 0 <= derived_seed(seed, name) < 2**31
    assert derived_seed(seed, name) == derived_seed(seed, name)
