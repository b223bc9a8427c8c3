"""DVC as its users meet it: untracked files, temporary runs, merges. Stages check, prompts, extract; a fake engine."""

import re
import shlex
import subprocess
import tempfile
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from benchmarks.project import Project
from tests.dvc_project import experiments
from tests.extract_runs import contents, make_rows, prepare
from tests.page import commands
from tests.stage_runs import wait_until
from tests.test_extract import FAKE, IDENTITY
from tests.token_tables import PROJECT

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

KEPT = ("check", "prompts", "extract")
REPRO = ("repro", "prompts", "extract")
GIVEN = ("data/tokens", "data/verifier.json")
SETTINGS = {
    "verifier.dtype": "float32",
    "verifier.max_model_len": 256,
    "verifier.aux_layer_ids": list(IDENTITY.aux_layer_ids),
    "extract.shard_min_mib": 0.2,
    "extract.shard_max_mib": 0.6,
}
MINE = {"path": "data/prompts/mine.jsonl", "name": "mine"}


class Case:
    """A project whose pipeline has run and is committed."""

    def __init__(self, folder: Path):
        self.project, self.requests = Project(folder / "project"), folder / "requests.log"
        self.folder = self.project.folder
        with pytest.MonkeyPatch.context() as monkeypatch:
            inputs = folder / "inputs"
            inputs.mkdir()
            run = prepare(inputs, monkeypatch, make_rows(40))
        (self.folder / "data/prompts").mkdir(parents=True)
        (self.folder / MINE["path"]).write_text("".join(f'{{"prompt": "question {n}"}}\n' for n in range(50)))
        for name in GIVEN:
            (run.folder / Path(name).name).rename(self.folder / name)
        code = self.folder / "eagle3/serving/recorder.py"
        code.write_text(code.read_text().replace('"eagle3.serving.connector:run_engine"', f'"{FAKE}"'))
        yaml = YAML()
        pipeline = yaml.load((self.folder / "dvc.yaml").read_text())
        stages = {name: pipeline["stages"][name] for name in (*KEPT, "train")}  # `check` looks at train's deps
        with (self.folder / "dvc.yaml").open("w") as file:
            yaml.dump({"stages": stages}, file)
        self.project.edit([MINE], SETTINGS | {"verifier.model": str(run.folder / "verifier")})
        self.dvc("add", *GIVEN)
        assert self.ran(self.dvc(*REPRO)) == set(KEPT)
        self.project.commit("first run")

    def dvc(self, *words: str, fails: bool = False) -> str:
        """Run dvc; returns all that it printed (by a file: the workers of a queue keep a pipe open)."""
        environment = self.project.environment() | {
            "EAGLE3_FAKE_REQUESTS": str(self.requests),
            "PYTHONPATH": str(PROJECT),
        }
        with tempfile.TemporaryFile("w+") as said:
            done = subprocess.run(
                ["dvc", *words], cwd=self.folder, env=environment, stdout=said, stderr=said, check=False
            )
            said.seek(0)
            told = said.read()
        assert (done.returncode != 0) == fails, told
        return told

    def ran(self, printed: str) -> set[str]:
        return set(re.findall(r"Running stage '([\w-]+)'", printed))

    def states_of(self, name: str) -> str:
        """DVC's digest of the states of an experiment or a revision."""
        words = ["git", "show", f"{experiments(self.folder).get(name, name)}:dvc.lock"]
        lock = subprocess.run(words, cwd=self.folder, capture_output=True, text=True, check=True).stdout
        [out] = [
            out for out in YAML(typ="safe").load(lock)["stages"]["extract"]["outs"] if out["path"].endswith("states")
        ]
        return str(out["md5"])

    def set(self, section: str, key: str, value: object) -> None:
        yaml = YAML()
        params = yaml.load((self.folder / "params.yaml").read_text())
        params[section][key] = value
        with (self.folder / "params.yaml").open("w") as file:
            yaml.dump(params, file)

    def git(self, *words: str, fails: bool = False) -> None:
        done = subprocess.run(["git", *words], cwd=self.folder, capture_output=True, text=True, check=False)
        assert (done.returncode != 0) == fails, done.stdout + done.stderr

    def disk(self) -> int:
        """Bytes of all files, each counted once however many names it has."""
        states = (path.stat() for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink())
        return sum({(state.st_dev, state.st_ino): state.st_size for state in states}.values())


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.delenv("EAGLE3_WORK_DIR", raising=False)
        return Case(tmp_path_factory.mktemp("cases"))


@pytest.fixture(autouse=True)
def store_of_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EAGLE3_WORK_DIR", raising=False)


