"""`eagle3 lineage`: a whole chain is proven link by link, and whatever was changed in it is named."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import Result

from eagle3.lineage import read_lineage
from eagle3.schemas import PROMPTS, TOKENS
from eagle3.tables import read_table, write_table
from tests.dvc_project import eagle3
from tests.lineage_project import (
    answers,
    commit,
    dvc,
    edit_params,
    enter,
    make_chain,
    rewrite,
    train_here,
    write_answers,
    write_data,
)
from tests.tiny_verifiers import build_tiny_verifier
from tests.token_tables import write_tokens

pytestmark = pytest.mark.usefixtures("one_thread")
LINKS = ["draft", "vocabulary", "verifier", "hidden states", "tokens", "answers", "prompts", "params", "commit"]


@pytest.fixture(scope="module")
def template(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as monkeypatch:
        made = make_chain(tmp_path_factory.mktemp("lineage") / "all" / "project", tiny_verifier, monkeypatch)
        dvc("push")
    return made


@pytest.fixture
def project(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = enter(template, tmp_path / "copy")
    monkeypatch.setenv("EAGLE3_WORK_DIR", str(folder / ".work"))
    return folder


def statuses(result: Result) -> dict[str, str]:
    """Status of each link that the text names."""
    found = {}
    for line in result.stdout.splitlines():
        for status in ("proven", "agrees", "unknown", "BROKEN"):
            if line.startswith(f"  {status:<9}"):
                found[line[11:27].strip()] = status
    return found


def broken(result: Result) -> list[str]:
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    return [name for name, status in statuses(result).items() if status == "BROKEN"]


def test_a_whole_chain_is_proven_link_by_link(project: Path) -> None:
    done = eagle3("lineage", "--check")
    assert done.exit_code == 0, done.output
    assert statuses(done) == {name: "agrees" if name == "commit" else "proven" for name in LINKS}
    assert eagle3("verify").exit_code == 0
    told = eagle3("lineage").stdout
    for text in ("24 samples", "24 prompts", "temperature 0.0", "mine.jsonl md5", "learning_rate 0.003", "commit"):
        assert text in told
    assert "proven" not in told


def test_it_is_told_from_other_folders_too(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place in (project, project / "data/draft"):
        done = eagle3("lineage", "--check", str(place))
        assert done.exit_code == 0 and statuses(done)["prompts"] == "proven" and statuses(done)["commit"] == "agrees"


def test_json_has_all_of_it(project: Path) -> None:
    found = json.loads(eagle3("lineage", "--check", "--json").stdout)
    assert [link["link" if "link" in link else "name"] for link in found["links"]] == LINKS
    assert found["lineage"] == json.loads(Path("data/draft/lineage.json").read_text())
    stages = found["lineage"]["origin"]["stages"]
    assert set(stages) == {"extract", "reconstruct-tokens", "generate", "prompts", "verifier"}
    assert stages["extract"]["deps"]["data/tokens"] == stages["reconstruct-tokens"]["outs"]["data/tokens"]
    assert stages["prompts"]["deps"].keys() == {"mine.jsonl"}


def test_nothing_of_this_machine_or_its_network_travels_along(project: Path, tiny_verifier: Path) -> None:
    for path in Path("data/draft").glob("*.*"):
        data = path.read_bytes()
        for secret in (b"secret-word", b"10.1.2.3", str(tiny_verifier.parent).encode(), str(project).encode()):
            assert secret not in data, path


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    rewrite(path, bytes(data))


def change_weights() -> None:
    flip(Path("data/draft/model.safetensors"), -3)


def change_config() -> None:
    path = Path("data/draft/config.json")
    rewrite(path, path.read_bytes().replace(b'"norm_before_residual": true', b'"norm_before_residual": false'))


def change_verifier() -> None:
    path = Path("data/verifier.json")
    told = json.loads(path.read_text())
    rewrite(path, json.dumps(told | {"digest": "e" * 64}).encode())


def change_index() -> None:
    path = Path("data/hidden_states/index.parquet")
    table = pq.read_table(path)
    path.unlink()
    pq.write_table(table.slice(1), path)


def change_a_state() -> None:
    flip(sorted(Path("data/hidden_states").glob("*.safetensors"))[1], -100)


def change_a_token() -> None:
    rows = [row for part in Path("data/tokens").glob("part-*") for row in read_table(part, TOKENS)]
    rows[5]["input_ids"][-1] += 1
    write_tokens(Path("data/tokens"), rows)


def lose_a_sample() -> None:
    rows = [row for part in Path("data/tokens").glob("part-*") for row in read_table(part, TOKENS)]
    write_tokens(Path("data/tokens"), rows[1:])


def change_an_answer() -> None:
    rows = answers()
    rows[7]["output_token_ids"][0] += 1
    write_answers(rows)


def change_who_answered() -> None:
    rows = answers()
    rows[7]["verifier_digest"] = "e" * 64
    write_answers(rows)


def change_a_prompt() -> None:
    path = Path("data/prompts/train.parquet")
    rows = list(read_table(path, PROMPTS))
    rows[3]["messages"][0]["content"] += "?"
    path.unlink()
    write_table(path, rows, PROMPTS)


def lose_a_prompt() -> None:
    path = Path("data/prompts/validation.parquet")
    rows = list(read_table(path, PROMPTS))
    path.unlink()
    write_table(path, rows[1:], PROMPTS)


@pytest.mark.parametrize(
    ("change", "link", "told"),
    [
        (change_weights, ["draft"], "model.safetensors was changed after training"),
        (change_config, ["draft"], "config.json was changed after training"),
        (change_verifier, ["verifier"], "data/verifier.json is of"),
        (change_index, ["hidden states"], "names other states than those that the draft was trained on"),
        (change_a_state, ["hidden states"], ".safetensors differs from its digest"),
        (change_a_token, ["tokens"], "differs from its own digest"),
        (lose_a_sample, ["tokens"], "1 samples are missing"),
        (change_an_answer, ["answers"], "1 samples are other than those"),
        (change_who_answered, ["answers"], "is of verifier eeee"),
        (change_a_prompt, ["prompts"], "1 samples are other than those"),
        (lose_a_prompt, ["prompts"], "lacks 1 of the 24 prompts"),
        (lambda: edit_params("train", "learning_rate", 0.5), ["params"], "train.learning_rate is 0.5, was 0.003"),
        (lambda: edit_params("generate", "temperature", 0.6), ["params"], "generate.temperature is 0.6, was 0.0"),
    ],
)
def test_what_was_changed_is_named(project: Path, change: Callable[[], None], link: list[str], told: str) -> None:
    change()
    done = eagle3("lineage", "--check")
    assert broken(done) == link
    [line] = [line for line in done.stdout.splitlines() if line.startswith("  BROKEN")]
    assert told in line


def test_data_of_another_verifier_is_refuted(project: Path, tmp_path: Path) -> None:
    """The same prompts, answered by a verifier with other weights."""
    for name in ("prompts", "responses", "tokens", "hidden_states"):
        shutil.rmtree(f"data/{name}")
    Path("data/verifier.json").unlink()
    write_data(build_tiny_verifier(tmp_path / "other", seed=3))
    done = eagle3("lineage", "--check")
    assert broken(done) == ["verifier", "hidden states", "tokens"]
    assert statuses(done)["answers"] == "unknown"  # nothing here names the samples that the draft was trained on


def test_tables_that_were_written_anew_with_the_same_samples_are_the_same(project: Path) -> None:
    rows = answers()
    for row in rows:
        row["latency_s"] = 7.0
    write_answers(rows)
    assert eagle3("lineage", "--check").exit_code == 0


def test_answers_without_ids_are_not_called_proven(project: Path) -> None:
    rows = answers()
    for row in rows[:3]:
        row["output_token_ids"] = None
    write_answers(rows)
    done = eagle3("lineage", "--check")
    assert done.exit_code == 0 and "21 answers have the ids" in done.stdout and "3 more have text alone" in done.stdout
    for row in rows:
        row["output_token_ids"] = None
    write_answers(rows)
    assert statuses(eagle3("lineage", "--check"))["answers"] == "unknown"


def test_a_setting_that_made_the_same_data_breaks_nothing_once_dvc_has_run_it(project: Path) -> None:
    edit_params("generate", "seed", 5)
    assert broken(eagle3("lineage", "--check")) == ["params"]
    dvc("commit", "--force", "generate")
    done = eagle3("lineage", "--check")
    assert done.exit_code == 0 and "generate.seed is 5, was 0, which made the same data" in done.stdout


def test_data_that_is_not_here_is_compared_by_what_dvc_recorded(project: Path) -> None:
    for name in ("hidden_states", "tokens", "responses", "prompts"):
        shutil.rmtree(f"data/{name}")
    Path("data/verifier.json").unlink()
    done = eagle3("lineage", "--check")
    assert done.exit_code == 0
    assert {status for name, status in statuses(done).items() if name in LINKS[2:7]} == {"agrees"}
    record = read_lineage(Path("data/draft")).origin
    assert record is not None
    replace_in_lock(record.stages["generate"].outs["data/responses"])
    done = eagle3("lineage", "--check")  # answers may be written anew with the same ids: only reading them tells
    assert done.exit_code == 0 and statuses(done)["answers"] == "unknown"
    assert "reading it tells whether the samples are the same" in done.stdout
    replace_in_lock(record.stages["extract"].outs["data/hidden_states"])  # states are compared to the bit anyhow
    assert broken(eagle3("lineage", "--check")) == ["hidden states"]


def replace_in_lock(md5: str) -> None:
    text = Path("dvc.lock").read_text()
    assert md5 in text
    Path("dvc.lock").write_text(text.replace(md5, "0" * 32 + ".dir"))


def test_a_draft_that_somebody_sent_is_checked_as_far_as_it_goes(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree("data/draft", tmp_path / "received")
    shutil.move(project, tmp_path / "gone")
    monkeypatch.chdir(tmp_path)
    done = eagle3("lineage", "received", "--check")
    assert done.exit_code == 0
    assert statuses(done) == {"draft": "proven", "vocabulary": "proven", "the rest": "unknown"}
    flip(tmp_path / "received/model.safetensors", -3)
    assert broken(eagle3("lineage", "received", "--check")) == ["draft"]
    (tmp_path / "received/model.safetensors").unlink()
    assert statuses(eagle3("lineage", "received", "--check"))["draft"] == "unknown"


def test_a_revision_is_read_without_checking_it_out(project: Path) -> None:
    first = Path("data/draft/lineage.json").read_bytes()
    subprocess.run(["git", "tag", "first"], check=True)
    edit_params("train", "learning_rate", 0.01)
    train_here()
    dvc("commit", "--force", "train")
    commit("another draft")
    for revision in ("first", "HEAD~1"):
        found = json.loads(eagle3("lineage", revision, "--json").stdout)
        assert found["lineage"] == json.loads(first)
    done = eagle3("lineage", "first", "--check")
    assert done.exit_code == 0, done.output
    assert statuses(done)["hidden states"] == "proven" and statuses(done)["params"] == "proven"
    assert "learning_rate 0.01" in eagle3("lineage", "HEAD").stdout


def test_a_revision_whose_objects_are_only_on_the_remote(project: Path) -> None:
    shutil.rmtree(".dvc/cache")
    shutil.rmtree("data")
    done = eagle3("lineage", "HEAD")
    assert done.exit_code == 0 and "24 samples" in done.stdout
    checked = eagle3("lineage", "HEAD", "--check")
    assert checked.exit_code == 0 and statuses(checked)["draft"] == "unknown"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere"], "revision nowhere: "),
        (["data/tokens"], "data/tokens/lineage.json: no such file"),
        (["data/tokens", "--check"], "data/tokens/lineage.json: no such file"),
    ],
)
def test_a_draft_that_is_not_there_is_one_line(project: Path, words: list[str], told: str) -> None:
    done = eagle3("lineage", *words)
    assert done.exit_code == 1
    [line] = done.stderr.splitlines()
    assert line.startswith(f"error: {told}")


def test_before_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert eagle3("lineage").stderr.startswith("error: data/draft is not there yet; `dvc repro` makes it")
    assert "lies in no DVC repository" in eagle3("lineage", "HEAD").stderr


def test_the_objects_that_it_names_are_looked_for_on_the_remote(project: Path) -> None:
    done = eagle3("lineage", "--remote")
    assert done.exit_code == 0, done.output
    assert "agrees   remote local" in done.stdout
    answer = next(Path("data/responses").glob("part-*"))
    [stored] = [p for p in Path("../remote").rglob("*") if p.is_file() and p.read_bytes() == answer.read_bytes()]
    stored.unlink()
    gone = eagle3("lineage", "--remote", "--json")
    assert gone.exit_code == 1
    [link] = json.loads(gone.stdout)["links"]
    assert link["status"] == "BROKEN" and f"data/responses/{answer.name}" in link["told"]


def test_the_remote_is_asked_for_the_draft_too(project: Path) -> None:
    weights = Path("data/draft/model.safetensors").read_bytes()
    [stored] = [p for p in Path("../remote").rglob("*") if p.is_file() and p.read_bytes() == weights]
    stored.unlink()
    assert "data/draft/model.safetensors" in eagle3("lineage", "--remote").stdout
    shutil.copytree("data/draft", "received")
    assert eagle3("lineage", "received", "--remote").exit_code == 0  # that one is not this project's to keep


def test_commit_and_changed_files_are_noted_once_for_a_training_run(project: Path) -> None:
    first = Path("data/draft/lineage.json").read_bytes()
    state = read_lineage(Path("data/draft")).origin
    assert state is not None and state.git is not None and state.git.uncommitted == ()
    Path("mine.jsonl").write_text("changed\n")
    commit("later")
    train_here()  # the run is finished in the work store: it is only exported again
    assert Path("data/draft/lineage.json").read_bytes() == first
    shutil.rmtree(".work/train")
    edit_params("train", "seed", 3)
    Path("new.txt").write_text("git does not know it")
    train_here()
    state = read_lineage(Path("data/draft")).origin
    assert state is not None and state.git is not None
    head = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert state.git.commit == head and state.git.uncommitted == ("params.yaml",)


def test_outside_git_and_dvc_the_draft_still_has_a_lineage(project: Path) -> None:
    for name in (".git", ".dvc", ".work"):
        shutil.rmtree(name)
    Path("dvc.lock").unlink()
    os.environ["GIT_CEILING_DIRECTORIES"] = str(project.parent)
    try:
        train_here()
        done = eagle3("lineage", "--check")
    finally:
        del os.environ["GIT_CEILING_DIRECTORIES"]
    assert done.exit_code == 0, done.output
    assert statuses(done)["commit"] == "unknown" and statuses(done)["prompts"] == "proven"


def test_the_card_has_the_numbers_of_this_drafts_evaluation_and_of_no_other(project: Path) -> None:
    assert "Not measured" in eagle3("card").stdout
    Path("data/metrics/evaluate.json").write_text('{"acceptance_length": 1.9, "best_num_speculative_tokens": 5}')
    assert "Not measured" in eagle3("card").stdout  # nobody says whose numbers they are
    dvc("commit", "--force", "evaluate")
    for told in (eagle3("card").stdout, shared_card("out")):
        assert "| `acceptance_length` | 1.9 |" in told and '"num_speculative_tokens": 5' in told
    assert "Not measured" in Path("data/draft/README.md").read_text()
    assert eagle3("card", "out").stdout.count("Not measured") == 1  # another directory is another draft
    edit_params("train", "learning_rate", 0.01)
    train_here()
    dvc("commit", "--force", "train")
    assert "Not measured" in eagle3("card").stdout


def shared_card(out: str) -> str:
    assert eagle3("export", "data/draft", out, "--format", "speculators").exit_code == 0
    return Path(out, "README.md").read_text()


def edited(changes: dict[str, Any]) -> None:
    path = Path("data/draft/lineage.json")
    rewrite(path, json.dumps(json.loads(path.read_text()) | changes).encode())


def test_hostile_text_reaches_no_terminal(project: Path) -> None:
    told = json.loads(Path("data/draft/lineage.json").read_text())
    evil = "\x1b]0;owned\x07\x1b[2J<script>\u202e\n  proven   draft"
    told["verifier"]["name"] = told["verifier"]["engine"] = told["license"] = evil
    told["origin"]["packages"] = {evil: evil}
    told["origin"]["git"] = {"commit": "--output=x", "uncommitted": [evil]}
    told["origin"]["stages"]["generate"]["outs"] = {evil: "../../../etc/passwd"}
    told["origin"]["params"]["generate"][evil] = evil
    told["draft"]["../../secret"] = "0"
    rewrite(Path("data/draft/lineage.json"), json.dumps(told).encode())
    for words in (["--check"], ["--remote"], ["--check", "--json"], []):
        done = eagle3("lineage", *words)
        assert "\x1b" not in done.output and "\x07" not in done.output and "\u202e" not in done.output
        assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not a draft's lineage"),
        ('{"format": 1}', "not a draft's lineage of format 1 (draft: Field required)"),
        ('{"draft": {"model.safetensors": 3}}', "not a draft's lineage"),
        (" " * (1 << 24) + "{}", "a lineage has at most"),
    ],
)
def test_a_file_that_is_no_lineage_is_one_line(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "lineage.json").write_text(text)
    done = eagle3("lineage", str(tmp_path))
    assert done.exit_code == 1
    [line] = done.stderr.splitlines()
    assert told in line


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"format": 2}, "a lineage of format 2; this version reads format 1"),
        ({"tokens": None}, "neither trained nor imported; it is damaged"),
        ({"imported": {"form": "plain", "files": {}}}, "both trained and imported; it is damaged"),
    ],
)
def test_a_lineage_that_cannot_be_is_refused(project: Path, changes: dict[str, Any], told: str) -> None:
    edited(changes)
    done = eagle3("lineage", "--check")
    assert done.exit_code == 1 and told in done.stderr and "Traceback" not in done.output


@pytest.mark.parametrize("names", [[], ["config.json"], ["model.safetensors"]])
def test_a_lineage_that_leaves_out_a_file_of_the_draft_proves_nothing(project: Path, names: list[str]) -> None:
    told = json.loads(Path("data/draft/lineage.json").read_text())["draft"]
    edited({"draft": {name: told[name] for name in names}})
    assert broken(eagle3("lineage", "--check")) == ["draft"]


def test_a_vocabulary_that_the_weights_contradict_is_refuted(project: Path) -> None:
    told = json.loads(Path("data/draft/lineage.json").read_text())["vocabulary"]
    edited({"vocabulary": told | {"digest": "0" * 64, "size": 10**15}})
    assert broken(eagle3("lineage", "--check")) == ["vocabulary"]
