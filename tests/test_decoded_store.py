"""What an interrupted evaluation has decoded comes back as it was, for the same evaluation and no other."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3.acceptance import Answer, Decoded, Forward, Prompt, Setting, Step, Turn
from eagle3.params import Params, load_params
from eagle3.serving.decoded_store import DecodedStore, evaluation_rows
from eagle3.serving.speculative import turns
from eagle3.workstore import RowStore
from tests.test_extract import IDENTITY
from tests.token_tables import PROJECT

DEFAULT = load_params(PROJECT / "params.yaml")
PROMPTS = [Prompt(f"p{number}", "c", "s", [number, 7]) for number in range(5)]


def decoded(turn: Turn) -> list[Decoded]:
    """Something for each arm, with a number that JSON must not round."""
    return [
        Decoded(
            turn.setting,
            arm,
            [
                Answer(prompt, turn.setting, arm, turn.number, [1, 2, 3], "stop", 0.1 + 0.2, [Step(1, [5, 6], 1, 2)])
                for prompt in turn.prompts
            ],
            [Forward(1 / 3, 2, 4)],
            {"drafts": 3},
        )
        for arm in turn.arms
    ]


def params(**evaluate: object) -> Params:
    return DEFAULT.model_copy(update={"evaluate": DEFAULT.evaluate.model_copy(update=evaluate)})


def interrupted(draft: Path, turn: Turn) -> None:
    """An evaluation that ended by Ctrl-C after one turn."""
    with suppress(KeyboardInterrupt), evaluation_rows(IDENTITY, draft, params()) as rows:
        DecodedStore(rows, "bfloat16", 0.0).put(turn, decoded(turn))
        raise KeyboardInterrupt


@pytest.fixture
def draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EAGLE3_WORK_DIR", str(tmp_path / "work"))
    made = tmp_path / "draft"
    made.mkdir()
    (made / "model.safetensors").write_bytes(b"weights")
    (made / "config.json").write_text("{}")
    return made


def test_every_batch_is_a_turn_of_both_arms_in_alternating_order() -> None:
    own = params(num_speculative_tokens=[3, 1], batch_size=[1, 4]).evaluate
    found = list(turns(PROMPTS, own))
    assert [turn.setting for turn in found] == [
        *[Setting(3, 1)] * 5,
        *[Setting(3, 4)] * 2,
        *[Setting(1, 1)] * 5,
        *[Setting(1, 4)] * 2,
    ]
    assert [turn.arms[0] for turn in found[:4]] == ["plain", "draft", "plain", "draft"]
    assert sum(turn.answers for turn in found) == 2 * 4 * len(PROMPTS)


def test_one_engine_after_the_other_decodes_plainly_once_for_each_batch_size() -> None:
    own = params(num_speculative_tokens=[3, 1], batch_size=[1, 4], side_by_side=False).evaluate
    found = list(turns(PROMPTS, own))
    arms = [arm for turn in found for arm in turn.arms]
    assert arms == ["plain"] * 7 + ["draft"] * 14
    assert {turn.setting for turn in found[:7]} == {Setting(3, 1), Setting(3, 4)}


def test_a_turn_comes_back_as_it_was_and_only_to_the_same_question(tmp_path: Path) -> None:
    first, second, *_ = turns(PROMPTS, params(batch_size=2).evaluate)
    with RowStore(tmp_path / "rows.sqlite") as rows:
        store = DecodedStore(rows, "bfloat16", 0.0)
        store.put(first, decoded(first))
        assert store.take(first) == decoded(first)
        assert store.get(second) is None
        assert DecodedStore(rows, "float32", 0.0).get(first) is None
        assert DecodedStore(rows, "bfloat16", 0.5).get(first) is None
        assert store.get(replace(first, setting=Setting(2, 2))) is None
        assert store.get(replace(first, arms=first.arms[:1])) is None
        assert store.get(replace(first, prompts=PROMPTS[1:3])) is None


def test_it_is_kept_until_the_evaluation_has_ended_well(draft: Path) -> None:
    turn = next(turns(PROMPTS, DEFAULT.evaluate))
    interrupted(draft, turn)
    with evaluation_rows(IDENTITY, draft, params(num_prompts=1000, viewer_answers=1)) as rows:
        assert DecodedStore(rows, "bfloat16", 0.0).take(turn) == decoded(turn)
    with evaluation_rows(IDENTITY, draft, params()) as rows:
        assert DecodedStore(rows, "bfloat16", 0.0).get(turn) is None


@pytest.mark.parametrize("changed", ["draft", "verifier", "seed", "max_new_tokens", "engine"])
def test_another_evaluation_finds_nothing(draft: Path, changed: str) -> None:
    turn = next(turns(PROMPTS, DEFAULT.evaluate))
    interrupted(draft, turn)
    identity, asked = IDENTITY, params()
    if changed == "draft":
        (draft / "model.safetensors").write_bytes(b"other weights")
    elif changed == "verifier":
        identity = replace(IDENTITY, digest="1" * 64)
    elif changed == "engine":
        engine = asked.engine.model_copy(update={"max_num_seqs": asked.engine.max_num_seqs + 1})
        asked = asked.model_copy(update={"engine": engine})
    else:
        asked = params(**{changed: getattr(asked.evaluate, changed) + 1})
    with evaluation_rows(identity, draft, asked) as rows:
        assert DecodedStore(rows, "bfloat16", 0.0).get(turn) is None


def test_the_same_evaluation_twice_at_once_is_refused(draft: Path) -> None:
    with (
        evaluation_rows(IDENTITY, draft, params()),
        pytest.raises(ValueError, match="in use by process"),
        evaluation_rows(IDENTITY, draft, params()),
    ):
        pass
