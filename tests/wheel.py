"""eagle3 as others have it: built as a wheel, installed in an environment of its own, without the checkout.

The environment borrows the packages of this one (they are gigabytes), but not the checkout that is installed here.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

from benchmarks.project import ROOT, Project

BUILT_FROM = ("eagle3", "stages", "data/prompts/starter.jsonl", ".dvc/config", "dvc.yaml", "params.yaml")
BUILT_FROM += ("pyproject.toml", "README.md", "LICENSE")


def install_wheel(folder: Path) -> Path:
    """Build and install it below `folder`; returns the environment."""
    source = folder / "source"
    for name in BUILT_FROM:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, target, symlinks=True, ignore=ignored)
        else:
            shutil.copyfile(ROOT / name, target)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    offline = ["--no-deps", "--no-index", "--no-cache-dir"]
    build = [*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run(build, env=_clean(), check=True)
    shutil.rmtree(source)
    environment = folder / "venv"
    venv.create(environment)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    borrowed = environment / "lib" / version / "site-packages" / "borrowed.pth"
    borrowed.write_text(sysconfig.get_path("purelib") + "\n")  # its own .pth files, the checkout's too, are not read
    (wheel,) = folder.glob("*.whl")
    install = [*pip, "--python", str(environment / "bin" / "python"), "install", *offline, str(wheel)]
    subprocess.run(install, env=_clean(), check=True)
    return environment


def _clean() -> dict[str, str]:
    """This process's environment without what leads to the checkout or to another project's work store."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "EAGLE3_WORK_DIR")}


class InstalledProject(Project):
    """A project that `eagle3 init` of an installed wheel made in `folder`."""

    def __init__(self, environment: Path, folder: Path, options: Sequence[str]):
        self._programs = environment / "bin"
        self.folder = folder.parent
        self.run("eagle3", "init", str(folder), *options)
        self.folder = folder

    def environment(self) -> dict[str, str]:
        """An environment in which the wheel's programs come first."""
        path = os.pathsep.join([str(self._programs), str(Path(sys.executable).parent), os.environ["PATH"]])
        return _clean() | {"PATH": path, "VIRTUAL_ENV": str(self._programs.parent)}
