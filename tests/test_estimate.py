"""`eagle3 estimate`: what it says is what a run then takes; it says from what; it refuses what cannot fit."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

from eagle3.cli import app
from eagle3.schemas import RESPONSES
from eagle3.shards import DTYPES, shard_layout
from eagle3.tables import Account, Row, write_parts
from tests.estimate_project import ARGUMENTS, estimated, make_rows, run_extract, write_project, write_prompts
from tests.fake_recording_engine import HIDDEN
from tests.test_extract import FAKE
from tests.test_full_disk import namespace
from tests.token_tables import PROJECT, write_params

DRY = [
    "--rows",
    "10000",
    "--prompt-tokens",
    "500",
    "--answer-tokens",
    "2500",
    "--hidden-size",
    "7168",
    "--aux-layers",
    "3",
]
OURS = "hardlink,symlink,copy"


@pytest.fixture(autouse=True)
def in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def said(*words: str) -> tuple[int, str]:
    """Exit code and all that the command printed for a person."""
    result = CliRunner().invoke(app, ["estimate", *words])
    return result.exit_code, result.output


def shard_bytes() -> int:
    return sum(path.stat().st_size for path in Path("data/hidden_states").glob("*.safetensors"))


@pytest.mark.parametrize("storage", ["lossless", "fp8"])
def test_bytes_are_exactly_those_that_extract_writes(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows(60)
    write_project(rows, extract__storage=storage)
    found = estimated()
    assert not Path("work").exists()  # it only looked
    run_extract(monkeypatch)
    assert found["bytes"] == {"total": shard_bytes(), "missing": shard_bytes(), "exact": True}
    assert (found["rows"], found["tokens"]) == (60, sum(row["length"] for row in rows))
    assert found["answer_tokens"] == sum(sum(row["loss_mask"]) for row in rows)
    assert found["stages"]["train"]["tokens"] == 2 * sum(row["length"] for row in rows if row["split"] == "train")
    again = estimated()
    assert again["bytes"] == found["bytes"] | {"missing": 0}
    assert again["stages"]["extract"]["left"] == again["stages"]["generate"]["left"] == 0


def test_only_missing_shards_are_still_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows(60)
    write_project(rows)
    run_extract(monkeypatch)
    before = set(Path("work/extract").glob("*.safetensors"))
    write_project([*rows, *make_rows(10, seed=1)])
    found = estimated()
    metrics = run_extract(monkeypatch)
    new = set(Path("work/extract").glob("*.safetensors")) - before
    assert 0 < found["bytes"]["missing"] == sum(path.stat().st_size for path in new) < found["bytes"]["total"]
    assert metrics["shards_reused"] > 0
    assert estimated()["bytes"]["missing"] == 0


@pytest.mark.parametrize("storage", ["lossless", "fp8"])
def test_a_sum_without_tables_is_that_of_the_layout(storage: str) -> None:
    write_params(Path("params.yaml"), Path("no-such-model"), verifier__dtype="bfloat16", extract__storage=storage)
    found = estimated(*DRY)
    dtype = DTYPES["float8_e4m3fn" if storage == "fp8" else "bfloat16"]
    layout = shard_layout([3000] * 1000, 3, 7168, dtype, {})
    assert found["bytes"]["total"] == pytest.approx(layout.size * 10, rel=1e-5)
    assert found["bytes_per_token"] == (57_349 if storage == "lossless" else 4 * (7168 + 4) + 5)
    assert (found["tokens"], found["answer_tokens"]) == (30_000_000, 25_000_000)
    assert not found["bytes"]["exact"]


def test_hours_cost_and_what_to_say_where_a_rate_is_missing() -> None:
    write_params(Path("params.yaml"), Path("no-such-model"), train__epochs=3, prompts__validation_share=0.0)
    rates = ["--generate-rate", "1000", "--record-rate", "5000", "--train-rate", "2500"]
    found = estimated(*DRY, *rates, "--gpus", "8", "--price-per-hour", "2")
    hours = [25e6 / 1000 / 3600, 30e6 / 5000 / 3600, 3 * 30e6 / 2500 / 3600]
    assert [stage["hours"] for stage in found["stages"].values()] == pytest.approx(hours)
    assert found["hours"] == pytest.approx(sum(hours))
    assert found["gpu_hours"] == pytest.approx(8 * sum(hours))
    assert found["cost"] == pytest.approx(16 * sum(hours))
    lacking = estimated(*DRY, *rates[:2])
    assert (lacking["hours"], lacking["cost"]) == (None, None)
    assert "--record-rate TOKENS_PER_S, --train-rate TOKENS_PER_S" in lacking["remedies"][-1]


def test_rates_are_those_of_the_last_run(monkeypatch: pytest.MonkeyPatch) -> None:
    write_project(make_rows(30))
    recorded = run_extract(monkeypatch)
    step = estimated("--rows", "3000")["stages"]["extract"]
    assert step["rate"] == recorded["tokens_per_second"] > 0
    assert step["source"] == "data/metrics/extract.json"
    assert step["hours"] == pytest.approx(step["left"] / step["rate"] / 3600)
    run_extract(monkeypatch)  # finds everything there, so it measures nothing
    step = estimated("--rows", "3000")["stages"]["extract"]
    assert (step["rate"], step["source"]) == (None, "unknown: nothing was new in the last run")


def test_other_prompts_are_expected_to_be_like_those_seen() -> None:
    rows = make_rows(40)
    write_project(rows)
    write_prompts([*rows, *make_rows(10, seed=5)])
    found = estimated()
    mean_answer = sum(sum(row["loss_mask"]) for row in rows) / 40
    assert (found["rows"], found["bytes"]["exact"]) == (50, False)
    assert found["tokens"] == pytest.approx(sum(row["length"] for row in rows) / 40 * 50, abs=2)
    assert found["stages"]["generate"]["left"] == pytest.approx(10 * mean_answer, abs=1)
    assert found["source"] == "expected, from the 40 rows of data/tokens"


def test_other_settings_of_generate_ask_for_every_answer_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows(40)
    write_project(rows, generate__max_new_tokens=40)
    run_extract(monkeypatch)
    settings = YAML(typ="safe").load(Path("params.yaml").read_text())
    made = {name: settings[name] for name in ("engine", "generate", "reasoning", "verifier")}
    lock = {"stages": {"generate": {"params": {"params.yaml": made}}}}
    Path("dvc.lock").write_text(json.dumps(lock))
    write_project(rows, generate__max_new_tokens=40, generate__concurrency=3)
    found = estimated()
    assert found["stages"]["generate"]["left"] == found["bytes"]["missing"] == 0  # that setting decides no answer
    write_project(rows, generate__max_new_tokens=80)
    found = estimated()
    answers = sum(sum(row["loss_mask"]) for row in rows)
    assert found["stages"]["generate"]["left"] == found["answer_tokens"] == pytest.approx(2 * answers, abs=1)
    assert "answers 2 times as long, as max_new_tokens is" in found["source"]
    assert found["bytes"]["missing"] == found["bytes"]["total"] > 0  # and none of the shards will do


def test_without_tokens_answers_tell() -> None:
    rows = make_rows(40)
    write_project(rows)
    shutil.rmtree("data/tokens")
    write_answers(rows[:30])
    found = estimated()
    assert found["source"] == "expected, from the 30 rows of data/responses"
    seen = [row["length"] for row in rows[:30]]
    assert found["tokens"] == pytest.approx(sum(seen) / 30 * 40, abs=2)
    assert found["stages"]["generate"]["left"] == pytest.approx(found["answer_tokens"] / 4, abs=1)


def write_answers(rows: list[Row]) -> None:
    """data/responses of these samples."""
    account = Account("generate", 0)
    account.rows_in = account.rows_out = len(rows)
    answers = []
    for row in rows:
        cut = row["prompt_length"]
        ids = {"prompt_token_ids": row["input_ids"][:cut], "output_token_ids": row["input_ids"][cut:]}
        answers.append(dict.fromkeys(RESPONSES.names) | ids | {"prompt_id": row["sample_id"], "sample": 0})
    write_parts(Path("data/responses"), answers, RESPONSES, "prompt_id", account)


def test_without_tables_the_metrics_of_the_last_run_tell_else_the_settings() -> None:
    write_project(make_rows(40), generate__max_new_tokens=100)
    shutil.rmtree("data/tokens")
    bound = estimated()
    assert bound["answer_tokens"] == 40 * 100
    assert bound["prompt_tokens"] == pytest.approx(40 * 29 / 3, abs=1)
    assert bound["source"].startswith("at most, from generate.max_new_tokens")
    counts = {"rows_out": 20, "prompt_tokens": 200, "completion_tokens": 800, "tokens_per_second": 50.0}
    Path("data/metrics").mkdir()
    Path("data/metrics/generate.json").write_text(json.dumps(counts))
    found = estimated()
    assert (found["prompt_tokens"], found["answer_tokens"]) == (400, 1600)
    assert found["source"] == "expected, from the 20 rows of data/metrics/generate.json"
    assert found["stages"]["generate"]["hours"] == pytest.approx(1600 / 50 / 3600)


def test_sizes_without_an_identity_are_those_of_the_models_config() -> None:
    write_project(make_rows(20))
    exact = estimated()
    Path("data/verifier.json").unlink()
    found = estimated()
    assert found["bytes_per_token"] == exact["bytes_per_token"] == 4 * HIDDEN * 4 + 5
    assert found["bytes"]["total"] == pytest.approx(exact["bytes"]["total"], rel=0.01)
    Path("verifier/config.json").write_text("{}")
    code, text = said()
    assert code == 1 and "say --hidden-size, --aux-layers" in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "data/prompts/train.parquet is not there yet: `dvc repro prompts` makes it without an engine"),
        (["--rows", "5"], "`dvc repro prompts` makes it"),
        ([*DRY[:6], "--hidden-size", "8"], "--hidden-size and --aux-layers go together"),
    ],
)
def test_what_is_missing_is_named(words: list[str], sentence: str) -> None:
    write_params(Path("params.yaml"), Path("no-such-model"))
    code, text = said(*words)
    assert code == 1
    assert sentence in text and "Traceback" not in text


def test_a_person_reads_what_does_not_fit_and_what_to_change() -> None:
    write_params(Path("params.yaml"), Path("no-such-model"), verifier__dtype="bfloat16")
    code, text = said(*DRY[:1], str(10**9), *DRY[2:])
    assert code == 1
    assert "DOES NOT FIT" in text
    assert "of 1,000,000,000 rows would fit" in text
    assert "all rows with extract.storage: fp8 need 86,079.00 TB and would not fit either" in text
    assert text.splitlines()[-1].startswith("error: ") and "EAGLE3_WORK_DIR" in text.splitlines()[-1]


def test_the_page_shows_what_the_command_says() -> None:
    page = (PROJECT / "docs" / "estimate.md").read_text()
    block = page.split("## Kimi-K2.5")[1].split("\n\n    ")
    command = block[1].replace("\\\n", " ").split()
    assert command[:2] == ["eagle3", "estimate"]
    shutil.copyfile(PROJECT / "params.yaml", "params.yaml")
    told = said(*command[2:])[1].splitlines()
    shown = [line.strip() for line in page.split("## Kimi-K2.5")[1].splitlines() if line.startswith("    ")]
    for beginning in ("rows ", "tokens ", "states ", "stage ", "generate ", "extract ", "train ", "all  "):
        (line,) = (line for line in told if line.startswith(beginning))
        assert line in shown


def test_rows_that_would_fit_leave_out_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows(60)
    write_project(rows)
    run_extract(monkeypatch)
    per_row = shard_bytes() / 60
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, int(per_row * 30.5)))
    assert "about 90 of 200 rows would fit" in said("--rows", "200")[1]


def test_help_teaches() -> None:
    code, text = said("--help")
    assert code == 0
    for word in ("--rows", "--probe", "--price-per-hour", "before you pay for it"):
        assert word in text


def in_namespace(script: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script of sh where it may mount."""
    wrapper = namespace()
    assert wrapper is not None
    return subprocess.run(
        [*wrapper, "sh", "-c", script, "sh", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


LAYOUTS = {
    "all-on-one": ("a", "a", "a", OURS),
    "work-store-elsewhere": ("a", "b", "b", OURS),
    "cache-elsewhere": ("a", "a", "b", OURS),
    "all-apart": ("a", "b", "c", OURS),
    "copies-wanted": ("a", "a", "a", "copy"),
    "symlinks-wanted": ("a", "a", "a", "symlink"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What was estimated and what was taken, for each layout, on three real filesystems."""
    if namespace() is None:
        pytest.skip("this system lets nobody mount a small disk")
    folder = tmp_path_factory.mktemp("disks")
    for disk in "abc":
        (folder / disk).mkdir()
    script = f'for disk in a b c; do mount -t tmpfs -o size=64m none {folder}/$disk; done; "$@"'
    layouts = [
        {"name": name, "work": str(folder / work), "project": str(folder / project), "cache": str(folder / cache)}
        | {"type": kind}
        for name, (work, project, cache, kind) in LAYOUTS.items()
    ]
    command = [sys.executable, "-m", "tests.estimate_project", json.dumps(layouts)]
    ran = in_namespace(script, *command, folder=folder)
    assert ran.returncode == 0, ran.stderr
    return dict(zip(LAYOUTS, json.loads(ran.stdout.splitlines()[-1]), strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LAYOUTS)
def test_links_and_copies_take_what_was_said(name: str, runs: dict[str, Any]) -> None:
    """Of each filesystem, to within the small files of a project (tables, DVC's own)."""
    run, (work, project, cache, _) = runs[name], LAYOUTS[name]
    of_place = dict(zip(("work store", "out", "DVC's cache"), (work, project, cache), strict=True))
    promised = dict.fromkeys(of_place.values(), 0)
    for place in run["first"]["places"]:
        promised[of_place[place["name"]]] += place["stays"]
    took = {Path(mount).name: size for mount, size in run["took"].items()}
    assert took.keys() == promised.keys()
    for disk, size in took.items():
        assert 0 <= size - promised[disk] < 0.06 * run["first"]["bytes"]["total"], disk
    out = next(place for place in run["first"]["places"] if place["name"] == "out")
    assert run["shards"] == ["symlinks" if out["kind"] == "symlinks" else "files"]
    needed = {place["name"]: place["needs"] for place in run["again"]["places"]}
    assert needed["work store"] == needed["DVC's cache"] == 0  # all of it is there, whatever is linked


def test_what_cannot_fit_is_refused_before_the_first_request(tmp_path: Path) -> None:
    if namespace() is None:
        pytest.skip("this system lets nobody mount a small disk")
    write_project(make_rows(60))
    (tmp_path / "disk").mkdir()
    script = """
        mount -t tmpfs -o size=3m none disk
        export EAGLE3_WORK_DIR=$PWD/disk/work
        "$1" -m eagle3.cli estimate > said 2> refused && exit 9
        "$@" 2> stage && exit 8
        exit 0
    """
    code = f"from eagle3.serving import recorder; recorder.ENGINE = {FAKE!r}; from stages import extract as stage; "
    code += "from eagle3.stage import run_stage; run_stage(stage.extract)"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE3_FAKE_REQUESTS", str(tmp_path / "requests.log"))
        ran = in_namespace(script, sys.executable, "-c", code, *map(str, ARGUMENTS), folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "DOES NOT FIT" in Path("said").read_text()
    refused, stage = Path("refused").read_text(), Path("stage").read_text()
    free = r"[\d,]+ are free"  # the stage's lock takes a page
    assert refused.startswith("error: ") and re.sub(free, "", refused) == re.sub(free, "", stage)  # one sum
    assert "hidden states need 4," in refused and "EAGLE3_WORK_DIR" in refused
    assert not Path("requests.log").exists()
