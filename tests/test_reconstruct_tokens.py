"""The stages `check` and `reconstruct-tokens` from files to files."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from eagle3.consistency import check_together
from eagle3.params import load_params
from eagle3.responses import read_responses
from eagle3.schemas import AUDIT, REJECTED, RESPONSES, TOKENS
from eagle3.stage import check_commit
from eagle3.tables import Account, read_parts, read_table, write_parts
from eagle3.tokens import Unusable
from eagle3.verification import verify_places
from eagle3.verifier import prompt_ids, write_identity
from stages.check import check
from stages.reconstruct_tokens import check_use, reconstruct_tokens
from tests.test_tokens import IDENTITY, STOP, response
from tests.tiny_verifiers import build_tokenizer

ROOT = Path(__file__).parent.parent
DEFAULT = (ROOT / "params.yaml").read_text()
EPOCHS = next(line for line in DEFAULT.splitlines() if line.startswith("  epochs:"))


def settings(tmp_path: Path, verifier: Path, **changes: str) -> Path:
    text = DEFAULT.replace("bundled:smollm2-135m-think", str(verifier))
    for key, value in changes.items():
        line = next(line for line in text.splitlines() if line.strip().startswith(f"{key}:"))
        text = text.replace(line, f"{line.partition(':')[0]}: {value}")
    path = tmp_path / "params.yaml"
    path.write_text(text)
    return path


def write_responses(tmp_path: Path, rows: list[dict[str, Any]]) -> Path:
    account = Account("generate", 0)
    account.rows_in = account.rows_out = len(rows)
    write_parts(tmp_path / "responses", rows, RESPONSES, "prompt_id", account)
    write_identity(replace(IDENTITY, vocab_size=640), tmp_path / "verifier.json")
    return tmp_path / "responses"


def run(tmp_path: Path, params: Path) -> dict[str, Any]:
    out = tmp_path / "tokens", tmp_path / "metrics.json"
    reconstruct_tokens(tmp_path / "responses", tmp_path / "verifier.json", *out, params)
    metrics: dict[str, Any] = json.loads(out[1].read_text())
    return metrics


def test_rows_in_are_rows_out_plus_rows_rejected(tmp_path: Path, tiny_verifier: Path) -> None:
    rows = [response([5, 6], [7, 8, STOP], prompt_id=f"p{i}") for i in range(20)]
    rows[3] = response([5, 6], [STOP], prompt_id="short")
    rows[4] = response([5, 6], [7] * 9, "length", prompt_id="long")
    write_responses(tmp_path, rows)
    metrics = run(tmp_path, settings(tmp_path, tiny_verifier))
    assert (metrics["rows_in"], metrics["rows_out"]) == (20, 19)
    assert metrics["rows_rejected"] == {"too few generated tokens": 1}
    assert metrics["truncated_in_answer"] == 1
    samples = list(read_parts(tmp_path / "tokens", TOKENS))
    assert len(samples) == 19
    assert metrics["tokens"] == sum(sample["length"] for sample in samples)
    assert metrics["loss_tokens"] == sum(sum(sample["loss_mask"]) for sample in samples) == 18 * 3 + 9
    assert [row["row"] for row in read_table(tmp_path / "tokens" / "rejected.parquet", REJECTED)] == ["short"]
    preview = (tmp_path / "tokens" / "preview.txt").read_text()
    assert "[prompt, masked]" in preview
    assert "[answer, learnt]" in preview


def test_truncated_rows_can_be_dropped(tmp_path: Path, tiny_verifier: Path) -> None:
    rows = [response([5, 6], [7, 8, STOP], prompt_id=f"p{i}") for i in range(9)]
    write_responses(tmp_path, [*rows, response([5], [7, 8], "length", prompt_id="cut")])
    metrics = run(tmp_path, settings(tmp_path, tiny_verifier, truncated="drop"))
    assert metrics["rows_rejected"] == {"truncated in the answer": 1}
    assert metrics["sources"] == {"s": {"rows": 10, "truncated_in_thinking": 0, "truncated_in_answer": 1}}


def test_r09_a_null_among_the_ids_is_a_rejected_row(tmp_path: Path, tiny_verifier: Path) -> None:
    rows = [response([5, 6], [7, 8, STOP], prompt_id=f"p{i}") for i in range(19)]
    write_responses(tmp_path, [*rows, response([5, 6], [7, STOP], prompt_id="null", prompt_token_ids=[None, 6])])
    assert run(tmp_path, settings(tmp_path, tiny_verifier))["rows_rejected"] == {"id outside the vocabulary": 1}


def test_m03_the_mask_follows_from_the_ids_whatever_else_a_row_says(tmp_path: Path, tiny_verifier: Path) -> None:
    """One path to a mask: several turns, another template switch, a second answer, another run, change nothing."""
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    others = [{}, {"messages": turns}, {"chat_template_kwargs": '{"thinking":true}'}, {"sample": 1}, {"reasoning": "x"}]
    write_responses(tmp_path, [response([5, 6], [7, 8, STOP], prompt_id=f"p{i}", **o) for i, o in enumerate(others)])
    params = settings(tmp_path, tiny_verifier)
    run(tmp_path, params)
    first = list(read_parts(tmp_path / "tokens", TOKENS))
    assert [sample["loss_mask"] for sample in first] == [[False, False, True, True, True]] * len(others)
    run(tmp_path, params)
    assert list(read_parts(tmp_path / "tokens", TOKENS)) == first


def test_m05_rows_that_teach_nothing_are_rejected_by_reason(tmp_path: Path, tiny_verifier: Path) -> None:
    rows = [response([5, 6], [7, 8, STOP], prompt_id=f"p{i}") for i in range(27)]
    empty, one = response([5], [], prompt_id="empty"), response([5], [STOP], prompt_id="one")
    full = response([5] * 1024, [7, STOP], prompt_id="full")  # the prompt alone fills the limit
    write_responses(tmp_path, [*rows, empty, one, full])
    metrics = run(tmp_path, settings(tmp_path, tiny_verifier))
    assert metrics["rows_rejected"] == {"longer than verifier.max_model_len": 1, "too few generated tokens": 2}


@pytest.mark.parametrize("rebuilt", [False, True])
def test_m06_the_minimum_holds_for_rows_from_ids_and_from_text(rebuilt: bool) -> None:
    own = load_params(ROOT / "params.yaml").reconstruct_tokens.model_copy(update={"min_loss_tokens": 8})
    sample = {"length": 30, "truncated_in": None, "rebuilt": rebuilt}
    check_use(sample | {"prompt_length": 22}, own)
    with pytest.raises(Unusable, match="too few generated tokens: 1, wanted 8"):
        check_use(sample | {"prompt_length": 29}, own)


def test_m09_what_is_learnt_is_the_answer_and_the_preview_shows_it(tmp_path: Path, tiny_verifier: Path) -> None:
    words = build_tokenizer()
    asked, answered = "How many apples", "twelve apples and five"
    rows = [
        response(words.encode(f"{asked} {i}"), [*words.encode(f"{answered} {i}"), STOP], prompt_id=f"p{i}")
        for i in range(20)
    ]
    write_responses(tmp_path, rows)
    run(tmp_path, settings(tmp_path, tiny_verifier))
    for row, sample in zip(rows, read_parts(tmp_path / "tokens", TOKENS, arrays=True), strict=True):
        assert sample["input_ids"][sample["loss_mask"]].tolist() == row["output_token_ids"]
        assert sample["input_ids"][~sample["loss_mask"]].tolist() == row["prompt_token_ids"]
    preview = (tmp_path / "tokens" / "preview.txt").read_text()
    assert preview.count(f"[prompt, masked] {asked} ") == preview.count(f"[answer, learnt] {answered} ") == 20


def test_rows_without_ids_are_rebuilt_and_the_others_audited(tmp_path: Path, tiny_verifier: Path) -> None:
    words = AutoTokenizer.from_pretrained(tiny_verifier)
    messages = [{"role": "user", "content": "How many apples?"}]
    prompt = prompt_ids(words, messages, {})
    texts = [f"You have {i} apples" for i in range(30)]
    rows = []
    for i, text in enumerate(texts):
        output = words.encode(text + "<|im_end|>")
        known = response(prompt, output, prompt_id=f"p{i:02}", messages=messages, content=text)
        unknown = known | {"prompt_token_ids": None, "output_token_ids": None}
        human = unknown | {"prompt_tokens": None, "completion_tokens": None, "sampling": "{}", "engine": "reference"}
        rows.append([known, unknown, human][i % 3])
    rows[4] |= {"completion_tokens": rows[4]["completion_tokens"] + 1}
    rows[0] |= {"content": "something else"}
    write_responses(tmp_path, rows)
    metrics = run(tmp_path, settings(tmp_path, tiny_verifier))
    assert metrics["rows_rejected"] == {"rebuilt ids disagree with usage": 1}
    assert metrics["rebuilt"] == 19
    samples = {sample["sample_id"]: sample for sample in read_parts(tmp_path / "tokens", TOKENS)}
    for i, text in enumerate(texts):
        if i != 4:
            sample = samples[f"p{i:02}"]
            assert sample["input_ids"] == prompt + words.encode(text + "<|im_end|>")
            assert (sample["rebuilt"], sample["greedy"]) == (i % 3 > 0, i % 3 == 0)
    audit = metrics["audit"]
    assert (audit["rows"], audit["identical"], audit["kinds"]["other"]) == (10, 9, 1)
    audited = list(read_table(tmp_path / "tokens" / "audit.parquet", AUDIT))
    assert {row["sample_id"]: row["kind"] for row in audited} == {
        f"p{i:02}": "other" if i == 0 else None for i in range(0, 30, 3)
    }
    assert "identical: 9 (90.0%)" in (tmp_path / "tokens" / "audit.txt").read_text()
    assert not verify_places([tmp_path / "tokens"], None).faults


@pytest.mark.parametrize("wanted", [0, 5, 100])
def test_so_many_rows_are_audited_and_the_same_ones_whatever_the_order(
    tmp_path: Path, tiny_verifier: Path, wanted: int
) -> None:
    messages = [{"role": "user", "content": "How many?"}]
    rows = [
        response([5, 6], [7, 8, STOP], prompt_id=f"p{i}", sample=s, messages=messages)
        for i in range(20)
        for s in (0, 1)
    ]
    found = []
    for order in (rows, rows[::-1]):
        write_responses(tmp_path, order)
        metrics = run(tmp_path, settings(tmp_path, tiny_verifier, audit_rows=str(wanted)))
        found.append({row["sample_id"] for row in read_table(tmp_path / "tokens" / "audit.parquet", AUDIT)})
        assert metrics["audit"]["rows"] == len(found[-1]) == min(wanted, 40)
        assert metrics["audit"]["kinds"]["prompt"] == min(wanted, 40)
    assert found[0] == found[1]


def test_text_is_read_only_in_parts_that_have_a_row_without_ids(tmp_path: Path) -> None:
    rows = [response([5], [7, STOP], prompt_id=f"p{i}", content="text") for i in range(3)]
    write_responses(tmp_path, rows)
    assert not any("content" in row for row in read_responses(tmp_path / "responses"))
    write_responses(tmp_path, [*rows, rows[0] | {"prompt_token_ids": None, "output_token_ids": None}])
    found = list(read_responses(tmp_path / "responses"))
    assert [row["content"] for row in found] == ["text"] * 4
    assert [row["output_token_ids"] is None for row in found] == [False, False, False, True]


def test_too_many_bad_rows_fail(tmp_path: Path, tiny_verifier: Path) -> None:
    write_responses(tmp_path, [response([5], [7, 8], prompt_id=f"p{i}", completion_tokens=3) for i in range(9)])
    with pytest.raises(ValueError, match="ids disagree with usage"):
        run(tmp_path, settings(tmp_path, tiny_verifier))


def test_a_missing_input_is_one_line(tmp_path: Path, tiny_verifier: Path) -> None:
    params = settings(tmp_path, tiny_verifier)
    write_responses(tmp_path, [response([5], [7, STOP])])
    words = [str(tmp_path / name) for name in ("nowhere", "verifier.json", "tokens", "metrics.json")]
    shown = subprocess.run(
        [sys.executable, "-m", "stages.reconstruct_tokens", *words, str(params)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 1
    assert shown.stderr.startswith("error: ")
    assert "nowhere/index.parquet: no such file" in shown.stderr
    assert "Traceback" not in shown.stderr


def checked(tmp_path: Path, old: str, new: str) -> Path:
    assert old in DEFAULT
    (tmp_path / "params.yaml").write_text(DEFAULT.replace(old, new, 1))
    check(tmp_path / "params.yaml", ROOT / "dvc.yaml", tmp_path / "passed.txt")
    return tmp_path / "passed.txt"


def test_the_check_writes_the_same_file_for_every_good_edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    first = checked(tmp_path, EPOCHS, EPOCHS).read_bytes()
    assert checked(tmp_path, EPOCHS, "  epochs: 50").read_bytes() == first


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("path: data/prompts/starter.jsonl", "path: data/prompts/mine.jsonl", "mine.jsonl .* is not a file here"),
        ("path: data/prompts/starter.jsonl", "path: README.md", "README.md is not under deps of the stage `prompts`"),
        ("warm_start: null", "warm_start: no/where", "train.warm_start: no/where is not a folder here"),
        ("warm_start: null", "warm_start: docs", "train.warm_start: docs is not under deps of the stage `train`"),
        ("validation_share: 0.05", "validation_share: 0.95", "leave nothing to train on"),
        ("shard_min_mib: 32", "shard_min_mib: 320", "shard_min_mib is above"),
        ("min_room_tokens: 16", "min_room_tokens: 1024", "no room for a prompt"),
        (EPOCHS, EPOCHS.replace("epochs", "epoch"), "unknown key train.epoch"),
    ],
)
def test_the_check_refuses_what_cannot_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, told: str
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ValueError, match=told):
        checked(tmp_path, old, new)
    assert not (tmp_path / "passed.txt").exists()


def test_a_prompt_has_one_reference_answer(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text(DEFAULT.replace("reference_share: 0.0", "reference_share: 0.5"))
    check_together(load_params(tmp_path / "params.yaml"))
    text = (tmp_path / "params.yaml").read_text().replace("samples_per_prompt: 1", "samples_per_prompt: 2")
    (tmp_path / "params.yaml").write_text(text)
    with pytest.raises(ValueError, match="samples_per_prompt must be 1"):
        check_together(load_params(tmp_path / "params.yaml"))


def test_a_repository_without_a_commit_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_commit()  # no repository at all is fine
    subprocess.run(["git", "init", "--quiet"], check=True)
    with pytest.raises(ValueError, match="no commit yet"):
        check_commit()
    identity = ["-c", "user.name=x", "-c", "user.email=x@localhost"]
    subprocess.run(["git", *identity, "commit", "--quiet", "--allow-empty", "-m", "start"], check=True)
    check_commit()
