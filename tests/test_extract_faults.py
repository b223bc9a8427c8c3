"""What may happen to `extract`: damage, clocks, a second stage, kills at every step, a stopped engine.

Each time the out is, in the end, byte for byte that of a calm run, and nothing that was finished is recorded again.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from eagle3 import hidden_states
from eagle3.digests import digest_file
from eagle3.serving import process as engine_process
from eagle3.shards import open_shard
from eagle3.tables import Row
from stages.extract import extract
from tests.dvc_project import eagle3
from tests.extract_runs import (
    SIZES,
    asked,
    contents,
    die,
    engines,
    enter,
    finish,
    make_rows,
    names_by_ids,
    prepare,
    start,
)
from tests.stage_runs import wait_until
from tests.test_extract import FAKE, Run
from tests.token_tables import PROJECT, write_params

YEAR_2100 = 4_102_444_800


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return make_rows()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, rows: list[Row]) -> Path:
    """The folder of a calm run that has ended."""
    folder = tmp_path_factory.mktemp("calm") / "project"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as monkeypatch:
        run = prepare(folder, monkeypatch, rows)
        finish(run)
        run.requests()
    return folder


@pytest.fixture(scope="module")
def calm(template: Path) -> dict[str, str]:
    """The digests of what the calm run made."""
    return contents(template / "hidden_states")


@pytest.fixture
def ended(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A copy of the calm run: hard links are hard links, times are the same."""
    subprocess.run(["cp", "--archive", str(template), str(tmp_path / "project")], check=True)
    write_params(tmp_path / "project/params.yaml", tmp_path / "project/verifier", **SIZES)
    return enter(tmp_path / "project", monkeypatch)


@pytest.fixture
def fresh(ended: Run) -> Run:
    """The same before anything ran."""
    shutil.rmtree(ended.out)
    shutil.rmtree(ended.folder / "work")
    return ended


def said(run: Run, log: str = "stage.log") -> str:
    return (run.folder / log).read_text()


def two_shards(run: Run) -> tuple[Path, Path]:
    one, two, *_ = sorted(run.work.glob("*.safetensors"))
    return one, two


