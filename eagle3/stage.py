"""A stage as a command line of its own, as dvc.yaml calls it.

DVC 3.67 notes the settings of a stage when the stage is done, so an edit of params.yaml while a stage runs would be
recorded as what its outs were made with. A stage therefore fails when the settings that it depends on have changed.
"""

import functools
import inspect
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from ruamel.yaml import YAML

from eagle3.console import guarded, interrupt
from eagle3.params import Params, load_params

PIPELINE = Path("dvc.yaml")


def run_stage(stage: Callable[..., None]) -> None:
    """Run one stage: its parameters are the arguments; a user's mistake is one line and exit 1."""
    signal.signal(signal.SIGTERM, interrupt)
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(guarded(with_one_set_of_settings(stage)))
    app()


def with_one_set_of_settings(stage: Callable[..., None]) -> Callable[..., None]:
    """The stage, followed by a ValueError when sections of `params_path` that it depends on are no longer the same.

    A function without `params_path` stays as it is.
    """
    if "params_path" not in inspect.signature(stage).parameters:
        return stage

    @functools.wraps(stage)
    def checked(*arguments: Any, **options: Any) -> None:
        path: Path = options["params_path"]
        before = load_params(path)
        stage(*arguments, **options)
        after = load_params(path)
        changed = [name for name in sections(stage.__name__) if getattr(before, name) != getattr(after, name)]
        if changed:
            raise ValueError(
                f"{path}: {', '.join(changed)} changed while the stage ran, and DVC would record the new settings for "
                "what was made with the old ones. Finished work is kept; run `dvc repro` again"
            )

    return checked


def check_commit() -> None:
    """Raise ValueError in a git repository without a commit: DVC's experiments and live metrics start from one."""
    if shutil.which("git") is None:
        return
    found = subprocess.run(
        ["git", "rev-parse", "--is-inside-work-tree", "HEAD"], capture_output=True, text=True, check=False
    )
    if found.returncode != 0 and found.stdout.startswith("true"):
        raise ValueError("this git repository has no commit yet; make one first: git add --all && git commit -m start")


def sections(stage: str) -> list[str]:
    """The sections of params.yaml that dvc.yaml declares for a stage; all of them where there is no dvc.yaml."""
    if not PIPELINE.is_file():
        return list(Params.model_fields)
    declared = YAML(typ="safe", pure=True).load(PIPELINE.read_text())["stages"]
    return list(declared.get(stage.replace("_", "-"), {}).get("params", []))
