"""Experiments as docs/experiments.md tells them: its commands, on a project with recorded states and a real `train`."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from benchmarks.project import ROOT, Project
from eagle3.digests import digest_file
from eagle3.params import Params, parse_params
from stages.train import train
from tests.draft_runs import SETTINGS, wait_until
from tests.dvc_project import experiments
from tests.page import commands

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.usefixtures("one_core")]

KEPT = ("check", "prompts", "train")
GIVEN = ("hidden_states", "verifier.json")
WEIGHTS = "data/draft/model.safetensors"


class Case:
    """A clone of a project, its remotes beside it. The first one has run and is committed and pushed."""

    def __init__(self, project: Project):
        self.folder = project.folder
        self._environment = project.environment() | {"PYTHONPATH": str(ROOT)}

    def run(self, command: str, fails: bool = False) -> str:
        """Run a command of the page; returns all that it printed (by a file: workers of a queue keep a pipe open)."""
        with tempfile.TemporaryFile("w+") as said:
            done = subprocess.run(
                command, shell=True, cwd=self.folder, env=self._environment, stdout=said, stderr=said, check=False
            )
            said.seek(0)
            told = said.read()
        assert (done.returncode != 0) == fails, f"{command}\n{told}"
        return told

    def start(self, command: str) -> "subprocess.Popen[bytes]":
        """Start one as the leader of a process group, as a terminal does; what it prints is lost."""
        nowhere = subprocess.DEVNULL
        words, where = ["sh", "-c", f"exec {command}"], {"cwd": self.folder, "env": self._environment}
        return subprocess.Popen(words, process_group=0, stdout=nowhere, stderr=nowhere, **where)

    def all(self, heading: str) -> dict[str, str]:
        """Run the commands below a heading of the page; returns what each printed."""
        return {command: self.run(command) for command in commands("experiments.md", heading)}

    def experiments(self) -> dict[str, str]:
        """The experiments that are done: name -> commit."""
        return experiments(self.folder)

    def params(self, experiment: str = "") -> Params:
        """params.yaml here, or of an experiment."""
        path = self.folder / "params.yaml"
        text = self.run(f"git show {self.experiments()[experiment]}:params.yaml") if experiment else path.read_text()
        return parse_params(text, path)

    def training_runs(self) -> set[Path]:
        """Folders of the work store."""
        return {path for path in (self.folder / ".work/train").glob("*") if path.is_dir()}

    def running(self) -> int:
        """How many runs of the trainer hold their folder now."""
        held = 0
        for path in self.training_runs():
            with suppress(FileNotFoundError), (path / "lock").open() as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    held += 1
        return held

    def alone(self, experiment: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        """Digest of the draft that the stage makes of an experiment's settings in this process."""
        folder.mkdir()
        monkeypatch.setenv("EAGLE3_WORK_DIR", str(folder / "work"))
        monkeypatch.chdir(self.folder)
        (folder / "params.yaml").write_text(self.run(f"git show {self.experiments()[experiment]}:params.yaml"))
        outs = [folder / name for name in ("draft", "train.json", "plots")]
        train(Path("data/hidden_states"), Path("data/verifier.json"), *outs, folder / "params.yaml")
        return digest_file(folder / "draft/model.safetensors")

    def weights(self, revision: str) -> str:
        """Digest of the draft of an experiment, without checking it out."""
        return json.loads(self.run(f"eagle3 lineage {revision} --json"))["lineage"]["draft"]["model.safetensors"]


