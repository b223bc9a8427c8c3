"""The finished DVC experiments of a project."""

from typing import Any

import dvc.api

from benchmarks.project import Project


def finished(project: Project) -> dict[str, dict[str, Any]]:
    """What `dvc exp show` has of each experiment that was evaluated, by name, whatever commit it began at."""
    rows = dvc.api.exp_show(repo=str(project.folder), num=-1)
    return {
        row["Experiment"]: row
        for row in rows
        if row.get("Experiment") and isinstance(row.get("acceptance_length"), float)
    }
