"""The commands of a page of docs/, to be run by a test: what stands indented below a heading."""

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def commands(page: str, heading: str) -> list[str]:
    """The commands below a heading, in order, without their comments."""
    text = (DOCS / page).read_text()
    [section] = re.findall(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for line in section.splitlines() if line.startswith("    ")]
    return [re.split(r"\s+# ", line)[0] for line in lines]
