"""The bundled verifier end to end: what `make demo` does, on fewer prompts, up to serving the draft."""

import json
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
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


def test_the_whole_chain_is_proven(project: Project) -> None:
    checked = eagle3(project, "lineage", "--check", "--json")
    links = {link["name"]: link["status"] for link in json.loads(checked)["links"]}
    assert set(links.values()) == {"proven", "agrees"} and links["answers"] == links["prompts"] == "proven"
    told = eagle3(project, "lineage")
    assert "data/prompts/starter.jsonl md5" in told and "max_new_tokens 48" in told
    card = eagle3(project, "card")
    assert "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in card and "| `speedup` |" in card
    assert "Not measured" in (project.folder / "data/draft/README.md").read_text()


def test_the_draft_is_served_until_ctrl_c(project: Project) -> None:
    """As exported for others and brought back, which is the same draft."""
    assert eagle3(project, "summary").rstrip().endswith("eagle3 serve")
    eagle3(project, "export", "data/draft", "shared", "--format", "speculators")
    eagle3(project, "import", "shared", "back")
    port = free_port()
    printed = eagle3(project, "serve", "--draft", "back", "--port", str(port), "--print")
    assert f"--port {port}" in printed and '"num_speculative_tokens": 3' in printed
    with serving(project, port, "--draft", "back") as process:
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
        everything = [process, *psutil.Process(process.pid).children(recursive=True)]
        assert len(everything) > 1
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert not any(psutil.pid_exists(other.pid) for other in everything[1:])
    assert (project.folder / f".work/logs/serve-{port}.log").stat().st_size > 0


def eagle3(project: Project, *words: str) -> str:
    """What the command prints."""
    environment = project.environment()
    done = subprocess.run(
        ["eagle3", *words], cwd=project.folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        text: str = answer.read().decode()
    return text


@contextmanager
def serving(project: Project, port: int, *words: str) -> Iterator["subprocess.Popen[str]"]:
    """`eagle3 serve` from the line on which it says that it serves."""
    process = subprocess.Popen(
        ["eagle3", "serve", "--port", str(port), *words],
        cwd=project.folder,
        env=project.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(f"http://127.0.0.1:{port}/v1 serves bundled:smollm2-135m-think")
        yield process
    finally:
        process.terminate()
        process.wait(60)
