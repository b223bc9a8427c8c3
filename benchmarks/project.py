"""A throw-away copy of the pipeline with other prompts and settings, run by DVC like the real one."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).parent.parent
COPIED = ("stages", "eagle3", "dvc.yaml", "params.yaml", ".dvcignore", ".gitignore")


class Project:
    """The pipeline in `folder`, as a git and DVC repository of its own. An existing folder goes on where it was."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for name in COPIED:
            source, target = ROOT / name, folder / name
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copyfile(source, target)
        if not (folder / ".git").exists():
            self.run("git", "init", "--quiet")
            self._sign()
        if not (folder / ".dvc").exists():
            self.run("dvc", "init", "--quiet")
        shutil.copyfile(ROOT / ".dvc" / "config", folder / ".dvc" / "config")

    @classmethod
    def clone(cls, origin: Path, folder: Path) -> "Project":
        """A git clone of a project: without DVC's data, work store and remotes that git does not know."""
        subprocess.run(["git", "clone", "--quiet", str(origin), str(folder)], check=True)
        made = cls.__new__(cls)
        made.folder = folder
        made._sign()
        return made

    def _sign(self) -> None:
        self.run("git", "config", "user.name", "benchmark")
        self.run("git", "config", "user.email", "benchmark@localhost")

    def edit(self, sources: list[dict[str, Any]], settings: dict[str, Any]) -> None:
        """Put prompt sources and dotted settings (`train.epochs`: 2) into params.yaml, sources into dvc.yaml too."""
        yaml = YAML()
        params = yaml.load((self.folder / "params.yaml").read_text())
        template = dict(params["prompts"]["sources"][0])
        params["prompts"]["sources"] = [template | source for source in sources]
        for name, value in settings.items():
            section, key = name.split(".")
            if key not in params[section]:
                raise ValueError(f"params.yaml has no {name}")
            params[section][key] = value
        pipeline = yaml.load((self.folder / "dvc.yaml").read_text())
        deps = pipeline["stages"]["prompts"]["deps"]
        deps[:] = [source["path"] for source in sources] + [dep for dep in deps if not dep.endswith(".jsonl")]
        for name, content in (("params.yaml", params), ("dvc.yaml", pipeline)):
            with (self.folder / name).open("w") as file:
                yaml.dump(content, file)
        self.commit("settings")

    def run(self, *command: str) -> float:
        """Run a command in the project with this interpreter's programs first; returns its seconds."""
        start = time.monotonic()
        subprocess.run(command, cwd=self.folder, env=self.environment(), check=True)
        return time.monotonic() - start

    def environment(self) -> dict[str, str]:
        """This process's environment with this interpreter's programs first and no work store of another project."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {name: value for name, value in os.environ.items() if name != "EAGLE3_WORK_DIR"} | {"PATH": path}

    def commit(self, message: str) -> None:
        """Commit everything that git does not ignore."""
        self.run("git", "add", "--all")
        self.run("git", "commit", "--quiet", "--allow-empty", "-m", message)

    def restore(self) -> None:
        """Take tracked files back to the last commit."""
        self.run("git", "checkout", "--quiet", "--", ".")

    def changed_files(self) -> list[str]:
        """What `git status` lists."""
        listed = subprocess.run(
            ["git", "status", "--porcelain"], cwd=self.folder, capture_output=True, text=True, check=True
        ).stdout
        return [line[3:] for line in listed.splitlines()]

    def repro(self, stages: list[str]) -> dict[str, float]:
        """Run the stages one by one; returns the seconds of each."""
        return {stage: round(self.run("dvc", "repro", "--single-item", stage), 1) for stage in stages}

    def metrics(self, stage: str) -> dict[str, Any]:
        """The metric file of a stage."""
        found: dict[str, Any] = json.loads((self.folder / "data" / "metrics" / f"{stage}.json").read_text())
        return found
