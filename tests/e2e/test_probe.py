"""`eagle3 estimate --probe` with a real vLLM on a tiny verifier: three rates; nothing stays behind, not even killed."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from eagle3.prompts import write_splits
from eagle3.tables import Row
from tests.stage_runs import prompt_row
from tests.token_tables import PROJECT, write_params

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


def prompts(count: int) -> list[Row]:
    return [prompt_row(number, f"How many apples are left of {number * 3} if you eat one?") for number in range(count)]


def start(*words: str) -> subprocess.Popen[str]:
    """The command in the current folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "eagle3.cli", "estimate", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(PROJECT)},
    )


def test_a_probe_measures_all_three_rates_and_leaves_nothing(
    tmp_path: Path, tiny_verifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_params(Path("params.yaml"), tiny_verifier, generate__max_new_tokens=24)
    write_splits(Path("data/prompts"), prompts(40))
    killed = start("--probe", "8")
    log, deadline = Path("work/probe/run/work/logs/generate.log"), time.monotonic() + 120
    while not (log.is_file() and log.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
    children = psutil.Process(killed.pid).children(recursive=True)
    killed.kill()
    killed.communicate()
    assert len(children) > 1
    assert not psutil.wait_procs(children, 20)[1]
    assert Path("work/probe/run").is_dir()

    whole = start("--probe", "8", "--json")
    told, news = whole.communicate(timeout=600)
    assert whole.returncode == 0, news
    found = json.loads(told)
    assert found["source"] == "expected, from the 8 rows of the probe"
    assert found["rows"] == 40
    assert 0 < found["answer_tokens"] <= 40 * 24
    assert found["hours"] > 0
    for stage in found["stages"].values():
        assert stage["rate"] > 0
        assert stage["source"] == "probe of 8 rows"
    assert not Path("work/probe/run").exists()
    assert {path.name for path in Path("data").iterdir()} == {"prompts"}
