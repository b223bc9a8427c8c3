"""`eagle3 doctor`: is everything there that a run needs? Starts no engine and imports no vLLM."""

from collections.abc import Iterator
from pathlib import Path

from eagle3.doctor_machine import look_at_machine
from eagle3.doctor_project import look_at_project
from eagle3.findings import Finding


def examine(params_path: Path) -> Iterator[Finding]:
    """All findings, in the order in which they are made. Without vLLM a project is not looked at."""
    usable = True
    for finding in look_at_machine():
        usable = usable and not (finding.subject == "vllm" and finding.level == "stops")
        yield finding
    if usable:
        yield from look_at_project(params_path)