def flip(path: Path, place: int, *, keep_time: bool) -> None:
    """Change one bit in place, so in all names that the file has."""
    state = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(place, os.SEEK_SET if place >= 0 else os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    if keep_time:
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def swap(one: Path, two: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    two.rename(one)
    aside.rename(two)


def cut(run: Run) -> set[str]:
    one, _ = two_shards(run)
    os.truncate(one, one.stat().st_size * 6 // 10)
    return {one.name}


def emptied(run: Run) -> set[str]:
    one, _ = two_shards(run)
    one.unlink()
    one.touch()
    return {one.name}


def flipped(run: Run) -> set[str]:
    one, _ = two_shards(run)
    flip(one, -5000, keep_time=False)
    return {one.name}


def flipped_key(run: Run) -> set[str]:
    """A bit of the header, and no time of modification tells."""
    one, _ = two_shards(run)
    flip(one, one.read_bytes().index(one.stem.encode()) + 5, keep_time=True)
    return {one.name}


def renamed(run: Run) -> set[str]:
    one, _ = two_shards(run)
    one.rename(one.with_name(f"{'0' * 64}.safetensors"))
    return {one.name}


def swapped(run: Run) -> set[str]:
    one, two = two_shards(run)
    swap(one, two)
    return {one.name, two.name}


def swapped_with_their_facts(run: Run) -> set[str]:
    one, two = two_shards(run)
    swap(one, two)
    swap(one.with_suffix(".json"), two.with_suffix(".json"))
    return {one.name, two.name}


def replaced_by_a_foreign_file(run: Run) -> set[str]:
    one, _ = two_shards(run)
    state = one.stat()
    one.unlink()
    one.write_bytes((b"PAR1" * state.st_size)[: state.st_size])
    os.utime(one, ns=(state.st_atime_ns, state.st_mtime_ns))
    return {one.name}


def without_facts(run: Run) -> set[str]:
    one, two = two_shards(run)
    one.with_suffix(".json").unlink()
    two.with_suffix(".json").write_text('{"sha256": 7')
    return {one.name, two.name}


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        emptied,
        flipped,
        flipped_key,
        renamed,
        swapped,
        swapped_with_their_facts,
        replaced_by_a_foreign_file,
        without_facts,
    ],
)
def test_damage_in_the_store_is_redone_and_nothing_else(
    ended: Run, rows: list[Row], calm: dict[str, str], damage: Callable[[Run], set[str]]
) -> None:
    shard_of, before = names_by_ids(ended, rows), ended.shards()
    victims = damage(ended)
    finish(ended)
    assert {shard_of[ids] for ids in ended.requests()} == victims
    assert contents(ended.out) == calm
    after = ended.shards()
    assert {name: after[name] for name in before.keys() - victims} == {
        name: time_ns for name, time_ns in before.items() if name not in victims
    }


@pytest.mark.parametrize("when", [0, YEAR_2100])
def test_a_clock_that_jumped_costs_a_look_and_nothing_more(ended: Run, calm: dict[str, str], when: int) -> None:
    """Files of 1970 or of the next century are compared by digest: whole ones stay, damaged ones are redone."""
    for path in ended.work.iterdir():
        os.utime(path, (when, when))
    before = ended.shards()
    assert finish(ended)["shards_reused"] == len(before)
    assert (ended.requests(), ended.shards(), contents(ended.out)) == ([], before, calm)
    one, _ = two_shards(ended)
    flip(one, -5000, keep_time=True)
    assert finish(ended)["shards_reused"] == len(before) - 1
    assert contents(ended.out) == calm


def test_a_flipped_bit_under_an_unchanged_time_is_found_by_verify(
    ended: Run, calm: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here `extract` reads no states; but the index has the true digest, so the damage never passes for the truth."""
    one, _ = two_shards(ended)
    flip(one, -5000, keep_time=True)
    finish(ended)
    assert ended.requests() == []
    told = {entry["shard"]: entry["shard_sha256"] for entry in ended.index()}
    assert told == {name: digest for name, digest in calm.items() if name.endswith(".safetensors")}
    assert digest_file(ended.out / one.name) != calm[one.name]
    monkeypatch.chdir(ended.folder)
    done = eagle3("verify", "hidden_states")
    assert done.exit_code == 1
    assert done.stdout.startswith(f"hidden_states/{one.name}: its bytes differ from its sha256 in hidden_states/index")
    one.unlink()  # what the remedy says
    finish(ended)
    assert contents(ended.out) == calm


@pytest.mark.parametrize("step", ["check_shard", "_fsync", "digest_file", "write_file", "replace", "after replace"])
def test_killed_at_each_step_of_finishing_a_shard(fresh: Run, rows: list[Row], calm: dict[str, str], step: str) -> None:
    """Finished means: under its final name. Up to there the shard is recorded again, and from there never."""

    def before() -> None:
        owner: object = Path if "replace" in step else hidden_states
        name = step.removeprefix("after ")
        original, calls = getattr(owner, name), []

        def second_is_fatal(*arguments: object) -> object:
            mine = "replace" not in step or str(arguments[0]).endswith(".partial")
            calls.append(mine)
            if calls.count(True) == 2 and mine and step == name:
                die()
            result = original(*arguments)
            if calls.count(True) == 2 and mine:
                die()
            return result

        setattr(owner, name, second_is_fatal)

    process = start(fresh, before=before)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    kept = fresh.shards()
    assert len(kept) == (2 if step == "after replace" else 1)
    assert not fresh.out.exists()
    fresh.requests()
    assert finish(fresh)["shards_reused"] == len(kept)
    shard_of = names_by_ids(fresh, rows)
    assert sorted(fresh.requests()) == sorted(ids for ids, name in shard_of.items() if name not in kept)
    assert kept.items() <= fresh.shards().items()
    assert contents(fresh.out) == calm
    assert {path.suffix for path in fresh.work.iterdir()} == {".safetensors", ".json", ""}


def test_two_at_once(fresh: Run, calm: dict[str, str]) -> None:
    first = start(fresh, seconds_each=0.03)
    wait_until(lambda: asked(fresh) > 5)
    second = start(fresh, log="second.log")
    second.join()
    assert second.exitcode == 1
    assert f"is in use by process {first.pid}; wait for it or end it, then run again" in said(fresh, "second.log")
    first.join()
    assert first.exitcode == 0, said(fresh)
    assert len(fresh.requests()) == 60
    assert contents(fresh.out) == calm


def stop_quickly() -> None:
    engine_process.GRACE_S = 1


def test_a_stopped_engine_ends_the_stage_and_leaves_no_process(fresh: Run, calm: dict[str, str]) -> None:
    """SIGSTOP: the process is there and healthy to look at, takes no SIGTERM, and does nothing."""
    write_params(fresh.folder / "params.yaml", fresh.folder / "verifier", **SIZES, extract__stall_timeout_s=1.0)
    process = start(fresh, before=stop_quickly, seconds_each=0.03)
    wait_until(lambda: len(fresh.shards()) > 1)
    [engine] = engines(process)
    engine.suspend()
    started = time.monotonic()
    process.join(30)
    assert process.exitcode == 1
    assert 0.9 < time.monotonic() - started < 15
    assert "recording engine: made no progress for 1 s; log: " in said(fresh)
    assert "work/logs/extract.log" in said(fresh)
    assert "finished shards are kept, run again to go on" in said(fresh)
    assert psutil.wait_procs([engine], 5)[1] == []
    kept = fresh.shards()
    finish(fresh)
    assert kept.items() <= fresh.shards().items()
    assert contents(fresh.out) == calm


def test_a_slow_engine_that_gets_on_is_left_alone(fresh: Run) -> None:
    few = make_rows()[:8]
    write_params(fresh.folder / "params.yaml", fresh.folder / "verifier", **SIZES, extract__stall_timeout_s=0.8)
    started = time.monotonic()
    fresh.extract(few, seconds_each=0.4)
    assert time.monotonic() - started > 3 * 0.8
    assert len(fresh.index()) == 8


def test_e10_a_shard_that_is_still_being_written_has_no_name_yet(fresh: Run, calm: dict[str, str]) -> None:
    """The engine writes half of a sample, waits, and writes the rest: whatever has its final name is whole."""
    process = start(fresh, halves_s=0.02)
    looks = 0
    while process.is_alive():
        for path in fresh.work.glob("*.safetensors"):
            assert digest_file(path) == calm[path.name]
            looks += 1
        time.sleep(0.05)
    process.join()
    assert process.exitcode == 0, said(fresh)
    assert looks > 5
    assert contents(fresh.out) == calm


def test_e03_results_in_any_order_find_their_rows(fresh: Run) -> None:
    """The engine answers each batch last one first; 120 samples have ordinals of one, two and three digits."""
    many = make_rows(120)
    metrics = fresh.extract(many, reversed=True)
    assert metrics["head_agreement"] == 1
    for entry, row in zip(fresh.index(), many, strict=True):
        sample = open_shard(fresh.out / entry["shard"]).sample(entry["position"])
        assert sample.input_ids.tolist() == row["input_ids"]
        assert sample.aux_hidden_states[:, 0].tolist() == row["input_ids"]  # the fake's states tell their token


def test_e14_folders_are_made_where_there_are_none(fresh: Run, calm: dict[str, str]) -> None:
    tokens, identity, _, _, params = fresh.arguments()
    fresh.monkeypatch.setenv("EAGLE3_WORK_DIR", str(fresh.folder / "no/such/store"))
    out = fresh.folder / "not/there/yet"
    extract(tokens, identity, out, fresh.folder / "nor/this.json", params)
    assert contents(out) == calm
    assert json.loads((fresh.folder / "nor/this.json").read_text())["rows_out"] == 60


def test_a_fresh_machine_gives_the_same_shards(fresh: Run, calm: dict[str, str], tmp_path: Path) -> None:
    """Another folder to run in, work store, hash seed, time zone and language: the same names and bytes."""
    code = "import sys; from pathlib import Path; from eagle3.serving import recorder; "
    code += f"from stages.extract import extract; recorder.ENGINE = {FAKE!r}; extract(*map(Path, sys.argv[1:]))"
    (tmp_path / "elsewhere").mkdir()
    environment = os.environ | {
        "EAGLE3_WORK_DIR": str(tmp_path / "elsewhere/store"),
        "PYTHONHASHSEED": "7",
        "PYTHONPATH": str(PROJECT),
        "TZ": "Pacific/Kiritimati",
        "LC_ALL": "C",
    }
    command = [sys.executable, "-c", code, *map(str, fresh.arguments())]
    subprocess.run(command, cwd=tmp_path / "elsewhere", env=environment, check=True, capture_output=True)
    assert contents(fresh.out) == calm


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    yield
    assert psutil.Process().children(recursive=True) == []
