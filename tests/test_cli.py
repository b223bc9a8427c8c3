"""The `eagle3` command explains itself and fails without a stack trace."""

import shlex
import subprocess
import sys
from pathlib import Path

from eagle3.cli import serve_command
from eagle3.params import load_params
from eagle3.serving.engine import runs_on_cpu

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


def test_the_serving_command_says_what_the_verifier_needs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"kv_lora_rank": 16}')
    params = load_params(ROOT / "params.yaml")
    plain = serve_command(params, tmp_path)
    assert "--tensor-parallel-size" not in plain and "--trust-remote-code" not in plain
    engine = params.engine.model_copy(update={"tensor_parallel_size": 8})
    verifier = params.verifier.model_copy(update={"trust_remote_code": True})
    words = shlex.split(serve_command(params.model_copy(update={"engine": engine, "verifier": verifier}), tmp_path))
    assert words[words.index("--tensor-parallel-size") + 1] == "8" and "--trust-remote-code" in words
    assert ("--compilation-config" in words) == runs_on_cpu()  # latent attention on a CPU
