"""`eagle3 init`: a project of one's own around a verifier and prompts, without the checkout.

params.yaml, dvc.yaml and .dvc/config are those of the checkout, which come with the package (skeleton/), with other
values. In dvc.yaml the files of code give way to digests of the installed ones (library.py).
"""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Any

from eagle3.consistency import check_project, check_together
from eagle3.console import say
from eagle3.library import FOLDER, SKELETON, digest_path, is_code
from eagle3.machine import Gpu, visible_gpus
from eagle3.params import Params, load_params, parse_params
from eagle3.params_text import dumped, edited, round_trip
from eagle3.prompt_files import copy_prompts, recognise
from eagle3.serving.engine import runs_on_cpu
from eagle3.verifier import identify_verifier
from eagle3.verifier_settings import Reading, Settings, read_verifier

WRITTEN = ("params.yaml", "dvc.yaml", ".dvc", ".dvcignore", ".gitignore", "README.md")
PROMPTS = "prompts"  # outside data/, so that no name clashes with what the stages make
IN_GIT_BYTES = 1 << 20  # prompt files up to this size are kept in git, larger ones in DVC
HEADER = """\
# The pipeline. `dvc repro` runs what changed, `dvc dag` draws it. Made by `eagle3 init`, eagle3 {version}.
# The code of the stages is the installed eagle3's; data/library/ holds a digest of it for each stage.
"""
IGNORED_BY_DVC = ".venv\n.work\n"
IGNORED_BY_GIT = """\
.venv/
.work/
__pycache__/
# outs of dvc.yaml: DVC tracks them. They stand here, in a committed file, because DVC takes its own entries back when a
# later stage fails.
"""
DVC_IGNORED_BY_GIT = "/config.local\n/tmp\n/cache\n"
SHARED_REMOTE = "eagle3-dvc-remote"  # in skeleton/dvc_config; a project has one of its own name
AUTHOR = ("-c", "user.name=eagle3 init", "-c", "user.email=eagle3@localhost")  # where git knows none


@dataclass(frozen=True)
class Wanted:
    """What `eagle3 init` was asked for. verifier, prompts: None and empty = the bundled ones of params.yaml.

    given: further settings, which nothing that is read from the verifier overrides.
    """

    verifier: str | None
    revision: str | None
    prompts: Sequence[Path]
    text_column: str | None
    given: Settings


@dataclass(frozen=True)
class Project:
    """What was made. settings: what differs from params.yaml as it is shipped. committed: git has it."""

    folder: Path
    verifier: Reading
    prompts: Sequence[str]
    settings: Settings
    committed: bool


def start_project(folder: Path, wanted: Wanted, gpus: Sequence[Gpu]) -> Project:
    """Write a project to `folder`, which is made if need be, and validate it as the stage `check` does.

    Raises ValueError when a project is there already or something that was asked for is unusable; nothing is left then.
    """
    if shutil.which("git") is None:
        raise ValueError("git is not installed; DVC keeps its pipelines in git repositories")
    if "prompts.sources" in wanted.given:
        raise ValueError("prompts.sources is what --prompts says; give the files there")
    shipped = (SKELETON / "params.yaml").read_text(encoding="utf-8")
    template = parse_params(edited(shipped, wanted.given), Path("params.yaml"))
    files = list(wanted.prompts) or [SKELETON / "starter.jsonl"]
    sources = describe_sources(files, wanted.text_column, template)
    paths = [source["path"] for source in sources]
    existing = [name for name in (*WRITTEN, *paths) if (folder / name).exists()]
    if existing:
        raise ValueError(f"{folder} has {existing[0]} already; `eagle3 init` starts a project in a new or empty folder")
    asked = template.verifier
    revision = wanted.revision or asked.revision
    reading = read_verifier(wanted.verifier or asked.model, revision, template, wanted.given, gpus)
    settings = {**reading.settings, **wanted.given, **_identity(reading), "prompts.sources": sources}
    if asked.chat_template is not None:
        settings["verifier.chat_template"] = Path(asked.chat_template).name
    params_text = edited(shipped, settings)
    check_together(parse_params(params_text, folder / "params.yaml"))
    texts = {
        "params.yaml": params_text,
        "dvc.yaml": pipeline_text(paths),
        ".dvc/config": dvc_config(folder),
        ".dvc/.gitignore": DVC_IGNORED_BY_GIT,
        ".dvcignore": IGNORED_BY_DVC,
        ".gitignore": IGNORED_BY_GIT + "".join(f"/{out}\n" for out in kept_by_dvc()),
        "README.md": readme(folder, settings["verifier.model"], paths),
    }
    if asked.chat_template is not None:
        texts[settings["verifier.chat_template"]] = Path(asked.chat_template).read_text(encoding="utf-8")
    made = _Made(folder)
    try:
        made.write(texts)
        made.copy(files, paths)
        params = load_params(folder / "params.yaml")
        check_project(params, folder / "dvc.yaml")
        if params.verifier.model.startswith("/"):
            own = params.verifier.model_copy(update={"chat_template": asked.chat_template})
            identify_verifier(own, params.reasoning)
        made.note(".git")
        committed = _track(folder, [path for path in paths if (folder / path).stat().st_size > IN_GIT_BYTES])
    except BaseException:
        made.undo()
        raise
    return Project(folder, reading, paths, settings, committed)


def _identity(reading: Reading) -> Settings:
    """Which model it is: what was read holds, for paths are absolute there and revisions commits."""
    return {name: value for name, value in reading.settings.items() if name in ("verifier.model", "verifier.revision")}


def usable_gpus() -> list[Gpu]:
    """The GPUs that the installed vLLM can use; all there are while none is installed."""
    try:
        return [] if runs_on_cpu() else visible_gpus()
    except ValueError:
        return visible_gpus()


