"""`eagle3 inspect`: spans, masks and special tokens for a person to read; hostile text; terminals, pagers and pipes."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from eagle3 import sample_view, tables
from eagle3.cli import app
from eagle3.params import load_params
from eagle3.reasoning import Pieces
from eagle3.report.tokens import spell
from eagle3.sample_view import HEAD_TOKENS, TAIL_TOKENS, View, Words, show_sample
from eagle3.tables import Row, list_parts
from tests.terminal import on_terminal
from tests.text_tokenizers import sentence_piece
from tests.tiny_verifiers import build_tokenizer
from tests.token_tables import token_row, write_params, write_tokens, write_verifier_json

ROOT = Path(__file__).parent.parent
TOKENIZER = build_tokenizer()
STOP = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
SGR = re.compile(r"\x1b\[[0-9;]*m")
HOSTILE = "Paris 🦜\x1b[31m\x1b]0;title\x07\u202e ⟨|im_end|⟩ \n[answer, 9 tokens, learnt]\r\n\tend "


def letters(text: str) -> list[int]:
    """Ordinary tokens alone, one for each byte: no special token, whatever the text says."""
    return [i for c in text for i in TOKENIZER.encode(c, add_special_tokens=False)]


def row(prompt: list[int], output: list[int], name: str, **changes: Any) -> Row:
    return token_row(prompt + output, len(prompt)) | {"sample_id": name} | changes


PROMPT = [TOKENIZER.convert_tokens_to_ids("<|im_start|>"), *letters("user\nquotes <|im_end|>"), STOP, *letters("\n")]
ROWS = [
    row(PROMPT, [*letters(HOSTILE), STOP], "aa10", source="web", category="code"),
    row(
        PROMPT,
        letters("hm, well"),
        "aa20",
        source="web",
        category="math",
        thinking_end=len(PROMPT) + 8,
        thinking_opened_by="prompt",
        thinking_ended_by="budget",
        truncated_in="thinking",
        answer_start=len(PROMPT) + 8,
        stray_markers=2,
        rebuilt=True,
        greedy=False,
    ),
    row(letters("long"), [*letters("x" * 700 + "y" * 700), STOP], "bb30", source="books", category="math"),
    row(letters("id"), [630, *letters("ok"), STOP], "aa10-1", source="books", category="code", truncated_in="answer"),
]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path) -> Path:
    """A folder with params.yaml and data/tokens in four small parts."""
    folder = tmp_path_factory.mktemp("project")
    write_params(folder / "params.yaml", tiny_verifier)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "PART_BYTES", (1, 400))
        write_tokens(folder / "data" / "tokens", ROWS)
    assert [part.rows for part in list_parts(folder / "data" / "tokens")] == [1, 1, 1, 1]
    return folder


@pytest.fixture
def here(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(project)
    return project


def inspect(*words: str) -> str:
    result = CliRunner().invoke(app, ["inspect", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(*words: str) -> str:
    result = CliRunner().invoke(app, ["inspect", *words])
    assert result.exit_code == 1
    assert result.stdout == ""
    told = result.stderr.strip()
    assert told.startswith("error: ") and "\n" not in told
    return told.removeprefix("error: ")


def view(**changes: bool) -> View:
    return View(Words(TOKENIZER), **({"color": False, "ids": False, "whole": False} | changes))


@pytest.mark.usefixtures("here")
def test_the_heading_tells_where_a_sample_is_from_and_what_ended_it() -> None:
    shown = inspect("2")
    assert shown.startswith("sample 2 of 4: aa20\n  source web, category math, split train, ")
    assert f"{len(ROWS[1]['input_ids'])} tokens ({len(PROMPT)} prompt, 8 thinking, 0 answer)" in shown
    assert "thinking opened by the prompt, ended by the token budget; cut off in the thinking" in shown
    assert "rebuilt from text; 2 stray markers" in shown
    assert "[thinking, 8 tokens, learnt]\n  hm, well\n" in shown
    assert "[answer" not in shown
    assert "no thinking; not cut off; ids from the engine; 0 stray markers; greedy" in inspect("1")


@pytest.mark.usefixtures("here")
def test_special_tokens_differ_from_the_same_characters_typed() -> None:
    shown = inspect("1")
    assert f"[prompt, {len(PROMPT)} tokens, masked]\n  ⟨|im_start|⟩user↵\n  quotes <|im_end|>⟨|im_end|⟩↵\n" in shown
    assert "\\u27e8|im_end|\\u27e9·↵\n" in shown  # the verifier wrote the brackets themselves
    assert "  ⟨id 630⟩ok⟨|im_end|⟩\n" in inspect("4")  # in the vocabulary of the model, not of the tokenizer


@pytest.mark.usefixtures("here")
def test_hostile_text_reaches_no_terminal_and_passes_for_no_heading() -> None:
    shown = inspect("1")
    assert "  Paris 🦜\\x1b[31m\\x1b]0;title\\x07\\u202e " in shown
    assert "\n  [answer, 9 tokens, learnt]\\r↵\n  ⇥   end·⟨|im_end|⟩\n" in shown
    assert all(c == "\n" or c.isprintable() for c in shown)
    assert [line for line in shown.splitlines() if line.startswith("[")] == [
        f"[prompt, {len(PROMPT)} tokens, masked]",
        f"[answer, {len(letters(HOSTILE)) + 1} tokens, learnt]",
    ]


@given(ids=st.lists(st.integers(0, 639), min_size=2, max_size=40), flags=st.tuples(st.booleans(), st.booleans()))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_the_ids_say_only_colours_and_line_breaks_control_the_terminal(
    ids: list[int], flags: tuple[bool, bool]
) -> None:
    sample = row(ids[:1], ids[1:], "\x1b[2J", category="\x1b]52;c;\x07", source="\u202e")
    shown = show_sample(1, 1, sample, view(color=flags[0], ids=flags[1]))
    assert all(c == "\n" or c.isprintable() for c in SGR.sub("", shown))
    assert flags[0] or "\x1b" not in shown


@pytest.mark.usefixtures("here")
def test_colours_change_nothing_else_and_dim_what_is_masked() -> None:
    shown = inspect("1", "--color", "always")
    assert SGR.sub("", shown) == inspect("1") == inspect("1", "--color", "never")
    prompt, answer = shown.split("\x1b[1m[answer")
    assert prompt.count("\x1b[2m") == 4  # two special tokens and two pieces of text
    assert "\x1b[2m" not in answer
    assert "\x1b[32mParis 🦜\x1b[0m\x1b[31m\\x1b\x1b[0m" in answer


def test_dimming_follows_the_mask_and_a_wrong_mask_is_told() -> None:
    sample = row(letters("ab"), letters("cdef"), "x")
    sample["loss_mask"] = [False, True, True, True, False, True]
    shown = show_sample(1, 1, sample, view(color=True))
    assert "[prompt, 2 tokens, 1 of them learnt]" in SGR.sub("", shown)
    assert "[answer, 4 tokens, 3 of them learnt]" in SGR.sub("", shown)
    assert "  \x1b[32mcd\x1b[0m\x1b[32m\x1b[2me\x1b[0m\x1b[32mf\x1b[0m\n" in shown


def test_ids_are_shown_with_the_text_of_each_token() -> None:
    sample = row([*letters("a b"), STOP], [*letters("🦜\n"), 630], "x")
    shown = show_sample(1, 1, sample, view(ids=True)).splitlines()
    pairs = [line.split(maxsplit=2) for line in shown if line.startswith("    ")]
    assert [[int(place), int(token)] for place, token, _ in pairs] == [*map(list, enumerate(sample["input_ids"]))]
    texts = ["a", "·", "b", "⟨|im_end|⟩", "\\xf0", "\\x9f", "\\xa6", "\\x9c", "↵", "⟨id 630⟩"]
    assert [text for *_, text in pairs] == texts  # bytes that are no text alone


@pytest.mark.parametrize("prepend", [True, False], ids=["Llama 2", "Metaspace"])
def test_pieces_of_sentence_piece_keep_their_blanks(prepend: bool) -> None:
    """The tokens one by one read as the whole does: words are not glued together, an emoji of bytes is whole."""
    tokenizer = sentence_piece(prepend)
    text = "The  quick fox:\n  x = 1 \U0001f98a end"
    ids = tokenizer.encode(text, add_special_tokens=False)
    words = Words(tokenizer)
    assert "".join(spell(ids, Pieces(tokenizer))).removeprefix(" ") == text
    assert words.text(ids) == text
    assert sum(words.piece(token).startswith(" ") for token in ids) >= 4


def test_an_emoji_of_several_tokens_is_whole_and_half_a_one_is_no_error() -> None:
    bird = letters("🦜")
    assert len(bird) == 4
    assert "\n  🦜\n" in show_sample(1, 1, row([5], bird, "x"), view())
    assert "\n  \ufffd\n" in show_sample(1, 1, row([5], bird[:2], "x"), view())


@pytest.mark.usefixtures("here")
def test_long_samples_are_cut_with_a_note_unless_whole() -> None:
    shown = inspect("3")
    assert f"... {1401 - HEAD_TOKENS - TAIL_TOKENS} tokens left out; --whole shows them ..." in shown
    assert [len(run) for run in re.findall("x{9,}|y{9,}", shown)] == [HEAD_TOKENS, TAIL_TOKENS - 1]
    whole = inspect("3", "--whole")
    assert "left out" not in whole
    assert "x" * 700 + "y" * 700 + "⟨|im_end|⟩" in whole


@pytest.mark.usefixtures("here")
def test_a_row_is_found_by_number_id_and_beginning() -> None:
    assert inspect("aa10") == inspect("1") == inspect("data/tokens", "1")  # exact, though aa10-1 begins so too
    assert inspect("aa10-1") == inspect("4")
    assert inspect("bb") == inspect("3")


@pytest.mark.usefixtures("here")
def test_finding_a_row_reads_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    original = sample_view.read_table

    def noting(path: Path, *words: Any, **options: Any) -> Any:
        read.append(path)
        return original(path, *words, **options)

    monkeypatch.setattr(sample_view, "read_table", noting)
    parts = [part.path for part in list_parts(Path("data/tokens"))]
    for words, expected in ((["2"], [1]), (["bb30"], [2]), (["--category", "code"], [0, 3])):
        read.clear()
        inspect(*words)
        assert read == [parts[place] for place in expected]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], ["aa10", "aa20", "bb30", "aa10-1"]),
        (["--first", "2"], ["aa10", "aa20"]),
        (["data/tokens", "--source", "web"], ["aa10", "aa20"]),
        (["--category", "math", "--source", "books"], ["bb30"]),
        (["--truncated", "thinking"], ["aa20"]),
        (["--truncated", "answer"], ["aa10-1"]),
        (["--category", "code", "--first", "1"], ["aa10"]),
    ],
)
def test_filters(words: list[str], names: list[str]) -> None:
    assert re.findall(r"^sample \d of 4: (\S+)$", inspect(*words), re.MULTILINE) == names


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["5"], "data/tokens: there is no row 5; rows are 1 to 4"),
        (["0"], "data/tokens: there is no row 0; rows are 1 to 4"),
        (["zz"], "data/tokens: no sample id begins with zz; give an id, or a row from 1 to 4"),
        (["a\x1b"], "data/tokens: no sample id begins with a\\x1b; give an id, or a row from 1 to 4"),
        (["aa"], "data/tokens: 3 sample ids begin with aa: aa10, aa20, aa10-1; give more of one"),
        (["./nowhere"], "nowhere/index.parquet: no such file; `dvc repro` makes it"),
        (["nowhere", "1"], "nowhere/index.parquet: no such file; `dvc repro` makes it"),
        (["--category", "poems"], "data/tokens: none of 4 samples has category poems; there is category: code, math"),
        (
            ["--category", "code", "--truncated", "thinking"],
            "data/tokens: none of 4 samples has category code and truncated_in thinking; "
            "there is category: code, math; truncated_in: thinking, answer",
        ),
        (
            ["1", "--first", "2"],
            "row 1 is one sample; leave it out to choose by --first, --source, --category, --truncated",
        ),
        (["1", "--params", "gone.yaml"], "gone.yaml: no such file; run from the project's top folder"),
    ],
)
def test_mistakes_are_one_line_that_names_the_remedy(words: list[str], told: str) -> None:
    assert refusal(*words) == told


@pytest.mark.usefixtures("here")
def test_tokens_of_another_verifier_are_told(tmp_path: Path, here: Path) -> None:
    """The ids are read with the tokenizer of params.yaml, whoever wrote them."""
    shutil.copytree("data/tokens", tmp_path / "tokens")
    write_verifier_json(tmp_path / "verifier.json", load_params(Path("params.yaml")))
    words = ["inspect", str(tmp_path / "tokens"), "1"]
    assert CliRunner().invoke(app, words).stderr == ""
    identity = json.loads((tmp_path / "verifier.json").read_text())
    (tmp_path / "verifier.json").write_text(json.dumps(identity | {"name": "other/model"}))
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0
    assert "was written by other/model, but params.yaml names" in told.stderr


def test_an_unknown_choice_is_refused() -> None:
    result = CliRunner().invoke(app, ["inspect", "--truncated", "prompt"])
    assert result.exit_code == 2
    assert "thinking" in result.stderr


def test_a_damaged_part_is_named(tmp_path: Path, here: Path) -> None:
    write_tokens(tmp_path / "tokens", ROWS)
    part = next(list_parts(tmp_path / "tokens")).path
    data = bytearray(part.read_bytes())
    data[60] ^= 1
    part.write_bytes(data)
    assert "differs from its digest" in refusal(str(tmp_path / "tokens"), "1")


#: Several calls in one process, since starting it is what takes time; each ends with a line of its own.
CALLS = """
import os, sys
from eagle3.cli import app
for call in sys.argv[1:]:
    pager, no_color, *words = call.split("\\t")
    os.environ |= {"PAGER": pager, "NO_COLOR": no_color}
    try:
        app(["inspect", *words])
    except SystemExit as end:
        print("END", end.code, flush=True)
