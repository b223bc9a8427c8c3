"""A stage whose settings change while it runs fails, so that DVC does not record what is not true."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle3.stage import sections

ROOT = Path(__file__).parent.parent
SCRIPT = """
import time
from pathlib import Path
from eagle3.stage import run_stage
def train(out: Path, params_path: Path) -> None:
    out.touch()
    while not out.with_suffix(".go").exists():
        time.sleep(0.02)
run_stage(train)
"""


def run_with_an_edit(tmp_path: Path, old: str, new: str) -> tuple[int, str]:
    """Run a stage named train in the project's folder and edit its params.yaml meanwhile."""
    params = tmp_path / "params.yaml"
    params.write_text((ROOT / "params.yaml").read_text())
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "out"), str(params)]
    stage = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "out").exists():
        assert stage.poll() is None
        time.sleep(0.02)
    text = params.read_text()
    assert old in text
    params.write_text(text.replace(old, new))
    (tmp_path / "out.go").touch()
    assert stage.stderr is not None
    said = stage.stderr.read()
    return stage.wait(), said


def test_own_settings_changed_halfway_fail_the_stage(tmp_path: Path) -> None:
    code, said = run_with_an_edit(tmp_path, "ttt_steps: 3", "ttt_steps: 4")
    assert code == 1
    assert "train changed while the stage ran" in said and "run `dvc repro` again" in said
    assert "Traceback" not in said


def test_settings_of_other_stages_may_change(tmp_path: Path) -> None:
    assert run_with_an_edit(tmp_path, "lossless_prompts: 2", "lossless_prompts: 3") == (0, "")


def test_a_file_that_became_unreadable_fails_it_too(tmp_path: Path) -> None:
    code, said = run_with_an_edit(tmp_path, "train:", "train: [")
    assert code == 1
    assert "not readable as YAML" in said


def test_the_sections_are_those_of_the_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert sections("reconstruct_tokens") == ["reconstruct_tokens", "verifier"]
    monkeypatch.chdir(tmp_path)
    assert "engine" in sections("reconstruct_tokens")
