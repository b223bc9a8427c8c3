"""The bundled verifier end to end, from an installed wheel: `eagle3 init`, `dvc repro`, the draft served.

It is what `make demo` does in the checkout, on fewer prompts.
"""

import json
import re
import resource
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.project import ROOT, Project
from eagle3.evaluation import choose_prompts
from eagle3.params import load_params
from eagle3.serving.ports import free_port
from eagle3.serving.speculative import Decoder, sampling_fields, settings
from eagle3.verifier import locate_verifier, read_identity
from stages.evaluate import in_float32
from tests.draft_parity import equal_drafts
from tests.wheel import InstalledProject, install_wheel

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
    """A project of 56 starter prompts that has run once. The checkout is nowhere on its way."""
    folder = tmp_path_factory.mktemp("bundled")
    lines = (ROOT / "data/prompts/starter.jsonl").read_text().splitlines()
    (folder / "starter.jsonl").write_text("\n".join(lines[:56]) + "\n")
    options = [word for name, value in SETTINGS.items() for word in ("-S", f"{name}={value}")]
    prompts = ["--prompts", str(folder / "starter.jsonl")]
    made = InstalledProject(install_wheel(folder / "wheel"), folder / "project", [*prompts, *options])
    made.run("dvc", "repro")
    made.commit("first run")
    return made


def output(project: Project, *command: str) -> str:
    """What a command that succeeds prints in the project."""
    environment = project.environment()
    done = subprocess.run(command, cwd=project.folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_all_code_is_that_of_the_wheel(project: Project) -> None:
    for package in ("eagle3", "stages"):
        place = output(project, "python", "-c", f"import {package}; print({package}.__file__)").strip()
        assert Path(place).is_relative_to(project.folder.parent / "wheel")
    assert str(ROOT) not in (project.folder / "dvc.lock").read_text()


def test_nothing_to_do_costs_less_than_5_seconds_of_processor_time(project: Project) -> None:
    """And so it says: only the two stages that look each time run."""
    costs = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        printed = output(project, "dvc", "repro")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        costs.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert set(re.findall(r"Running stage '([\w-]+)'", printed)) == {"library", "verifier"}
    assert min(costs) < 5, costs
    assert project.changed_files() == []


def test_an_upgrade_reruns_the_stages_whose_code_it_changed(project: Project) -> None:
    installed = Path(output(project, "python", "-c", "import eagle3.gates; print(eagle3.gates.__file__)").strip())
    text = installed.read_text()
    try:
        installed.write_text(text + "# another version\n")
        project.run("dvc", "repro", "--quiet", "library")
        changed = set(json.loads(output(project, "dvc", "status", "--json")))
        assert changed - {"library", "verifier"} == {"extract", "evaluate"}
    finally:
        installed.write_text(text)
        project.run("dvc", "repro", "--quiet", "library")


def test_the_doctor_finds_nothing_that_stops_a_run(project: Project) -> None:
    found = output(project, "eagle3", "doctor")
    assert "a run fits" in found and "KV cache" in found and "STOPS" not in found


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
    chosen = choose_prompts(
        project.folder / "data/prompts/evaluation.parquet", params.verifier, params.generate, params.evaluate
    )
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
    checked = output(project, "eagle3", "lineage", "--check", "--json")
    links = {link["name"]: link["status"] for link in json.loads(checked)["links"]}
    assert set(links.values()) == {"proven", "agrees"} and links["answers"] == links["prompts"] == "proven"
    told = output(project, "eagle3", "lineage")
    assert " prompts/starter.jsonl md5" in told and "max_new_tokens 48" in told
    card = output(project, "eagle3", "card")
    assert "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in card and "| `speedup` |" in card
    assert "Not measured" in (project.folder / "data/draft/README.md").read_text()


def test_the_draft_is_served_until_ctrl_c(project: Project) -> None:
    """As exported for others and brought back, which is the same draft."""
    assert output(project, "eagle3", "summary").rstrip().endswith("eagle3 serve")
    output(project, "eagle3", "export", "data/draft", "shared", "--format", "speculators")
    output(project, "eagle3", "import", "shared", "back")
    port = free_port()
    printed = output(project, "eagle3", "serve", "--draft", "back", "--port", str(port), "--print")
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
