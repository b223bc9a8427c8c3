"""`eagle3 init`: a project around any verifier and prompts, whole or not there at all."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner, Result

from eagle3 import new_project
from eagle3.cli import app
from eagle3.library import code_of_stages, digest_path
from eagle3.machine import Gpu
from eagle3.model_facts import read_facts
from eagle3.params import Params, load_params
from eagle3.verifier_settings import read_verifier, reasoning_format, tensor_parallelism
from tests.fake_hub import COMMIT, fake_hub
from tests.tiny_verifiers import build_tiny_verifier

ROOT = Path(__file__).parent.parent
SHIPPED = load_params(ROOT / "params.yaml")
GIB = 2**30


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def init(*words: object) -> Result:
    return CliRunner().invoke(app, ["init", *map(str, words)])


def made(*words: object) -> Params:
    """A project `new` that was made; its settings."""
    result = init("new", *words)
    assert result.exit_code == 0, result.stderr
    return load_params(Path("new/params.yaml"))


def refused(*words: object) -> str:
    """What was said, in one line, instead of making the project `new`; nothing is left of it."""
    result = init("new", *words)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ") and "Traceback" not in result.stderr
    assert not Path("new").exists()
    return result.stderr


def git(*words: str, folder: str = "new") -> str:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def stages(folder: str = "new") -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = YAML(typ="safe", pure=True).load(Path(folder, "dvc.yaml").read_text())["stages"]
    return found


def test_without_options_it_is_the_demo() -> None:
    params = made()
    source = SHIPPED.prompts.sources[0].model_copy(update={"path": "prompts/starter.jsonl"})
    assert params == SHIPPED.model_copy(update={"prompts": SHIPPED.prompts.model_copy(update={"sources": [source]})})
    assert Path("new/prompts/starter.jsonl").read_bytes() == (ROOT / "data/prompts/starter.jsonl").read_bytes()
    assert git("status", "--porcelain") == ""
    assert git("log", "--format=%s").strip() == "eagle3 init"


def test_settings_are_read_from_the_verifier(tiny_verifier: Path) -> None:
    params = made("--verifier", tiny_verifier)
    assert params.verifier.model == str(tiny_verifier)
    assert (params.verifier.dtype, params.verifier.max_model_len) == ("float32", 512)
    assert params.generate.max_new_tokens == 409
    assert (params.verifier.aux_layer_ids, params.reasoning.format) == (None, "auto")


@pytest.mark.parametrize("words", [("--verifier", "link"), ("-S", "verifier.model=link")])
def test_a_relative_path_of_a_verifier_holds_from_anywhere(tiny_verifier: Path, words: tuple[str, str]) -> None:
    Path("link").symlink_to(tiny_verifier)
    assert made(*words).verifier.model == str(Path("link").absolute())


def test_a_shallow_verifier_gets_distinct_layers(tmp_path: Path) -> None:
    assert made("--verifier", build_tiny_verifier(tmp_path / "five", layers=5)).verifier.aux_layer_ids == [1, 2, 4]
    shutil.rmtree("new")
    told = refused("--verifier", build_tiny_verifier(tmp_path / "three", layers=3))
    assert "verifier.aux_layer_ids" in told and "3 layers" in told


def test_the_recommended_sampling_is_taken(tiny_verifier: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_verifier, tmp_path / "sampling"))
    config = json.loads((folder / "generation_config.json").read_text())
    sampling = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (folder / "generation_config.json").write_text(json.dumps(config | sampling))
    generate = made("--verifier", folder).generate
    assert (generate.temperature, generate.top_k, generate.top_p) == (0.6, 20, 0.95)


def test_settings_that_are_given_win_and_others_follow_from_them(tiny_verifier: Path) -> None:
    given = ["-S", "verifier.max_model_len=256", "-S", "verifier.dtype=bfloat16", "--set", "train.learning_rate=1e-4"]
    params = made("--verifier", tiny_verifier, *given)
    assert (params.verifier.max_model_len, params.verifier.dtype, params.train.learning_rate) == (256, "bfloat16", 1e-4)
    assert params.generate.max_new_tokens == 204


def test_the_kv_cache_holds_the_longest_request(tmp_path: Path) -> None:
    folder = build_tiny_verifier(tmp_path / "long", max_positions=40_960)
    engine = made("--verifier", folder).engine
    assert 10_240 * read_facts(folder).recorded_bytes(3, "float32") < engine.cpu_kv_cache_gib * GIB
    assert engine.cpu_kv_cache_gib == SHIPPED.engine.cpu_kv_cache_gib  # enough
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"head_dim": 2048}))
    settings = read_verifier(str(folder), None, SHIPPED, {}, []).settings
    needed = 10_240 * read_facts(folder).recorded_bytes(3, "float32") / GIB
    assert 2 < needed <= settings["engine.cpu_kv_cache_gib"] < needed + 1


@pytest.mark.parametrize(
    ("vocabulary", "template", "model_type", "expected"),
    [
        (set(), "", "llama", None),
        ({"<think>", "</think>"}, "<think>", "llama", None),
        ({"<think>", "</think>", "<tool_call>"}, "<think>", "qwen3", "qwen3"),
        ({"<think>", "</think>", "<tool_call>"}, "", "qwen3", None),  # an instruct model that does not think
        ({"<think>", "</think>", "<|tool_calls_section_begin|>"}, "<think>", "kimi_k25", "kimi-k2.5"),
        ({"<think>", "</think>", "<|tool_calls_section_begin|>"}, "<think>", "kimi_k2", "kimi-k2-thinking"),
        ({"<think>", "</think>", "<\uff5ctool\u2581calls\u2581begin\uff5c>"}, "<think>", "deepseek_v3", "deepseek-r1"),
    ],
)
def test_the_reasoning_preset(vocabulary: set[str], template: str, model_type: str, expected: str | None) -> None:
    assert reasoning_format(vocabulary, template, model_type) == expected


def test_gpus_are_shared_out(tiny_verifier: Path) -> None:
    gpus = [Gpu(str(number), "H200", 141 * 10**9, 0) for number in range(8)]
    found = read_verifier(str(tiny_verifier), None, SHIPPED, {}, gpus).settings
    assert (found["engine.tensor_parallel_size"], found["generate.servers"], found["extract.workers"]) == (1, 8, 8)
    assert found["train.nproc"] == found["train.gradient_accumulation"] == 8
    assert found["evaluate.side_by_side"] is False


@pytest.mark.parametrize(
    ("weights", "gpus", "ranks"),
    [(1, 1, 1), (60, 8, 1), (140, 8, 2), (595, 8, 8), (900, 8, 8), (140, 3, 2), (10, 3, 1)],
)
def test_tensor_parallelism_is_the_least_that_holds_the_weights(
    tiny_verifier: Path, weights: int, gpus: int, ranks: int
) -> None:
    facts = read_facts(tiny_verifier)
    facts = facts.__class__(**{**vars(facts), "num_heads": 64, "weight_bytes": weights * 10**9})
    assert tensor_parallelism(facts, [141 * 10**9] * gpus) == ranks


PROMPTS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "messages": ([{"messages": [{"role": "user", "content": f"question {n}"}]} for n in range(3)], "prompt"),
    "conversations": ([{"conversations": [{"from": "human", "value": f"question {n}"}]} for n in range(3)], "prompt"),
    "question": ([{"id": n, "question": f"question {n}", "answer": "yes"} for n in range(3)], "question"),
    "only one": ([{"number": n, "aufgabe": f"Frage {n}", "category": "de"} for n in range(3)], "aufgabe"),
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("shape", PROMPTS)
def test_shapes_of_prompt_files_are_recognised(tmp_path: Path, shape: str, kind: str) -> None:
    rows, column = PROMPTS[shape]
    file = tmp_path / f"train.{kind}"  # a name that the stages use too
    if kind == "jsonl":
        write_jsonl(file, rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), file)
    source = made("--prompts", file).prompts.sources[0]
    assert (source.path, source.name, source.text_column) == (f"prompts/train.{kind}", "train", column)
    assert stages()["prompts"]["deps"][0] == source.path
    assert Path("new", source.path).read_bytes() == file.read_bytes()
    assert not Path("new", source.path).samefile(file)


def test_several_files_each_with_its_own_column(tmp_path: Path) -> None:
    files = [write_jsonl(tmp_path / f"{name}.jsonl", PROMPTS[name][0]) for name in ("question", "messages")]
    params = made("--prompts", files[0], "--prompts", files[1])
    assert [(source.name, source.text_column) for source in params.prompts.sources] == [
        ("question", "question"),
        ("messages", "prompt"),
    ]
    assert stages()["prompts"]["deps"][:2] == ["prompts/question.jsonl", "prompts/messages.jsonl"]


def test_unusable_prompt_files_are_refused_with_their_columns(tmp_path: Path) -> None:
    two = write_jsonl(tmp_path / "two.jsonl", [{"eins": "a", "zwei": "b"}])
    told = refused("--prompts", two)
    assert "several columns have text (eins, zwei)" in told and "--text-column" in told
    assert made("--prompts", two, "--text-column", "zwei").prompts.sources[0].text_column == "zwei"
    shutil.rmtree("new")
    assert "it has eins, zwei" in refused("--prompts", two, "--text-column", "drei")
    assert "accepted are messages" in refused("--prompts", write_jsonl(tmp_path / "numbers.jsonl", [{"n": 1}]))
    assert "no such file" in refused("--prompts", tmp_path / "absent.jsonl").lower()
    (tmp_path / "empty.jsonl").touch()
    assert "the file is empty" in refused("--prompts", tmp_path / "empty.jsonl")
    (tmp_path / "broken.jsonl").write_text("{\n")
    assert "broken JSON" in refused("--prompts", tmp_path / "broken.jsonl")
    same = write_jsonl(tmp_path / "other" / "two.jsonl", [{"prompt": "x"}])
    assert "two files are called two" in refused("--prompts", same, "--prompts", write_jsonl(two, [{"prompt": "y"}]))


def test_large_prompt_files_go_to_dvc_and_leave_the_original_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_project, "IN_GIT_BYTES", 20)
    file = write_jsonl(tmp_path / "large.jsonl", PROMPTS["messages"][0])
    made("--prompts", file)
    assert set(git("ls-files", "prompts").split()) == {"prompts/.gitignore", "prompts/large.jsonl.dvc"}
    assert git("status", "--porcelain") == ""
    assert os.access(file, os.W_OK) and file.stat().st_nlink == 1


def test_every_out_is_ignored_and_every_stage_depends_on_its_code() -> None:
    made()
    shipped = YAML(typ="safe", pure=True).load((ROOT / "dvc.yaml").read_text())["stages"]
    assert set(stages()) == {"library", *shipped}
    for name, stage in stages().items():
        outs = [out for out in stage.get("outs", []) if isinstance(out, str)]
        for out in outs:
            git("check-ignore", "--quiet", "--no-index", out)
        if name == "library":
            assert outs == [digest_path(other) for other in shipped]
            continue
        assert digest_path(name) in stage["deps"]
        assert not [dep for dep in stage["deps"] if dep.endswith(".py") or Path(dep).is_absolute()]
        for part in ("cmd", "outs", "params", "metrics", "always_changed"):
            assert stage.get(part) == shipped[name].get(part)
        others = {dep for dep in shipped[name]["deps"] if dep not in code_of_stages()[name]}
        own = {"data/prompts/starter.jsonl": "prompts/starter.jsonl"}
        assert set(stage["deps"]) - {digest_path(name)} == {own.get(dep, dep) for dep in others}


def test_the_checkout_is_not_named_anywhere() -> None:
    made()
    for name in git("ls-files").split():
        assert str(ROOT) not in Path("new", name).read_text(), name


def test_a_project_that_is_there_stays_as_it_is() -> None:
    made()
    before = {path: path.read_bytes() for path in Path("new").rglob("*") if path.is_file()}
    result = init("new")
    assert result.exit_code == 1 and "params.yaml already" in result.stderr
    assert {path: path.read_bytes() for path in Path("new").rglob("*") if path.is_file()} == before


def test_files_of_others_are_not_touched_when_it_fails(tiny_verifier: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    broken = Path(shutil.copytree(tiny_verifier, tmp_path / "broken"))
    (broken / "model.safetensors").unlink()
    result = init(folder, "--verifier", broken)
    assert result.exit_code == 1 and "model.safetensors" in result.stderr
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert init(folder).exit_code == 0
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-S", "train.lrr=1"], "has no train.lrr"),
        (["-S", "train.epochs=four"], "train.epochs"),
        (["-S", "train.epochs"], "SECTION.KEY=VALUE"),
        (["-S", "prompts.sources=[]"], "--prompts"),
        (["-S", "train.nproc=2"], "train.gradient_accumulation"),
        (["-S", "prompts.validation_share=0.95"], "leave nothing to train on"),
        (["--verifier", "nowhere"], "neither a directory here nor a hub id"),
        (["--verifier", "."], "config.json: not readable"),
        (["--verifier", "bundled:other"], "is not bundled"),
    ],
)
def test_what_cannot_be_is_refused_by_name(words: list[str], told: str) -> None:
    assert told in refused(*words)


def test_a_verifier_without_a_chat_template_needs_one(tiny_verifier: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_verifier, tmp_path / "base"))
    template = (folder / "chat_template.jinja").rename(tmp_path / "own.jinja")
    assert "verifier.chat_template" in refused("--verifier", folder)
    params = made("--verifier", folder, "-S", "verifier.chat_template=own.jinja")
    assert params.verifier.chat_template == "own.jinja"  # in the project
    assert Path("new/own.jinja").read_bytes() == template.read_bytes()
    assert "own.jinja" in git("ls-files").split()


def test_inside_a_repository_that_is_the_users_to_commit() -> None:
    subprocess.run("git init -q . && git commit -q --allow-empty -m first", shell=True, check=True)
    result = init("new")
    assert result.exit_code == 0 and "git add it there" in result.stdout
    assert git("log", "--format=%s").strip() == "first"
    assert not Path("new/.git").exists()


def test_an_own_repository_without_a_commit_gets_one() -> None:
    subprocess.run(["git", "init", "-q", "new"], check=True)
    made()
    assert git("log", "--format=%s").strip() == "eagle3 init"


def test_git_needs_to_know_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a machine where git has no name for its user."""
    (tmp_path / "config").write_text("[user]\n\tuseConfigOnly = true\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    for name in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL", "EMAIL"):
        monkeypatch.delenv(name, raising=False)
    made()
    assert git("log", "--format=%an").strip() == "eagle3 init"


def test_a_hub_model_is_pinned_to_its_commit_and_no_weights_are_downloaded(tiny_verifier: Path, tmp_path: Path) -> None:
    """The real client of the hub against a hub on loopback."""
    prompts = write_jsonl(tmp_path / "mine.jsonl", PROMPTS["messages"][0])
    with fake_hub("owner/tiny", tiny_verifier) as (address, downloaded):
        environment = os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(ROOT)}
        environment.pop("HF_HUB_OFFLINE", None)
        command = [sys.executable, "-m", "eagle3.cli", "init", "new", "--prompts", str(prompts), "--verifier"]
        done = subprocess.run([*command, "owner/tiny"], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        absent = subprocess.run([*command, "owner/other"], env=environment, capture_output=True, text=True, check=False)
    verifier = load_params(Path("new/params.yaml")).verifier
    assert (verifier.model, verifier.revision, verifier.max_model_len) == ("owner/tiny", COMMIT, 512)
    assert "config.json" in downloaded and "model.safetensors" not in downloaded
    assert absent.returncode == 1 and "owner/other: its configuration cannot be had" in absent.stderr
