"""The pipeline as its users run it: DVC on a project of its own, real vLLM, a tiny verifier."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.project import ROOT, Project
from eagle3.digests import digest_file
from tests.page import commands
from tests.remote_servers import Server, rclone_s3

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {
    "verifier.dtype": "float32",
    "verifier.max_model_len": 256,
    "engine.cpu_kv_cache_gib": 0.25,
    "prompts.validation_share": 0.1,
    "prompts.evaluation_share": 0.15,
    "generate.max_new_tokens": 24,
    "extract.shard_min_mib": 0.05,
    "extract.shard_max_mib": 0.5,
    "train.epochs": 1,
    "train.validations": 2,
    "evaluate.num_prompts": 3,
    "evaluate.max_new_tokens": 24,
    "evaluate.lossless_prompts": 0,
}
STARTER = {"path": "data/prompts/mine.jsonl", "name": "mine"}
FROM_GENERATE = {"generate", "reconstruct-tokens", "extract", "train", "evaluate"}


def dvc(project: Project, *words: str, fails: bool = False) -> str:
    """Run dvc in the project; returns all that it printed."""
    done = subprocess.run(
        ["dvc", *words],
        cwd=project.folder,
        env=project.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert (done.returncode != 0) == fails, done.stdout
    return done.stdout


def shell(project: Project, command: str) -> str:
    """Run a line of a page in the project; returns what it printed to standard output."""
    return output(project, "bash", "-c", command)


def eagle3(project: Project, *words: str) -> str:
    """Run the eagle3 command in the project; returns what it printed to standard output."""
    return output(project, sys.executable, "-m", "eagle3.cli", *words)


def output(project: Project, *command: str) -> str:
    """What a command that succeeds prints to standard output."""
    environment = project.environment()
    done = subprocess.run(command, cwd=project.folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ran(printed: str) -> set[str]:
    """Stages that ran, without the two that look at params.yaml and at the verifier every time."""
    return set(re.findall(r"Running stage '([\w-]+)'", printed)) - {"check", "verifier"}


def outs(project: Project) -> dict[str, str]:
    """Digest of every file below data/ that DVC tracks."""
    tracked = ["responses", "tokens", "hidden_states", "draft", "evaluation"]
    paths = [path for name in tracked for path in (project.folder / "data" / name).rglob("*") if path.is_file()]
    paths += [*(project.folder / "data/prompts").glob("*.parquet"), project.folder / "data/verifier.json"]
    return {str(path.relative_to(project.folder)): digest_file(path) for path in paths}


@pytest.fixture(scope="module")
def project(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose pipeline has run once."""
    made = Project(tmp_path_factory.mktemp("dvc") / "project")
    lines = (ROOT / "data/prompts/starter.jsonl").read_text().splitlines()[:60]
    (made.folder / "data/prompts").mkdir(parents=True)
    (made.folder / STARTER["path"]).write_text("\n".join(line for line in lines if len(line) < 200) + "\n")
    made.edit([STARTER], {"verifier.model": str(tiny_verifier), **SETTINGS})
    printed = dvc(made, "repro")
    assert ran(printed) == FROM_GENERATE | {"prompts"}
    made.commit("first run")
    return made


def test_every_stage_accounts_for_its_rows(project: Project) -> None:
    prompts, answered = project.metrics("prompts"), project.metrics("generate")
    assert prompts["rows_in"] == prompts["rows_out"] + sum(prompts["rows_rejected"].values())
    assert answered["rows_in"] == prompts["splits"]["train"] + prompts["splits"]["validation"]
    assert answered["rows_out"] == project.metrics("reconstruct_tokens")["rows_in"]
    assert project.metrics("reconstruct_tokens")["rows_out"] == project.metrics("extract")["rows_in"]
    assert project.metrics("extract")["rows_out"] == project.metrics("train")["rows_in"]
    assert project.metrics("extract")["head_agreement"] >= 0.97
    assert project.metrics("evaluate")["num_prompts"] == 3
    eagle3(project, "verify")