"""
SAYING = "sh -c 'echo PAGED; cat'"


def on_a_terminal(folder: Path, *calls: str) -> list[str]:
    """What each call shows."""
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT)}
    shown = on_terminal([sys.executable, "-c", CALLS, *calls], cwd=folder, env=environment)
    return shown.replace("\r\n", "\n").split("END 0\n")[:-1]


def test_on_a_terminal(project: Path) -> None:
    """Colours unless NO_COLOR; a pager for more than a screenful; one that is left early or absent is no error."""
    short, long, plain, left, absent, forced = on_a_terminal(
        project,
        f"{SAYING}\t\t2",
        f"{SAYING}\t",
        f"{SAYING}\t1",
        "head -n 1\t",
        "no-such-pager\t\t2\t--ids",
        f"{SAYING}\t1\t2\t--color\talways",
    )
    assert "PAGED" not in short and "\x1b[33mhm, well" in short
    assert long.startswith("PAGED\n") and "\x1b[33mhm, well" in long
    assert SGR.sub("", long).count("sample ") == 4
    assert plain.startswith("PAGED\n") and "\x1b" not in plain
    assert left.count("\n") == 1 and "aa10" in left
    assert "the pager no-such-pager does not start" in absent and "hm" not in absent and "aa20" in absent
    assert "\x1b[33mhm, well" in forced
    for shown in (short, long, left, absent, forced):
        assert "Traceback" not in shown and "\x1b" not in SGR.sub("", shown)


def test_a_pipe_gets_no_colour_and_no_pager_and_may_close_early(project: Path) -> None:
    environment = {**os.environ, "PAGER": SAYING, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "eagle3.cli", "inspect", "--ids", "--whole"]
    process = subprocess.Popen(
        command, cwd=project, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None and process.stderr is not None
    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)  # so that not all of it fits
    first = process.stdout.readline()
    process.stdout.close()
    told = process.stderr.read()
    assert (first, told, process.wait()) == (b"sample 1 of 4: aa10\n", b"", 0)
