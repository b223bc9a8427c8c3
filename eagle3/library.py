"""Which code of the installed eagle3 each stage runs, for projects that do not hold that code themselves.

In the checkout dvc.yaml names the very files. Elsewhere they lie in an environment, so the stage `library` writes their
digests to a small file for each stage, and that file is the stage's dependency: an upgrade reruns the stages whose code
it changed, and no path of an environment enters dvc.yaml. Which files belong to a stage is what the checkout's dvc.yaml
says, which comes with the package.
"""

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from eagle3.digests import digest_file

PACKAGES = Path(__file__).parent.parent  # where eagle3 and stages lie side by side
SKELETON = Path(__file__).parent / "skeleton"
FOLDER = "data/library"


def code_of_stages() -> dict[str, list[str]]:
    """Stage -> its files, relative to where the package is installed."""
    stages: dict[str, Any] = YAML(typ="safe", pure=True).load((SKELETON / "dvc.yaml").read_text())["stages"]
    return {name: [dep for dep in stage["deps"] if is_code(dep)] for name, stage in stages.items()}


def is_code(dependency: str) -> bool:
    """Is a dependency in dvc.yaml a file of ours."""
    return dependency.startswith(("eagle3/", "stages/"))


def code_digests(packages: Path = PACKAGES) -> dict[str, dict[str, str]]:
    """Stage -> file -> SHA-256. Raises ValueError when the installation lacks one."""
    try:
        return {
            stage: {file: digest_file(packages / file) for file in files} for stage, files in code_of_stages().items()
        }
    except OSError as error:
        raise ValueError(f"eagle3 is not installed whole: {error}; install it again") from None


def digest_path(stage: str) -> str:
    """Where a project keeps the digests of a stage's code."""
    return f"{FOLDER}/{stage}.json"