def test_an_evaluation_explains_itself_and_is_no_better_than_itself(project: Project) -> None:
    """The draft that is served proposes what the trained one does; the page has all parts; compared with its commit."""
    numbers = project.metrics("evaluate")
    assert numbers["estimate"]["steps"] > 20
    assert numbers["estimate"]["equal_steps"] >= 0.97  # float32
    assert numbers["best_by_batch_size"].keys() <= {"1", "4", "16"}
    assert (project.folder / "data/evaluation/report.html").stat().st_size > 20_000
    eagle3(project, "report", "--against", "HEAD")
    page = (project.folder / "report.html").read_text()
    assert all(f'<h2 id="{part}">' in page for part in ("speed", "where", "comparison", "training", "data", "lineage"))
    told = eagle3(project, "compare", ".", "HEAD")
    (overall,) = [line for line in told.splitlines() if line.startswith("  all prompts")]
    assert overall.split()[-2:] == ["not", "distinguishable"]
    assert "that differ" not in told


def test_a_second_repro_does_nothing_and_is_quick(project: Project) -> None:
    start = time.monotonic()
    assert ran(dvc(project, "repro")) == set()
    assert time.monotonic() - start < 20  # 10 s on an idle machine; this one may be busy
    assert project.changed_files() == []


def test_an_experiment_reruns_only_what_reads_the_setting(project: Project) -> None:
    printed = dvc(project, "exp", "run", "--name", "slower", "-S", "train.learning_rate=5e-4", "train")
    assert ran(printed) == {"train"}
    assert "learning_rate: 0.0005" in (project.folder / "params.yaml").read_text()


def test_a_draft_of_a_revision_or_an_experiment_is_proven(project: Project) -> None:
    """Of what the workspace has not checked out, and of an experiment that ran in a folder of its own."""
    project.restore()
    dvc(project, "exp", "run", "--temp", "--name", "apart", "-S", "train.learning_rate=2e-4", "train")
    for name, rate in (("HEAD", None), ("slower", 0.0005), ("apart", 0.0002)):
        found = json.loads(eagle3(project, "lineage", name, "--check", "--json"))
        assert {link["status"] for link in found["links"]} == {"proven", "agrees"}, found["links"]
        lineage = found["lineage"]
        assert rate is None or lineage["train"]["learning_rate"] == rate
        assert set(lineage["origin"]["stages"]) == {"extract", "reconstruct-tokens", "generate", "prompts", "verifier"}
    dvc(project, "push")
    assert "objects are there" in eagle3(project, "lineage", "HEAD", "--remote")


@pytest.mark.exhaustive
def test_a_setting_of_generate_reruns_from_there(project: Project) -> None:
    project.restore()
    assert ran(dvc(project, "exp", "run", "-S", "generate.max_new_tokens=20", "train")) == FROM_GENERATE - {"evaluate"}
    assert project.metrics("reconstruct_tokens")["loss_tokens"] <= 20 * project.metrics("generate")["rows_out"]


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("trian.learning_rate=1", "trian"),
        ("+train.lrr=1", "train.lrr"),
        ("train.learning_rate=fast", "train.learning_rate"),
    ],
)
def test_a_mistyped_setting_fails_at_once(project: Project, setting: str, told: str) -> None:
    project.restore()
    start = time.monotonic()
    assert told in dvc(project, "exp", "run", "-S", setting, fails=True)
    assert time.monotonic() - start < 20
    project.restore()


def test_push_and_pull_give_identical_bytes(project: Project) -> None:
    project.restore()
    dvc(project, "checkout", "--force")
    before = outs(project)
    assert len(before) > 12
    dvc(project, "push")
    shutil.rmtree(project.folder / ".dvc/cache")
    for name in ("responses", "tokens", "hidden_states", "draft", "evaluation"):
        shutil.rmtree(project.folder / "data" / name)
    dvc(project, "pull")
    assert outs(project) == before
    eagle3(project, "verify")
    assert ran(dvc(project, "repro")) == set()