def what_was_made(made: Project) -> list[str]:
    """What `eagle3 init` says when it is done."""
    shown = {name: value for name, value in made.settings.items() if name != "prompts.sources"}
    lines = [f"{made.folder}: a project for {made.settings['verifier.model']} ({made.verifier.told})"]
    lines += [f"  {name} = {value}" for name, value in shown.items()]
    lines += [f"  prompts: {path}" for path in made.prompts]
    if not made.committed:
        lines.append(
            "It lies in a git repository: git add it there, and commit, before `dvc exp run --queue` or `--temp`."
        )
    return [*lines, f"next: cd {shlex.quote(str(made.folder))} && dvc repro        (`eagle3 doctor` looks first)"]


def describe_sources(files: Sequence[Path], text_column: str | None, template: Params) -> list[dict[str, Any]]:
    """The entries of prompts.sources for prompt files: the shipped one with their paths, names and text columns."""
    like = template.prompts.sources[0]
    sources: list[dict[str, Any]] = []
    for file in files:
        column = recognise(file, text_column, like, template.prompts.multi_turn)
        own = {"path": f"{PROMPTS}/{file.name}", "name": file.stem, "text_column": column}
        sources.append(like.model_dump() | own)
    names = [source["name"] for source in sources]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"--prompts: two files are called {twice[0]}; rename one")
    return sources


def pipeline_text(prompts: Iterable[str]) -> str:
    """dvc.yaml of a project with these prompt files."""
    yaml = round_trip()
    pipeline = yaml.load((SKELETON / "dvc.yaml").read_text(encoding="utf-8"))
    pipeline.ca.comment = None
    stages = pipeline["stages"]
    for name, stage in stages.items():
        others = [dep for dep in stage["deps"] if not is_code(dep)]
        if name == "prompts":
            others = [*prompts, *(dep for dep in others if not dep.endswith(".jsonl"))]
        stage["deps"][:] = [*others, digest_path(name)]
    library = {
        "desc": "Digests of the installed code of each stage, so that an upgrade of eagle3 reruns what it changed.",
        "cmd": f"python -m stages.library {FOLDER}",
        "always_changed": True,
        "outs": [digest_path(name) for name in stages],
    }
    stages.insert(0, "library", library)
    return HEADER.format(version=version("eagle3")) + dumped(yaml, pipeline)


def dvc_config(folder: Path) -> str:
    """.dvc/config, with a default remote beside the project that is named after it."""
    name = re.sub(r"[^\w.-]", "-", folder.absolute().name)
    return (SKELETON / "dvc_config").read_text().replace(SHARED_REMOTE, f"{name}-dvc-remote")


def kept_by_dvc() -> list[str]:
    """The outs of a project that DVC keeps, so that git must not; of folders what is being written too."""
    stages = round_trip().load((SKELETON / "dvc.yaml").read_text(encoding="utf-8"))["stages"].values()
    outs = [str(out) for stage in stages for out in stage["outs"] if isinstance(out, str)]
    return [FOLDER, *(name for out in outs for name in ([out] if Path(out).suffix else [out, f"{out}.tmp"]))]


def readme(folder: Path, verifier: str, prompts: Sequence[str]) -> str:
    """README.md of a project."""
    listed = ", ".join(f"`{prompt}`" for prompt in prompts)
    fields = {"name": folder.absolute().name, "verifier": verifier, "version": version("eagle3"), "prompts": listed}
    return Template((SKELETON / "README.md").read_text()).substitute(fields)


class _Made:
    """What was written below a folder, to be taken back."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._paths: list[Path] = []  # a folder before what is in it

    def write(self, texts: dict[str, str]) -> None:
        for name, text in texts.items():
            self._make_room(name).write_text(text, encoding="utf-8")

    def copy(self, files: Sequence[Path], names: Sequence[str]) -> None:
        copy_prompts(files, [self._make_room(name) for name in names])

    def note(self, name: str) -> None:
        """Something that others will make, unless it is there already."""
        if not (self.folder / name).exists():
            self._paths.append(self.folder / name)

    def _make_room(self, name: str) -> Path:
        """The path of a file to be written, noted; folders above it are made and noted too."""
        path = self.folder / name
        missing = [parent for parent in path.parents if not parent.exists()]
        for parent in reversed(missing):
            parent.mkdir()
            self._paths.append(parent)
        self._paths.append(path)
        return path

    def undo(self) -> None:
        for path in reversed(self._paths):
            if path.is_dir():
                shutil.rmtree(path)  # it was not there before; DVC may have put something in it
            else:
                path.unlink(missing_ok=True)


def _track(folder: Path, large: Sequence[str]) -> bool:
    """Give large prompt files to DVC and all else to git, with a commit, unless the folder lies in a repository that
    has commits: there that is the user's to do. Returns whether it was committed."""
    inside = _git(folder, "rev-parse", "--is-inside-work-tree").returncode == 0
    begun = inside and _git(folder, "rev-parse", "HEAD").returncode == 0
    if not inside:
        _must(folder, "git", "init", "--quiet")
    for path in large:
        say(f"dvc add {path}")
        _must(folder, sys.executable, "-m", "dvc", "add", "--quiet", path)
    if begun:
        return False
    known = _git(folder, "var", "GIT_COMMITTER_IDENT").returncode == 0
    _must(folder, "git", "add", "--all", ".")
    _must(folder, "git", *(() if known else AUTHOR), "commit", "--quiet", "-m", "eagle3 init")
    return True


def _git(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)


def _must(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        told = " ".join((done.stderr or done.stdout).split())
        raise ValueError(f"`{' '.join(command[:2])}` failed in {folder}: {told}")
