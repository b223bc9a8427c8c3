"""The commands that README and the pages show: what stands in their code blocks and begins with a program's name."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "eagle3/skeleton/README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = {"cd", "curl", "dvc", "eagle3", "export", "git", "make", "pip", "python", "ray", "sleep", "source", "srun"}
PROGRAMS |= {"bash", "docker", "hf", "pytest", "sbatch", "tensorboard", "torchrun", "uv", "vllm"}


def blocks(page: Path) -> Iterator[tuple[int, str]]:
    """First line and text of each code block of a page; those in a language other than a shell's are none."""
    for token in MarkdownIt().parse(page.read_text()):
        if token.type == "code_block" or (token.type == "fence" and token.info in ("", "sh", "bash", "console")):
            yield (token.map or [0])[0] + 1, token.content


def commands(page: Path) -> list[str]:
    """The commands of a page, without comments, each on one line.

    A paragraph of a block is commands if it begins with one (or those of its lines that begin with `$`), and nothing
    else then. Raises ValueError where commands and other lines are mixed.
    """
    found = []
    for line, block in blocks(page):
        for paragraph in re.split(r"\n\s*\n", block):
            try:
                found += commands_of(paragraph)
            except ValueError as error:
                raise ValueError(f"{page.name}, block at line {line}: {error}") from None
    return found


def commands_of(paragraph: str) -> list[str]:
    """The commands of one paragraph of a code block."""
    lines = [line for line in whole_lines(paragraph) if line and not line.startswith("#")]
    if prompted := [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]:
        return prompted
    begins = [is_command(line) for line in lines]
    if not any(begins):
        return []
    if not all(begins):
        odd = lines[begins.index(not begins[0])]
        raise ValueError(f"commands and other lines in one paragraph, first: {odd}")
    return lines


def whole_lines(text: str) -> Iterator[str]:
    """Lines without their comments; those that go on in the next one are joined with it."""
    held = ""
    for line in text.splitlines():
        held = f"{held} {line.strip()}".strip()
        if held.endswith("\\"):
            held = held[:-1].rstrip()
            continue
        bare = re.sub(r"(^|\s+)#(\s.*)?$", "", held)
        if not closes(bare):
            continue
        yield " ".join(bare.split())
        held = ""
    if held:
        yield held


def closes(line: str) -> bool:
    """Whether every quotation of a command ends on this line; other text does not matter."""
    if not is_command(line):
        return True
    try:
        shlex.split(line)
    except ValueError:
        return False
    return True


def is_command(line: str) -> bool:
    """Whether a line begins with a program that is known or installed here, or gives a variable its value."""
    first = line.split(maxsplit=1)[0] if line else ""
    return first in PROGRAMS or bool(re.match(r"\w+=", first)) or shutil.which(first) is not None


def defined_tests() -> set[str]:
    """Names of all tests, which pages and reasons refer to."""
    return {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }


def inline_commands(page: Path) -> list[str]:
    """Commands of ours and of DVC's that stand in a sentence, as code."""
    spans = [
        child.content
        for token in MarkdownIt().enable("table").parse(page.read_text())
        for child in token.children or []
        if child.type == "code_inline"
    ]
    return [span for span in spans if re.match(r"(eagle3|dvc|make) [a-z]|python -m (benchmarks|experiments)\.", span)]
