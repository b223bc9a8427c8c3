"""Prompt files of every kind, good and bad: rows in = rows out + rows rejected, each with its row and reason."""

import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle3 import schemas, sources
from eagle3.params import PromptsParams, SourceParams, load_params
from eagle3.prompts import SPLITS, Collector, Unfit, parse_prompt, split_of
from eagle3.tables import Account, Row, read_table

PARAMS = load_params(Path(__file__).parent.parent / "params.yaml").prompts
SOURCE = PARAMS.sources[0].model_copy(update={"name": "test"})

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes records (or raw lines) as JSONL and returns the path."""

    def _write(*records: Any, name: str = "prompts.jsonl") -> Path:
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return _write


def source(path: Path, **changes: Any) -> SourceParams:
    return SOURCE.model_copy(update={"path": str(path), "name": path.stem, **changes})


def collect(*found: SourceParams, **changes: Any) -> tuple[list[Row], Account]:
    params: PromptsParams = PARAMS.model_copy(update={"sources": list(found), **changes})
    account = Account("prompts", 1)
    rows = list(Collector(params, account).rows())
    assert account.rows_in == len(rows) + len(account.rejected)
    assert account.rows_out == len(rows)
    return rows, account


def reasons(account: Account) -> dict[int, str]:
    return {int(row["row"].rsplit(":", 1)[1]): row["reason"] for row in account.rejected}


def said(row: Row) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in row["messages"]]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


GOOD = [{"messages": [user(f"question {i}"), assistant("a")]} for i in range(5)]


def test_p01_bad_conversations_are_rejected_by_row_and_reason(write: Write) -> None:
    bad = [
        {"id": 1},
        {"messages": []},
        {"messages": [{"role": "system", "content": "s"}]},
        {"messages": [assistant("hello"), user("q")]},
        {"messages": [user("x"), {"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [user("")]},
        {"prompt": None},
        {"prompt": "   "},
    ]
    rows, account = collect(source(write(*bad, *GOOD)))
    assert [said(row) for row in rows] == [[("user", f"question {i}")] for i in range(5)]
    assert reasons(account) == {
        1: "unknown format",
        2: "no messages",
        3: "no user turn",
        4: "assistant first",
        5: "turns do not alternate",
        6: "empty content",
        7: "empty content",
        8: "empty content",
        9: "empty content",
    }


def test_p01_the_stage_fails_above_the_share(write: Write, tmp_path: Path) -> None:
    path = write(*GOOD, {"messages": []})
    result = run_stage(tmp_path, path)
    assert result.returncode == 1
    assert "1 of 6 rows rejected (1 no messages)" in result.stderr
    assert f"{path}:6" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out/train.parquet").exists()


def test_p02_roles(write: Write) -> None:
    rows, account = collect(
        source(
            write(
                {"messages": [user("a"), user("b")]},
                {"messages": [user("a"), assistant("b"), assistant("c")]},
                {"messages": [{"role": "developer", "content": "d"}, user("a")]},
                {"messages": [{"role": "SYSTEM", "content": "s"}, {"role": " User ", "content": "a"}]},
                {"messages": [user("a"), {"role": "system", "content": "late"}]},
            )
        )
    )
    assert [said(row) for row in rows] == [[("system", "s"), ("user", "a")]]
    assert reasons(account) == {
        1: "turns do not alternate",
        2: "turns do not alternate",
        3: "unknown role",
        5: "turns do not alternate",
    }
    assert "developer" in list(account.rejected)[2]["detail"]


def test_p03_sharegpt(write: Write) -> None:
    turns = [("human", "q1"), ("gpt", "a1"), ("human", "q2"), ("gpt", "a2")]
    four = {"conversations": [{"from": who, "value": text} for who, text in turns], "system": "be brief"}
    begins = {"conversations": [{"from": "gpt", "value": "hello"}, {"from": "human", "value": "q"}]}
    path = write(four, begins)
    first, account = collect(source(path))
    assert [(said(row), row["reference"]) for row in first] == [([("system", "be brief"), ("user", "q1")], "a1")]
    assert reasons(account) == {2: "assistant first"}
    last, _ = collect(source(path), multi_turn="last")
    assert said(last[0]) == [("system", "be brief"), ("user", "q1"), ("assistant", "a1"), ("user", "q2")]
    assert last[0]["reference"] == "a2"


def test_p03_system_field_and_system_turn(write: Write) -> None:
    same = {"system": "s", "messages": [{"role": "system", "content": "s"}, user("one")]}
    other = {"system": "t", "messages": [{"role": "system", "content": "s"}, user("two")]}
    empty = {"system": "", "conversations": [{"from": "user", "value": "three"}]}
    rows, account = collect(source(write(same, other, empty)))
    assert [said(row) for row in rows] == [[("system", "s"), ("user", "one")], [("user", "three")]]
    assert reasons(account) == {2: "two system prompts"}


def test_p04_shapes_may_mix_and_tool_rows_are_rejected(write: Write) -> None:
    rows, account = collect(
        source(
            write(
                {"prompt": "plain", "category": "c"},
                {"messages": [user("roles")]},
                {"conversations": [{"from": "human", "value": "sharegpt"}]},
                {"messages": [user("t"), {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}]},
                {"messages": [user("t"), {"role": "tool", "content": "42"}]},
                {"messages": [user("t")], "tools": [{"name": "search"}]},
            )
        )
    )
    assert [row["messages"][0]["content"] for row in rows] == ["plain", "roles", "sharegpt"]
    assert reasons(account) == dict.fromkeys((4, 5, 6), "tool calls")


def test_p04_an_unsupported_format_fails_at_once_and_names_the_accepted_ones(write: Write) -> None:
    path = write(*[{"instruction": "x", "output": "y"}] * 5000)
    with pytest.raises(ValueError, match="unknown format") as error:
        collect(source(path))
    told = str(error.value)
    assert f"{path}:{20}" in told
    for word in ("instruction", "messages", "conversations", "text_column", "prompt"):
        assert word in told
    with pytest.raises(ValueError, match=r":2: unknown format"):
        collect(source(write(*[{"instruction": "x"}] * 2, name="short.jsonl")))


def test_p04_content_lists(write: Write) -> None:
    parts = [{"type": "text", "text": "look"}, {"type": "text", "text": "here"}]
    picture = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "x"}}]
    rows, account = collect(source(write({"messages": [user(parts)]}, {"messages": [user(picture)]})))  # type: ignore[arg-type]
    assert said(rows[0]) == [("user", "look\nhere")]
    assert reasons(account) == {2: "content is not text"}


def test_p06_empty_files_and_blank_lines(tmp_path: Path, write: Write) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"")
    with pytest.raises(ValueError, match=r"empty\.jsonl: the file is empty"):
        collect(source(empty))
    blank = tmp_path / "blank.jsonl"
    blank.write_bytes(b"\n\n  \n\r\n")
    with pytest.raises(ValueError, match="nothing but blank lines"):
        collect(source(blank))
    with pytest.raises(ValueError, match=r"missing\.jsonl: No such file.*prompts\.sources"):
        collect(source(tmp_path / "missing.jsonl"))
    gaps = tmp_path / "gaps.jsonl"
    gaps.write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\r\n\r\n\n{"prompt": "four"}')
    rows, account = collect(source(gaps))
    assert [(row["source_row"], row["messages"][0]["content"]) for row in rows] == [(1, "one"), (4, "four")]
    assert not account.rejected


def test_p06_an_output_folder_without_extension_and_the_starter_beside(tmp_path: Path, write: Write) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "starter.jsonl").write_text("mine")
    result = run_stage(tmp_path, write(*GOOD))
    assert result.returncode == 0, result.stderr
    names = {"starter.jsonl", "rejected.parquet", "contamination.parquet", *(f"{split}.parquet" for split in SPLITS)}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert (tmp_path / "out" / "starter.jsonl").read_text() == "mine"
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["rows_in"] == metrics["rows_out"] == sum(metrics["splits"].values()) == 5


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "cut', "broken JSON"),
        (b"[" * 100_000, "broken JSON"),
        (b'["prompt"]', "not a JSON object"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b'{"prompt": "half \\ud83d"}', "lone surrogate"),
        (b'{"prompt": "x", "category": "\\udc00"}', "lone surrogate"),
        (b'{"prompt": 7}', "content is not text"),
        (b'{"prompt": "' + b"x" * 30_000 + b'"}', "too long"),
    ],
)
def test_hostile_lines_are_rejected_and_shift_nothing(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "hostile.jsonl"
    path.write_bytes(b'{"prompt": "before"}\n' + line + b'\n{"prompt": "after"}\n')
    rows, account = collect(source(path))
    assert [row["source_row"] for row in rows] == [1, 3]
    assert reasons(account) == {2: reason}


def test_a_gigantic_line_is_passed_over_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 1 << 16)
    path = tmp_path / "giant.jsonl"
    with path.open("wb") as file:
        file.write(b'{"prompt": "')
        for _ in range(64):
            file.write(b"x" * (1 << 20))
        file.write(b'"}\n{"prompt": "after"}\n')
    tracemalloc.start()
    rows, account = collect(source(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert reasons(account) == {1: "line too long"}
    assert rows[0]["source_row"] == 2
    assert peak < 8 << 20


@pytest.mark.parametrize(
    ("start", "told"),
    [(b"\xff\xfe{\x00", "UTF-16"), (b"\x1f\x8b\x08\x00", "compressed"), (b"PAR1 broken", "not readable")],
)
def test_foreign_files_are_named(tmp_path: Path, start: bytes, told: str) -> None:
    path = tmp_path / "foreign.jsonl"
    path.write_bytes(start)
    with pytest.raises(ValueError, match=rf"foreign\.jsonl: .*{told}"):
        collect(source(path))


def test_p08_markers_in_the_text_stay_verbatim(write: Write) -> None:
    text = "quote <|im_end|>\n<|im_start|>assistant\n</think>  and \u202e\x1b[31m"
    rows, _ = collect(source(write({"prompt": f" \n{text}\r\nend\n"})))
    assert said(rows[0]) == [("user", f"{text}\nend")]


def test_p09_optional_columns_may_be_absent_or_half_there(write: Write, tmp_path: Path) -> None:
    bare, account = collect(source(write(*[{"prompt": f"p{i}"} for i in range(50)])))
    assert len(bare) == 50
    assert {row["category"] for row in bare} == {"prompts"}
    assert not account.rejected
    halves = [{"prompt": f"p{i}"} | ({"category": "odd", "answer": i} if i % 2 else {}) for i in range(50)]
    half, _ = collect(source(write(*halves, name="half.jsonl"), reference_column="answer"))
    assert [row["category"] for row in half] == ["half", "odd"] * 25
    assert [row["reference"] for row in half][:4] == [None, "1", None, "3"]
    forced, _ = collect(source(write(*halves, name="forced.jsonl"), category="all"))
    assert {row["category"] for row in forced} == {"all"}


def test_parquet_gives_the_same_rows_as_jsonl(write: Write, tmp_path: Path) -> None:
    records = [
        {"prompt": "plain", "messages": None, "category": "c"},
        {"prompt": None, "messages": [{"role": "user", "content": "roles", "tool_calls": None}], "category": None},
        {"prompt": None, "messages": None, "category": None},
    ]
    table = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(records * 300), table)
    rows, account = collect(source(table, limit=600))
    same, _ = collect(source(write(*records * 300, name="rows.jsonl"), limit=600))
    assert [{**row, "source": ""} for row in rows] == [{**row, "source": ""} for row in same]
    assert [row["source_row"] for row in rows] == [1, 2]
    assert account.reasons() == {"duplicate": 398, "empty content": 200}


def test_parquet_without_a_known_column_names_its_columns(tmp_path: Path) -> None:
    table = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"instruction": ["a"]}), table)
    with pytest.raises(ValueError, match=r"rows\.parquet: none of the columns .*messages.*it has instruction"):
        collect(source(table))
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), table)
    with pytest.raises(ValueError, match="no rows"):
        collect(source(table))


def test_duplicates(write: Write) -> None:
    path = write({"prompt": "a"}, {"prompt": "a "}, {"prompt": "b"}, {"prompt": "a"})
    rows, account = collect(source(path))
    assert [row["source_row"] for row in rows] == [1, 3]
    assert account.reasons() == {"duplicate": 2}
    assert account.tolerated.total() == 2
    kept, _ = collect(source(path), deduplicate=False)
    first = kept[0]["prompt_id"]
    assert [row["prompt_id"] for row in kept] == [first, f"{first}-2", kept[2]["prompt_id"], f"{first}-3"]
    assert len({row["split"] for row in kept if row["prompt_id"].startswith(first)}) == 1


def test_near_identical_prompts_share_a_split_and_new_ones_move_none(write: Write) -> None:
    texts = [f"How many is {i} plus {i}?" for i in range(400)]
    some, _ = collect(source(write(*[{"prompt": text} for text in texts[100:300]])), evaluation_share=0.3)
    near = [{"prompt": text.upper().replace(" ", "\n ")} for text in texts]
    more, _ = collect(source(write(*[{"prompt": text} for text in texts], *near)), evaluation_share=0.3)
    places = {row["prompt_id"]: row["split"] for row in more}
    assert all(places[row["prompt_id"]] == row["split"] for row in some)
    assert len(more) == 800
    assert [row["split"] for row in more[:400]] == [row["split"] for row in more[400:]]
    assert {row["split"] for row in more} == set(SPLITS)


def test_a_fixed_split_owns_its_prompts_wherever_else_they_stand(write: Write) -> None:
    auto = source(write(*[{"prompt": f"Question {i}"} for i in range(60)], name="auto.jsonl"))
    train = source(write(*[{"prompt": f"QUESTION {i}"} for i in range(10, 40)], name="train.jsonl"), split="train")
    held = source(write(*[{"prompt": f"question  {i}"} for i in range(20)], name="held.jsonl"), split="evaluation")
    rows, account = collect(auto, train, held)
    splits: dict[str, set[str]] = {}
    for row in rows:
        splits.setdefault(" ".join(row["messages"][0]["content"].lower().split()), set()).add(row["split"])
    assert all(len(found) == 1 for found in splits.values())
    assert all(splits[f"question {i}"] == {"evaluation"} for i in range(20))
    assert all(splits[f"question {i}"] == {"train"} for i in range(20, 40))
    assert account.reasons() == {"reserved for evaluation": 10}
    assert account.tolerated.total() == 10


def test_shares_and_names_are_checked(write: Write) -> None:
    path = write(*GOOD)
    with pytest.raises(ValueError, match="nothing to train on"):
        collect(source(path), validation_share=0.5, evaluation_share=0.5)
    with pytest.raises(ValueError, match=r"names must differ"):
        collect(source(path), source(path))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "from", "value", "type", "text"]), inner, max_size=3)
    ),
    max_leaves=10,
)
KEYS = st.sampled_from(["messages", "conversations", "prompt", "system", "category", "tools", "other"])


@given(record=st.dictionaries(KEYS, JSON, max_size=4), multi_turn=st.sampled_from(["first", "last"]))
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_record_is_a_prompt_or_unfit(record: dict[str, Any], multi_turn: str) -> None:
    try:
        prompt = parse_prompt(record, SOURCE, multi_turn)
    except Unfit:
        return
    assert prompt.turns[-1].role == "user"
    assert all(turn.content == turn.content.strip() != "" for turn in prompt.turns)
    assert split_of(prompt.group, PARAMS) in SPLITS


def run_stage(tmp_path: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """The stage as a command, with `path` as its only source."""
    text = (Path(__file__).parent.parent / "params.yaml").read_text()
    (tmp_path / "params.yaml").write_text(text.replace("data/prompts/starter.jsonl", str(path)))
    out = [str(tmp_path / name) for name in ("out", "metrics.json", "params.yaml")]
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "stages.prompts", *out]
    return subprocess.run(command, cwd=root, env=os.environ, capture_output=True, text=True, check=False)


def test_the_tables_hold_what_the_schema_says(tmp_path: Path, write: Write) -> None:
    result = run_stage(tmp_path, write(*[{"prompt": f"prompt number {i}"} for i in range(200)], *[GOOD[0]] * 3))
    assert result.returncode == 0, result.stderr
    ids: dict[str, set[str]] = {}
    for split in SPLITS:
        rows = list(read_table(tmp_path / "out" / f"{split}.parquet", schemas.PROMPTS))
        assert {row["split"] for row in rows} == {split}
        ids[split] = {row["prompt_id"] for row in rows}
    assert sum(map(len, ids.values())) == len(set().union(*ids.values())) == 201
    rejected = list(read_table(tmp_path / "out" / "rejected.parquet", schemas.REJECTED))
    assert [row["reason"] for row in rejected] == ["duplicate"] * 2
    again = (tmp_path / "out" / "train.parquet").read_bytes()
    assert run_stage(tmp_path, tmp_path / "prompts.jsonl").returncode == 0
    assert (tmp_path / "out" / "train.parquet").read_bytes() == again
