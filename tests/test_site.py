"""The pages: they build into a site without a warning, say what the code says, and name only what is there."""

import ast
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from markdown_it import MarkdownIt
from markdown_it.token import Token

from docs import write
from eagle3.draft.model import DraftModel, choose_sizes
from eagle3.params import load_params
from examples.write import FOLDER as EXAMPLES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
PARTS = ("eagle3", "stages", "tests", "benchmarks", "experiments", "examples", "docs", "requirements")


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Broken links, anchors and pages that no table of contents has are warnings; so are formulas that do not parse."""
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "--fail-on-warning",
        "--keep-going",
        "-q",
        "-E",
        "-d",
        tmp_path / "trees",
    ]
    done = subprocess.run([*command, DOCS, tmp_path / "site"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = {path.stem for path in (tmp_path / "site").glob("*.html")}
    assert {path.stem for path in DOCS.glob("*.md")} <= pages
    mathematics = (tmp_path / "site/mathematics.html").read_text()
    assert mathematics.count("<math") > 40 and "$$" not in mathematics
    loaded = re.findall(r'(?:src|href)="(https?://[^"]+)"[^>]*(?:rel="stylesheet"|></script>)', mathematics)
    assert loaded == []


def test_tables_are_those_of_the_code() -> None:
    """`python -m docs.write` after every change of params.yaml, params.py, schemas.py or a record."""
    assert {name: (DOCS / name).read_text() for name in write.PAGES} == write.pages()


def tokens(page: Path, kind: str) -> list[Token]:
    """Everything of this kind in the text of a page."""
    parsed = MarkdownIt().enable("table").parse(page.read_text())
    return [child for token in parsed for child in token.children or [] if child.type == kind]


@cache
def anchors(page: Path) -> set[str]:
    """What headings can be linked to, as GitHub names them."""
    parsed = MarkdownIt().parse(page.read_text())
    titles = [parsed[place + 1].content for place, token in enumerate(parsed) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    links = [str(token.attrs["href"]) for token in tokens(page, "link_open")]
    broken = []
    for link in links:
        place, _, anchor = link.partition("#")
        target = page.parent / place if place else page
        if re.match(r"[a-z]+:", link):
            if not re.fullmatch(r"https://[\w.-]+\.[a-z]{2,}(/[\w./%~@+=&?:,;#-]*)?", link):
                broken.append(f"{link}: not a whole https address")
        elif not target.exists():
            broken.append(f"{link}: no such file")
        elif anchor and anchor not in anchors(target):
            broken.append(f"{link}: no such heading; there are {', '.join(sorted(anchors(target)))}")
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    named = {token.content for token in tokens(page, "code_inline")}
    places = [name for name in named if re.fullmatch(rf"({'|'.join(PARTS)})/[\w./*-]*", name)]
    assert [place for place in places if not any(ROOT.glob(place.rstrip("/")))] == []


def templates() -> list[str]:
    """Every text of the code, with NUL for what is put into it."""

    def text(node: ast.AST) -> str:
        match node:
            case ast.Constant(value=str(value)):
                return value
            case ast.JoinedStr(values=values):
                return "".join(map(text, values))
            case ast.FormattedValue():
                return "\0"
            case ast.BinOp(left=left, right=right):
                return text(left) + text(right)
        return ""

    paths = [path for part in ("eagle3", "stages") for path in (ROOT / part).rglob("*.py")]
    return [text(node) for path in paths for node in ast.walk(ast.parse(path.read_text()))]


def test_messages_that_are_explained_are_those_of_the_code() -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    known = "\n".join({text for text in templates() if text})
    absent = []
    for message in quoted:
        parts = [re.escape(part.strip()) for part in message.split("...")]
        if not re.search(".*".join(parts), known):
            absent.append(message)
    assert len(quoted) > 50
    assert absent == []


def test_what_kimi_takes_is_arithmetic_on_its_sizes() -> None:
    page = (DOCS / "kimi-k2.5.md").read_text()
    params = load_params(EXAMPLES / "kimi-k2.5.yaml")
    config = json.loads((ROOT / "tests/model_configs.json").read_text())["kimi-k2.5"]
    config["rope_theta"] = 50_000.0  # decides no size
    assert params.train.draft_vocab_size is not None
    with torch.device("meta"):
        sizes = choose_sizes(config, 3, params.train.draft_vocab_size, params.verifier.max_model_len, params.train)
        draft = DraftModel(sizes)
    weights = {name: value.numel() for name, value in draft.named_parameters()}
    trained = sum(count for name, count in weights.items() if name != "lm_head.weight")
    assert f"{trained / 1e6:.0f} million trained weights" in page
    assert f"written | {3 * 16 * trained / 1e9:.0f} GB |" in page
    assert f"in bfloat16 | {2 * sum(weights.values()) / 1e9:.1f} GB |" in page
    assert f"= 57,349 a token | {30e6 * 57_349 / 1e12:.2f} TB |" in page
    assert f"| {30e6 * 28_693 / 1e12:.2f} TB |" in page
    assert f"takes {8192 * 57_349 / 1e6:.0f} MB" in page
