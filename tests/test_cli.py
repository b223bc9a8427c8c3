"""The `eagle3` command explains itself and fails without a stack trace."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eagle3.cli", *words], cwd=cwd, capture_output=True, text=True, check=False
    )


def test_help_teaches() -> None:
    shown = run("--help", cwd=ROOT)
    assert shown.returncode == 0
    assert "summary" in shown.stdout
    assert "dvc repro" in shown.stdout


def test_a_summary_before_the_first_run_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    shown = run("summary", cwd=tmp_path)
    assert shown.returncode == 1
    assert shown.stderr.strip() == "error: data/metrics/prompts.json is not there yet; `dvc repro` makes it"


def test_a_mistake_in_params_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("verifier: {}\n")
    shown = run("summary", cwd=tmp_path)
    assert shown.returncode == 1
    assert "missing key generate" in shown.stderr
    assert "Traceback" not in shown.stderr
