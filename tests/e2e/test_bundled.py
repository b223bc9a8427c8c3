"""The bundled verifier end to end: what `make demo` does, on fewer prompts, up to the command that serves the draft."""

import json
import os
import shlex
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.project import ROOT, Project
from eagle3.params import load_params
from eagle3.serving.server import free_port
from eagle3.serving.speculative import Decoder, sampling_fields, settings
from eagle3.verifier import locate_verifier, read_identity
from stages.evaluate import choose, in_float32
from tests.draft_parity import equal_drafts

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {
    "generate.max_new_tokens": 48,
    "prompts.validation_share": 0.1,
    "prompts.evaluation_share": 0.1,
    "extract.shard_min_mib": 4,
    "extract.shard_max_mib": 16,
    "train.epochs": 4,
    "train.validations": 2,
    "evaluate.num_prompts": 4,
    "evaluate.max_new_tokens": 32,
    "evaluate.lossless_prompts": 2,
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project of 56 starter prompts that has run once, with an own copy of everything but the converted verifier."""
    made = Project(tmp_path_factory.mktemp("bundled") / "project")
    lines = (ROOT / "data/prompts/starter.jsonl").read_text().splitlines()
    (made.folder / "data/prompts").mkdir(parents=True)
    (made.folder / "data/prompts/starter.jsonl").write_text("\n".join(lines[:56]) + "\n")
    made.edit([{"path": "data/prompts/starter.jsonl"}], SETTINGS)
    made.run("dvc", "repro")
    return made


def test_the_recorded_states_explain_what_the_verifier_wrote(project: Project) -> None:
    assert project.metrics("extract")["head_agreement"] >= 0.97
    assert project.metrics("extract")["rows_out"] == project.metrics("train")["rows_in"]


def test_the_verifier_thinks_and_closes_its_thinking(project: Project) -> None:
    metrics = project.metrics("reconstruct_tokens")
    assert metrics["thinking"]["opened_by_prompt"] == metrics["rows_out"]
    assert metrics["thinking"]["ended_by_marker"] > 0.5 * metrics["rows_out"]
    assert metrics["thinking_share"] > 0.2


def test_speculation_is_lossless_in_float32(project: Project) -> None:
    assert project.metrics("evaluate")["lossless_float32"] == {"share": 1.0, "shared_prefix": 1.0, "compared": 2}


def test_vllm_drafts_what_the_trained_draft_proposes(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, on held-out prompts: at least 99 % of the first proposals and of the later ones are equal."""
    monkeypatch.setenv("EAGLE3_WORK_DIR", str(project.folder / ".work"))
    params = in_float32(load_params(project.folder / "params.yaml"))
    draft, folder = project.folder / "data/draft", locate_verifier(params.verifier)
    setting = settings(params.evaluate)[0]
    steps = setting.num_speculative_tokens
    chosen = choose(project.folder / "data/prompts/evaluation.parquet", params)
    with Decoder(params.verifier, params.engine, folder, draft, steps) as decoder:
        decoder.wait_until_ready()
        sampling = [[sampling_fields(params.evaluate, prompt, 32)] for prompt in chosen]
        answers = [
            decoder.decode([prompt], fields, setting, 0).answers[0]
            for prompt, fields in zip(chosen, sampling, strict=True)
        ]
    layers = read_identity(project.folder / "data/verifier.json").aux_layer_ids
    same = equal_drafts(folder, draft, answers, layers, steps)
    assert same[0][1] > 50
    for place, (equal, compared) in enumerate(same):
        assert equal / compared >= 0.99, f"position {place + 1}: {equal} of {compared}"


def test_the_draft_learnt_something(project: Project) -> None:
    evaluated, trained = project.metrics("evaluate"), project.metrics("train")
    assert evaluated["acceptance_length"] > 1.02
    assert trained["expected_acceptance_length"] > 1.02
    assert evaluated["num_prompts"] == 4
    assert set(evaluated["by_category"]) <= set(project.metrics("prompts")["categories"])


def test_metrics_and_plots_are_shown_by_dvc(project: Project) -> None:
    shown = subprocess.run(
        ["dvc", "metrics", "show"],
        cwd=project.folder,
        env=project.environment(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in ("acceptance_length", "speedup", "head_agreement", "expected_acceptance_length"):
        assert name in shown
    project.run("dvc", "plots", "show")
    page = (project.folder / "dvc_plots/index.html").read_text()
    assert "acceptance_rate" in page
    assert "expected_acceptance_length" in page


def test_the_summary_names_a_command_that_serves_the_draft(project: Project) -> None:
    shown = subprocess.run(
        ["eagle3", "summary"], cwd=project.folder, env=project.environment(), capture_output=True, text=True, check=True
    ).stdout
    assert "acceptance length:" in shown
    command = shown.strip().splitlines()[-1].strip()
    port = free_port()
    with serving(project, command.replace("--port 8000", f"--port {port}"), port):
        body = {"model": json.loads(get(port, "/v1/models"))["data"][0]["id"], "max_tokens": 16, "temperature": 0}
        body["messages"] = [{"role": "user", "content": "Name the five largest countries by area."}]
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 16
        drafted = [
            line for line in get(port, "/metrics").splitlines() if line.startswith("vllm:spec_decode_num_drafts")
        ]
        assert sum(float(line.rpartition(" ")[2]) for line in drafted) > 0


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        text: str = answer.read().decode()
    return text


@contextmanager
def serving(project: Project, command: str, port: int) -> Iterator[None]:
    """The command as a user's shell runs it, until it answers; ended by its process group."""
    log = Path(project.folder / "serve.log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            shlex.split(command),
            cwd=project.folder,
            env=project.environment(),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 240
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                get(port, "/health")
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