@pytest.fixture(scope="module")
def case(
    recorded: Path, tiny_verifier: Path, one_core: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    """The project, which no test leaves changed."""
    root = tmp_path_factory.mktemp("experiments")
    project = Project(root / "project")
    made = Case(project)
    (made.folder / "data/prompts").mkdir(parents=True)
    (made.folder / "data/prompts/mine.jsonl").write_text('{"prompt": "a question"}\n')
    shutil.copytree(recorded / "hidden_states", made.folder / "data/hidden_states")
    shutil.copyfile(recorded / "verifier.json", made.folder / "data/verifier.json")
    yaml = YAML()
    pipeline = yaml.load((made.folder / "dvc.yaml").read_text())
    with (made.folder / "dvc.yaml").open("w") as file:
        yaml.dump({"stages": {name: pipeline["stages"][name] for name in KEPT}}, file)
    settings = {"verifier.model": str(tiny_verifier), "verifier.dtype": "float32", "verifier.max_model_len": 256}
    settings |= {f"train.{name}": value for name, value in SETTINGS.items()}
    project.edit([{"path": "data/prompts/mine.jsonl", "name": "mine"}], settings)
    made.run(f"git init --quiet --bare {root / 'origin.git'}")
    made.run(f"git remote add origin {root / 'origin.git'}")
    made.run("dvc add data/hidden_states data/verifier.json")
    made.run("dvc repro")
    project.commit("first run")
    yield made
    made.run("dvc queue stop --kill")


@pytest.fixture(autouse=True)
def as_committed(case: Case) -> Iterator[None]:
    yield
    case.run("git reset --hard --quiet && dvc checkout --quiet --force")


def test_one_experiment(case: Case) -> None:
    run, show, apply = commands("experiments.md", "One experiment")
    assert "Running stage 'train'" in case.run(run) and case.params().train.learning_rate == 5e-4
    told = case.run(show)
    [header] = [line for line in told.splitlines() if "Experiment" in line]
    assert "expected_acceptance_length" in header and "train.learning_rate" in header
    assert len(header.split()) < 14
    case.run("git reset --hard --quiet")
    case.run(apply)
    assert case.params().train.learning_rate == 5e-4
    assert "Running stage 'train'" not in case.run("dvc repro")


def test_a_sweep_by_two_workers_at_a_time(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They train at the same time, each its own: every draft is the one of a run that had nobody beside it."""
    most = 0

    def done() -> bool:
        nonlocal most
        time.sleep(0.1)
        most = max(most, case.running())
        return {"rate-1", "rate-2"} <= case.experiments().keys()

    for command in commands("experiments.md", "A sweep"):
        case.run(command)
        if "queue start" in command:
            wait_until(done, 240)
    assert most == 2
    drafts = {name: case.weights(name) for name in ("rate-1", "rate-2")}
    assert len(set(drafts.values())) == 2
    for name, digest in drafts.items():
        assert digest == case.alone(name, tmp_path / name, monkeypatch)


def test_a_killed_experiment_goes_on_where_it_was(case: Case) -> None:
    first, back, second = commands("experiments.md", "A killed experiment")
    branch = case.run("git branch --show-current").strip()
    before = case.training_runs()
    process = case.start(first)
    wait_until(lambda: any(list(run.glob("step-????????/complete.json")) for run in case.training_runs() - before))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not case.run("git branch --show-current").strip()
    case.run(back.replace("main", branch))
    told = case.run(second)
    assert re.search(r"found this run at step \d+ of", told), told
    assert len(case.training_runs() - before) == 1
    assert case.run("git branch --show-current").strip() == branch


def test_an_experiment_reaches_a_clone_and_nothing_runs_there(case: Case) -> None:
    git_push, push, listing, pull, apply = commands("experiments.md", "Experiments to others")
    if "rate-2" not in case.experiments():
        case.run("dvc exp run --temp --name rate-2 -S train.learning_rate=0.002")
    case.run(git_push)
    case.run(push)
    # beside it, so that its default remote is the same folder
    clone = Case(Project.clone(case.folder.with_name("origin.git"), case.folder.with_name("clone")))
    assert "rate-2" in clone.run(listing)
    clone.run(pull)
    clone.run(apply)
    assert digest_file(clone.folder / WEIGHTS) == case.weights("rate-2")
    assert "Running stage" not in clone.run("dvc repro")
    assert not clone.training_runs()


def test_settings_arrive_with_their_types(case: Case) -> None:
    wanted = {
        "train.learning_rate": ("0.00001", 1e-5),
        "train.weight_decay": ("1e-5", 1e-5),
        "train.freeze_lm_head": ("false", False),
        "verifier.revision": ("'12e4'", "12e4"),
        "evaluate.num_speculative_tokens": ("[3,5]", [3, 5]),
    }
    settings = " ".join(f'-S "{name}={text}"' for name, (text, _) in wanted.items())
    case.run(f"dvc exp run --temp --name typed {settings} check")
    params = case.params("typed")
    for name, (_, value) in wanted.items():
        section, key = name.split(".")
        assert getattr(getattr(params, section), key) == value


def test_what_experiments_need_survives_the_cleaning_of_the_disk(case: Case) -> None:
    if not case.experiments():
        case.run("dvc exp run --temp --name rate-2 -S train.learning_rate=0.002")
    before = {name: case.weights(name) for name in case.experiments()}
    for command in commands("experiments.md", "Disk"):
        case.run(f"echo y | {command}")
    assert {name: case.weights(name) for name in case.experiments()} == before
    assert "up to date" in case.run("dvc status")