def test_d05_a_temporary_run_shares_store_and_cache(case: Case) -> None:
    """It reruns what its setting belongs to, records nothing again, and takes no disk for the states."""
    before, states = case.disk(), contents(case.folder / "data/hidden_states")
    size = sum(path.stat().st_size for path in (case.folder / "data/hidden_states").iterdir())
    case.requests.unlink()
    printed = case.dvc("exp", "run", "--temp", "-S", "extract.min_head_agreement=0.9", "extract")
    assert "Running stage 'extract'" in printed and "Running stage 'prompts'" not in printed
    assert not case.requests.exists()
    assert case.disk() - before < size / 4
    assert contents(case.folder / "data/hidden_states") == states
    assert not list((case.folder / ".dvc/tmp/exps").glob("tmp*"))


def test_queued_runs_take_turns_at_the_engine_and_record_nothing_twice(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers, two experiments that need the same new states: one records, the other waits and finds them."""
    case.requests.unlink(missing_ok=True)
    settings = ["-S", "extract.shard_max_mib=0.3", "-S", "extract.min_head_agreement=0.9,0.91"]
    case.dvc("exp", "run", "--queue", "--name", "apart", *settings, "extract")
    monkeypatch.setenv("EAGLE3_FAKE", '{"seconds_each": 0.1}')
    case.dvc("queue", "start", "-j", "2")
    wait_until(lambda: {"apart-1", "apart-2"} <= experiments(case.folder).keys(), 120)
    case.dvc("queue", "stop", "--kill")
    recorded = case.requests.read_text().split()
    assert 0 < len(recorded) == len(set(recorded))
    logs = "".join(case.dvc("queue", "logs", name) for name in ("apart-1", "apart-2"))
    assert logs.count("waiting for it") == 1
    assert case.states_of("apart-1") == case.states_of("apart-2") != case.states_of("HEAD")


def test_d04_a_prompt_file_that_git_does_not_track_is_named(case: Case) -> None:
    """A temporary run starts from what git tracks, and says so when a prompt file is missing there."""
    new = {"path": "data/prompts/new.jsonl", "name": "new"}
    case.project.edit([MINE, new], {})
    (case.folder / new["path"]).write_text('{"prompt": "another question"}\n')
    printed = case.dvc("exp", "run", "--temp", "check", fails=True)
    assert f"{new['path']} (named new) is not a file here; if it is new, `git add` it" in printed
    case.project.commit("with the file")
    case.dvc("exp", "run", "--temp", "check")
    case.git("reset", "--hard", "--quiet", "HEAD~2")


def test_d14_a_conflict_in_the_lock_is_resolved_without_new_work(case: Case) -> None:
    """Two branches changed different stages. By the recipe of docs/experiments.md all comes from the cache."""
    resolve, _, finish = commands("experiments.md", "Merging two branches")
    base = subprocess.run(
        ["git", "branch", "--show-current"], cwd=case.folder, capture_output=True, text=True, check=True
    ).stdout.strip()
    for branch, section, key, value in (
        ("one", "prompts", "max_characters", 5000),
        ("two", "extract", "agreement_samples", 8),
    ):
        case.git("checkout", "--quiet", "-b", branch, base)
        case.dvc("checkout", *REPRO[1:])
        case.set(section, key, value)
        assert case.ran(case.dvc(*REPRO)) == {"check", section}
        case.project.commit(branch)
    states = contents(case.folder / "data/hidden_states")
    case.requests.unlink(missing_ok=True)
    case.git("merge", "one", fails=True)
    assert "<<<<<<<" in (case.folder / "dvc.lock").read_text()
    assert "dvc.lock" in case.dvc(*REPRO, fails=True)
    case.git(*shlex.split(resolve)[1:])
    printed = case.dvc(*REPRO)
    assert case.ran(printed) == {"check"}
    assert not case.requests.exists()
    assert contents(case.folder / "data/hidden_states") == states
    case.git(*shlex.split(finish)[1:])
    assert "<<<<<<<" not in (case.folder / "dvc.lock").read_text()
    assert case.ran(case.dvc(*REPRO)) == set()


def test_d15_a_changed_source_of_an_imported_file_arrives_with_dvc_update(case: Case, tmp_path: Path) -> None:
    source, imported = tmp_path / "source.jsonl", {"path": "data/prompts/imported.jsonl", "name": "imported"}
    source.write_text('{"prompt": "as it was"}\n')
    case.dvc("import-url", str(source), imported["path"])
    case.project.edit([MINE, imported], {})
    assert case.ran(case.dvc("repro", "prompts")) == {"check", "prompts"}
    source.write_text('{"prompt": "as it is"}\n')
    assert case.ran(case.dvc("repro", "prompts")) == set()
    case.dvc("update", f"{imported['path']}.dvc")
    assert case.ran(case.dvc("repro", "prompts")) == {"prompts"}
    assert "as it is" in (case.folder / imported["path"]).read_text()
