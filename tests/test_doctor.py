"""`eagle3 doctor`: each fault is found, says whether it stops a run, and has a remedy."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eagle3.cli import app
from eagle3.doctor_machine import look_at_machine
from eagle3.doctor_project import look_at_project
from eagle3.doctor_verifier import look_at_cache, look_at_devices
from eagle3.findings import Finding, conclusion
from eagle3.machine import Gpu
from eagle3.model_facts import ModelFacts
from eagle3.params import load_params
from eagle3.params_text import edited
from eagle3.serving.ports import free_port
from tests.faulty_server import FaultyServer
from tests.test_machine import LISTED, put_nvidia_smi

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def shipped(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that `eagle3 init` made."""
    folder = tmp_path_factory.mktemp("doctor") / "project"
    result = CliRunner().invoke(app, ["init", str(folder), "--verifier", str(tiny_verifier)])
    assert result.exit_code == 0, result.stderr
    return folder


@pytest.fixture
def project(shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, the current folder."""
    folder = Path(shutil.copytree(shipped, tmp_path / "project", symlinks=True))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("EAGLE3_WORK_DIR", str(folder / ".work"))
    return folder


def found() -> dict[str, list[Finding]]:
    """Findings about the project by subject."""
    findings: dict[str, list[Finding]] = {}
    for finding in look_at_project(Path("params.yaml")):
        findings.setdefault(finding.subject, []).append(finding)
    return findings


def only(subject: str) -> Finding:
    """The finding about it that is not ok."""
    wrong = [finding for finding in found()[subject] if finding.level != "ok"]
    assert len(wrong) == 1
    assert wrong[0].remedy
    return wrong[0]


def setting(name: str, value: object) -> None:
    path = Path("params.yaml")
    path.write_text(edited(path.read_text(), {name: value}))


def test_a_sound_project_is_all_well(project: Path) -> None:
    findings = found()
    assert {finding.level for group in findings.values() for finding in group} == {"ok"}
    expected = {
        "params",
        "pipeline",
        "links",
        "disk",
        "work store",
        "remote",
        "verifier",
        "KV cache",
        "memory",
        "files",
    }
    assert set(findings) == expected


def test_the_command_takes_seconds_and_imports_no_vllm(project: Path) -> None:
    program = (
        "import sys; from eagle3.cli import app; sys.argv[1:] = ['doctor']\n"
        "try: app()\n"
        "finally: assert 'vllm' not in sys.modules, 'vllm was imported'"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command, environment = [sys.executable, "-c", program], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] in ("all well", "nothing would stop a run, 1 warnings")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 8  # of processor time; 3 s when idle


def test_exit_code_1_only_where_a_run_would_stop(project: Path) -> None:
    setting("extract.shard_min_mib", 1000)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "STOPS    params" in result.stdout and "extract.shard_min_mib is above" in result.stdout
    assert "-> edit params.yaml" in result.stdout and "would stop a run" in result.stdout.splitlines()[-1]


def test_outside_of_a_project_only_the_machine_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert only("project").level == "warning" and "eagle3 init" in only("project").remedy


def test_params_are_judged_as_by_the_check_stage(project: Path) -> None:
    Path("prompts/starter.jsonl").unlink()
    assert only("params").level == "stops" and "prompts/starter.jsonl" in only("params").told


def test_no_commit_no_dvc_and_a_damaged_lock_stop(project: Path) -> None:
    Path("dvc.lock").write_text("<<<<<<<\n")
    assert only("dvc").level == "stops" and "dvc.lock" in only("dvc").told
    Path("dvc.lock").unlink()
    shutil.rmtree(".dvc")
    assert "no DVC repository" in only("dvc").told
    shutil.rmtree(".git")
    subprocess.run(["git", "init", "--quiet"], check=True)
    assert "no commit yet" in only("dvc").told


def test_extras_that_params_ask_for(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting("train.tensorboard", True)
    assert "tensorboard" not in found()
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
    assert only("tensorboard").level == "stops"


def test_links_that_cost_room(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_WORK_DIR", "/dev/shm/eagle3-doctor-absent")
    assert only("links").level == "warning" and "EAGLE3_WORK_DIR" in only("links").remedy
    monkeypatch.setenv("EAGLE3_WORK_DIR", str(project / ".work"))
    config = Path(".dvc/config")
    config.write_text(config.read_text().replace("hardlink,symlink,copy", "copy"))
    assert "cache.type" in only("links").remedy


def test_remotes_that_do_not_answer_are_a_warning(project: Path) -> None:
    config = Path(".dvc/config")
    config.write_text(config.read_text().replace("url = ../../project-dvc-remote", "url = ssh://127.0.0.1:1/x"))
    assert only("remote").level == "warning"
    config.write_text(config.read_text().replace("    remote = local\n", ""))
    assert "no remote" in only("remote").told.lower() or "default" in only("remote").told


def test_endpoints_must_answer(project: Path) -> None:
    with FaultyServer() as server:
        setting("generate.endpoints", [server.url])
        assert [finding.level for finding in found()["endpoint"]] == ["ok"]
    setting("generate.endpoints", [f"http://127.0.0.1:{free_port()}/v1"])
    assert only("endpoint").level == "stops" and "generate.endpoints" in only("endpoint").remedy


def test_a_verifier_that_cannot_be_loaded_stops(project: Path, tiny_verifier: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_verifier, tmp_path / "verifier"))
    setting("verifier.model", str(folder))
    assert found()["verifier"][0].level == "ok"
    (folder / "tokenizer.json").write_text("{")
    assert only("verifier").level == "stops"
    shutil.rmtree(folder)
    assert "neither a directory here nor a hub id" in only("verifier").told


def test_another_verifier_than_that_of_the_last_run(project: Path, tiny_verifier: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_verifier, tmp_path / "verifier"))
    setting("verifier.model", str(folder))
    command = [sys.executable, "-m", "stages.verifier", "data/verifier.json", "params.yaml"]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    assert found()["verifier"][0].level == "ok"
    (folder / "chat_template.jinja").write_text((folder / "chat_template.jinja").read_text() + " ")
    assert only("verifier").level == "warning" and "the last run was with" in only("verifier").told


def test_a_hub_model_that_is_not_here_yet(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting("verifier.model", "owner/name")
    setting("verifier.revision", "0" * 40)
    assert only("verifier").level == "warning" and "not on this machine yet" in only("verifier").told


def test_the_bundled_verifier_is_not_converted_for_it(project: Path) -> None:
    setting("verifier.model", "bundled:smollm2-135m-instruct")
    assert "the first run converts it" in found()["verifier"][0].told
    assert not Path(".work/verifiers").exists()


def test_a_kv_cache_that_is_too_small_stops(project: Path) -> None:
    setting("engine.cpu_kv_cache_gib", 0.001)
    finding = only("KV cache")
    assert finding.level == "stops" and "set it to" in finding.remedy
    setting("engine.cpu_kv_cache_gib", float(finding.remedy.split()[3]))
    assert found()["KV cache"][0].level == "ok"
    setting("engine.cpu_kv_cache_gib", 1e6)
    assert only("memory").level == "stops"


def test_files_that_git_does_not_know(project: Path) -> None:
    Path("own.jinja").write_text("{{ messages[0].content }}")
    setting("verifier.chat_template", "own.jinja")
    assert only("files").level == "warning" and "own.jinja" in only("files").told
    subprocess.run(["git", "add", "own.jinja"], check=True)
    assert found()["files"][0].level == "ok"


def test_what_dvc_keeps_is_known(project: Path) -> None:
    shutil.copyfile("prompts/starter.jsonl", "prompts/more.jsonl")
    dvc = Path("dvc.yaml")
    dvc.write_text(
        dvc.read_text().replace("- prompts/starter.jsonl", "- prompts/starter.jsonl\n      - prompts/more.jsonl")
    )
    assert "prompts/more.jsonl" in only("files").told
    subprocess.run([sys.executable, "-m", "dvc", "add", "--quiet", "prompts/more.jsonl"], check=True)
    assert found()["files"][0].level == "ok"


def test_a_cpu_build_beside_gpus_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, LISTED)
    gpus = [finding for finding in look_at_machine() if finding.subject == "gpus"]
    assert [finding.level for finding in gpus] == ["warning"] and "H200" in gpus[0].told and "[gpu]" in gpus[0].remedy


def install(folder: Path, name: str, version: str, requires: str = "") -> None:
    """A package with nothing in it, as pip leaves one."""
    (folder / f"{name}-{version}.dist-info").mkdir(parents=True)
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
    (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(text)
    (folder / name).mkdir()
    (folder / name / "__init__.py").touch()


@pytest.mark.parametrize(
    ("package", "level", "told"),
    [
        (("torchvision", "0.28.0", "torch==2.12.0"), "stops", "is built for torch ==2.12.0"),
        (("torchcodec", "0.9.0", ""), "stops", "is importable"),
        (("transformers", "4.0.0", ""), "warning", "was tested with ==5.19.0"),
        (("torch", "2.1.0", ""), "stops", "is built for torch ==2.13.0"),
    ],
)
def test_packages_that_do_not_fit_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: tuple[str, str, str], level: str, told: str
) -> None:
    install(tmp_path, *package)
    monkeypatch.syspath_prepend(str(tmp_path))
    wrong = [finding for finding in look_at_machine() if finding.level == level]
    assert any(told in finding.told and "pip" in finding.remedy for finding in wrong), wrong


def test_the_conclusion_counts() -> None:
    ok, warning, stops = Finding("ok", "a", "b"), Finding("warning", "a", "b", "c"), Finding("stops", "a", "b", "c")
    assert conclusion([ok]) == "all well"
    assert conclusion([ok, warning]) == "nothing would stop a run, 1 warnings"
    assert conclusion([stops, warning, stops]) == "2 would stop a run, 1 warnings"


GPUS = [Gpu(str(number), "NVIDIA H200", 141 * 10**9, 0) for number in range(8)]
KIMI = load_params(ROOT / "examples/kimi-k2.5.yaml")


def kimi_facts(weights: int = 595 * 10**9) -> ModelFacts:
    """Of Kimi-K2.5."""
    return ModelFacts(
        "KimiK25ForConditionalGeneration", "kimi_k25", 61, 7168, 64, 262_144, 61 * 576, "bfloat16", weights
    )


def test_gpus_that_fit() -> None:
    assert not list(look_at_devices(KIMI, GPUS))
    assert look_at_cache(KIMI, kimi_facts(), GPUS).level == "ok"


def test_too_few_gpus_stop() -> None:
    told = [finding.told for finding in look_at_devices(KIMI, GPUS[:4])]
    assert "engine.tensor_parallel_size = 8, and there are 4" in told
    assert "train.nproc = 8, and there are 4" in told


def test_memory_that_somebody_else_has_stops() -> None:
    taken = [*GPUS[:7], Gpu("7", "NVIDIA H200", 141 * 10**9, 60 * 10**9)]
    (finding,) = look_at_devices(KIMI, taken)
    assert finding.level == "stops" and "GPU 7: 60.00 GB of 141.00 GB are taken" in finding.told


def test_weights_that_leave_no_room_stop() -> None:
    finding = look_at_cache(KIMI, kimi_facts(1020 * 10**9), GPUS)
    assert finding.level == "stops" and "has 0 bytes" in finding.told and "tensor_parallel_size" in finding.remedy


def test_a_pipeline_of_another_version_is_told(project: Path) -> None:
    dvc = Path("dvc.yaml")
    dvc.write_text(dvc.read_text().replace("python -m stages.train ", "srun python -m stages.train "))
    assert only("pipeline").level == "warning" and "runs train otherwise" in only("pipeline").told


@pytest.mark.parametrize("text", ["stages: [", "{}", "stages: {prompts: {cmd: x}}"])
def test_a_pipeline_that_is_none_stops(project: Path, text: str) -> None:
    Path("dvc.yaml").write_text(text)
    assert only("params").level == "stops" and "dvc.yaml" in only("params").told
