"""`eagle3 work du` and `eagle3 work gc`: what a stage would need again stays, the rest goes, nothing runs meanwhile."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle3.serving import recorder
from tests.dvc_project import eagle3, write_verifier
from tests.test_extract import FAKE, Run, make_row
from tests.token_tables import PROJECT, write_params

OLD = 30 * 86400


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The stage `extract` in data/ of a project."""
    model = write_verifier(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for folder in (tmp_path, tmp_path / "data"):
        write_params(folder / "params.yaml", model, extract__shard_min_mib=0.2, extract__shard_max_mib=0.6)
    shutil.copytree(model, tmp_path / "data" / "verifier")
    monkeypatch.setenv("EAGLE3_WORK_DIR", str(tmp_path / "data" / "work"))
    monkeypatch.setenv("EAGLE3_FAKE_REQUESTS", str(tmp_path / "data" / "requests.log"))
    monkeypatch.setattr(recorder, "ENGINE", FAKE)
    return Run(tmp_path / "data", monkeypatch)


def age(folder: Path) -> None:
    """Let a month pass."""
    for path in folder.rglob("*"):
        if path.is_file():
            when = path.stat().st_mtime - OLD
            os.utime(path, (when, when))


def free() -> int:
    return sum(path.stat().st_size // path.stat().st_nlink for path in Path("data").rglob("*") if path.is_file())


def make_rows(seed: int, count: int = 40) -> list[dict[str, object]]:
    choice = random.Random(seed)
    return [make_row(choice) for _ in range(count)]


def test_what_a_stage_needs_stays_and_the_rest_is_freed(run: Run) -> None:
    old, new = make_rows(1), make_rows(2)
    run.extract(old)
    dropped = set(run.shards())
    run.extract([*old[:15], *new])
    kept = {path.name for path in run.out.glob("*.safetensors")}
    age(run.work)
    told = eagle3("work", "gc")
    assert told.exit_code == 0, told.output
    assert set(run.shards()) == dropped | kept  # only told
    before = free()
    done = eagle3("work", "gc", "--yes")
    assert done.exit_code == 0, done.output
    assert set(run.shards()) == kept
    freed = int(done.stdout.split(" bytes freed")[0].split()[-1].replace(",", ""))
    assert before - free() == freed > 0
    assert f"{freed:,} bytes would be freed; --yes removes them" in told.stdout
    assert {path.stem for path in run.work.glob("*.json")} == {name.split(".")[0] for name in kept}
    run.requests()
    metrics = run.extract([*old[:15], *new])
    assert run.requests() == []
    assert metrics["shards_reused"] == metrics["shards"]


def test_shards_that_the_next_run_needs_stay_before_there_is_an_out(run: Run) -> None:
    rows = make_rows(1)
    run.extract(rows)
    shutil.rmtree(run.out)
    age(run.work)
    before = run.shards()
    assert "0 unused, 0 bytes freed" in eagle3("work", "gc", "--yes").stdout
    assert run.shards() == before


@pytest.mark.parametrize("gone", ["tokens", "verifier.json", "tokens/index.parquet"])
def test_nothing_goes_while_it_cannot_be_told_what_is_needed(run: Run, gone: str) -> None:
    run.extract(make_rows(1))
    run.extract(make_rows(2))
    age(run.work)
    path = run.folder / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = run.shards()
    assert "0 unused" in eagle3("work", "gc", "--yes").stdout
    assert run.shards() == before
    assert "what is needed cannot be told" in eagle3("work", "du").stdout


def test_young_shards_stay(run: Run) -> None:
    run.extract(make_rows(1))
    run.extract(make_rows(2))
    before = run.shards()
    assert "0 unused" in eagle3("work", "gc", "--yes").stdout
    assert run.shards() == before
    assert "0 unused" not in eagle3("work", "gc", "--older-than", "0").stdout


def test_shards_from_the_future_are_young(run: Run) -> None:
    """The clock was set back since: what seems to be written tomorrow is not a month old."""
    run.extract(make_rows(1))
    run.extract(make_rows(2))
    for path in run.work.iterdir():
        os.utime(path, (time.time() + OLD, time.time() + OLD))
    assert "0 unused" in eagle3("work", "gc", "--yes").stdout


def test_what_the_cache_shares_is_not_counted_as_freed(run: Run) -> None:
    run.extract(make_rows(1))
    shutil.copytree(run.out, "cache", copy_function=os.link)
    run.extract(make_rows(2))
    age(run.work)
    before = run.shards()
    done = eagle3("work", "gc", "--yes")
    assert "0 unused, 0 bytes freed" in done.stdout
    assert "are not needed, but DVC's cache or an out has the same files: `dvc gc` comes first" in done.stdout
    assert run.shards() == before
    shutil.rmtree("cache")
    assert "0 unused" not in eagle3("work", "gc", "--yes").stdout
    assert set(run.shards()) == {path.name for path in run.out.glob("*.safetensors")}


def test_what_a_killed_stage_left_goes(run: Run) -> None:
    run.extract(make_rows(1))
    stray = run.work / "abc.partial"
    stray.write_bytes(bytes(1000))
    lonely = run.work / f"{'a' * 64}.json"
    lonely.write_text("{}")
    age(run.work)
    done = eagle3("work", "gc", "--yes")
    assert "2 unused, 1,002 bytes freed" in done.stdout
    assert not stray.exists()
    assert not lonely.exists()


@pytest.mark.parametrize("stage", ["generate", "extract", "train", "train/a-run-of-an-experiment"])
def test_a_running_stage_blocks_gc(run: Run, stage: str) -> None:
    run.extract(make_rows(1))
    run.extract(make_rows(2))
    age(run.work)
    before = run.shards()
    hold = "from eagle3.workstore import work_folder\nimport time\n"
    hold += f"with work_folder({stage!r}):\n print('held', flush=True)\n time.sleep(600)"
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, env=environment) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        done = eagle3("work", "gc", "--yes")
        assert done.exit_code == 1
        assert f"is in use by process {holder.pid}" in done.stderr
        assert run.shards() == before
        assert eagle3("work", "du").exit_code == 0
        holder.kill()
    assert eagle3("work", "gc", "--yes").exit_code == 0
    assert run.shards() != before


def make_training_run(folder: Path, days: float, *, finished: bool) -> Path:
    step = folder / "step-00000010"
    step.mkdir(parents=True)
    (step / "weights.safetensors").write_bytes(bytes(1000))
    (step / "state.json").write_text(json.dumps({"finished": finished}))
    for path in step.iterdir():
        os.utime(path, (time.time() - days * 86400,) * 2)
    return folder


def test_runs_of_training(run: Run) -> None:
    train = run.folder / "work" / "train"
    expected = {
        make_training_run(train / "oldest", 40, finished=True): False,
        make_training_run(train / "newest", 20, finished=True): True,
        make_training_run(train / "old", 30, finished=True): False,
        make_training_run(train / "unfinished", 60, finished=False): True,
        make_training_run(train / "young", 1, finished=False): True,
    }
    shown = eagle3("work", "du").stdout
    assert "not finished; remove it by hand if it will not go on" in shown
    assert eagle3("work", "gc", "--yes").exit_code == 0
    assert {folder: folder.exists() for folder in expected} == expected


def test_answers_logs_and_foreign_folders_are_never_touched(run: Run) -> None:
    work = run.folder / "work"
    for name in ("generate/responses.sqlite", "logs/extract.log", "benchmarks/a/b", "verifiers/other-1/config.json"):
        (work / name).parent.mkdir(parents=True)
        (work / name).write_text("x")
    age(work)
    assert "1 unused, 1 bytes freed" in eagle3("work", "gc", "--yes").stdout
    left = {str(path.relative_to(work)) for path in work.rglob("*") if path.is_file() and path.name != "lock"}
    assert left == {"generate/responses.sqlite", "logs/extract.log", "benchmarks/a/b"}


def test_du_adds_up(run: Run) -> None:
    run.extract(make_rows(1))
    shown = eagle3("work", "du").stdout.splitlines()
    assert shown[0].split()[:4] == ["stage", "what", "number", "files"]
    everything = shown[-1].split()
    files = [path for path in (run.folder / "work").rglob("*") if path.is_file() and path.name != "lock"]
    assert everything[0] == "all"
    assert int(everything[2].replace(",", "")) == len(files)
    assert int(everything[3].replace(",", "")) == sum(path.stat().st_size for path in files)


def test_an_empty_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(PROJECT / "params.yaml", "params.yaml")
    assert eagle3("work", "du").exit_code == 0
    assert "0 unused, 0 bytes freed" in eagle3("work", "gc", "--yes").stdout