@pytest.mark.exhaustive
def test_an_evaluation_that_was_killed_goes_on(project: Project) -> None:
    """kill -9 of dvc, stage and all; what was decoded is not decoded again, and nothing stays behind at the end."""
    project.restore()
    branch = output(project, "git", "branch", "--show-current").strip()
    settings = ("-S", "evaluate.num_prompts=8", "-S", "evaluate.max_new_tokens=48", "-S", "evaluate.batch_size=1")
    kept = project.folder / ".work/evaluate"
    command = ["dvc", "exp", "run", *settings, "evaluate"]
    with subprocess.Popen(command, cwd=project.folder, env=project.environment(), start_new_session=True) as killed:
        deadline = time.monotonic() + 300
        while sum(log.stat().st_size for log in kept.glob("*/decoded.sqlite-wal")) < 30_000:
            assert killed.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(killed.pid, signal.SIGKILL)
    project.run("git", "switch", "--quiet", "--force", branch)  # DVC leaves git without one (docs/experiments.md)
    ((kept_answers, total),) = re.findall(r"(\d+) of (\d+) answers are kept from a run", dvc(project, *command[1:]))
    assert 0 < int(kept_answers) < int(total) == 2 * project.metrics("evaluate")["num_prompts"]
    assert [path for path in kept.iterdir() if path.is_dir()] == []
    project.restore()


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with rclone_s3(tmp_path_factory.mktemp("s3") / "server") as server:
        yield server


@pytest.mark.exhaustive
def test_the_whole_story_on_s3(project: Project, s3: Server, tmp_path: Path) -> None:
    """Pushed, cloned elsewhere, pulled, trained and served anew there, pushed, pulled back, compared."""
    project.restore()
    dvc(project, "checkout", "--force")
    before = outs(project)
    origin = tmp_path / "origin.git"
    project.run("git", "init", "--quiet", "--bare", str(origin))
    project.run("git", "remote", "add", "origin", str(origin))
    dvc(project, "remote", "add", "--default", "s3", s3.settings["url"])
    dvc(project, "remote", "modify", "s3", "endpointurl", s3.settings["endpointurl"])
    project.commit("data lies on S3")
    log_in(project, s3)
    dvc(project, "push")
    project.run("git", "push", "--quiet", "origin", "HEAD")

    clone = Project.clone(origin, tmp_path / "elsewhere" / "clone")
    log_in(clone, s3)
    before_data = [shell(clone, command) for command in commands("experiments.md", "CI")]
    assert re.findall(r"Running stage '([\w-]+)'", before_data[0]) == ["verifier"]
    assert not (clone.folder / "data/draft").exists()
    dvc(clone, "pull")
    assert outs(clone) == before
    assert ran(dvc(clone, "repro")) == set()
    settings = ["-S", "train.learning_rate=5e-4", "-S", "evaluate.estimate_prompts=0"]
    assert ran(dvc(clone, "exp", "run", "--name", "tried-there", *settings)) == {"train", "evaluate"}
    dvc(clone, "exp", "push", "origin", "tried-there")

    assert "tried-there" not in dvc(project, "exp", "list")
    dvc(project, "exp", "pull", "origin", "tried-there")
    assert outs(project) == before  # the workspace stays as it was
    told = eagle3(project, "compare", "HEAD", "tried-there")
    assert re.search(r"train\.learning_rate.*0\.0005", told)
    columns = dvc(project, *shlex.split(commands("experiments.md", "One experiment")[1])[1:], "--csv").split("\n")[0]
    assert {"speedup", "validation_loss", "train.learning_rate"} <= set(columns.split(","))  # only what differs
    assert len(columns.split(",")) < 22
    eagle3(project, "lineage", "tried-there", "--check")
    eagle3(project, "verify", "--remote", "--read")
    dvc(project, "exp", "apply", "tried-there")
    assert outs(project) == outs(clone)
    eagle3(project, "verify")
    assert ran(dvc(project, "repro")) == set()
    project.restore()
    dvc(project, "checkout", "--force")


def log_in(project: Project, s3: Server) -> None:
    """Credentials, which git never sees."""
    for name in ("access_key_id", "secret_access_key"):
        dvc(project, "remote", "modify", "--local", "s3", name, s3.settings[name])


def test_a_failing_stage_leaves_git_clean_of_outs(project: Project) -> None:
    project.restore()
    dvc(
        project, "exp", "run", "-S", "extract.min_head_agreement=1.0", "-S", "verifier.model=nowhere/at-all", fails=True
    )
    assert not [name for name in project.changed_files() if name not in {"params.yaml", "dvc.lock"}]
    project.restore()
