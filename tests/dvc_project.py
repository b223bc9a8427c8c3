"""A small DVC project whose outs are real (shards of the fake engine) and whose stages never run."""

import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from eagle3.cli import app
from eagle3.digests import digest_file
from eagle3.schemas import RESPONSES
from eagle3.serving import recorder
from eagle3.tables import Account, Row, write_parts
from tests.fake_recording_engine import HIDDEN, VOCABULARY
from tests.test_extract import FAKE, Run, make_row
from tests.token_tables import PROJECT, write_params

STAGES = {
    "verifier": "data/verifier.json",
    "generate": "data/responses",
    "reconstruct-tokens": "data/tokens",
    "extract": "data/hidden_states",
    "train": "data/draft",
}


def make_project(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All outs, recorded in dvc.lock, in DVC's cache and, hidden states, in the work store; all hard links."""
    data = folder / "data"
    shutil.copytree(write_verifier(folder / "model"), data / "verifier")
    write_params(folder / "params.yaml", folder / "model", extract__shard_min_mib=0.2, extract__shard_max_mib=0.6)
    shutil.copyfile(folder / "params.yaml", data / "params.yaml")
    monkeypatch.setenv("EAGLE3_WORK_DIR", str(folder / ".work"))
    monkeypatch.setenv("EAGLE3_FAKE_REQUESTS", str(folder.with_name("requests.log")))
    monkeypatch.setattr(recorder, "ENGINE", FAKE)
    choice = random.Random(0)
    Run(data, monkeypatch).extract([make_row(choice) for _ in range(40)])
    write_responses(data / "responses")
    write_draft(data)
    lines = [f"  {stage}:\n    cmd: 'false'\n    outs: [{out}]\n" for stage, out in STAGES.items()]
    (folder / "dvc.yaml").write_text("stages:\n" + "".join(lines))
    (folder / ".gitignore").write_text("/data\n/.work\n/model\n")
    for command in (["git", "init", "--quiet"], ["dvc", "init", "--quiet"]):
        subprocess.run(command, cwd=folder, check=True)
    config = (PROJECT / ".dvc/config").read_text()
    (folder / ".dvc/config").write_text(config.replace("eagle3-dvc-remote", "remote"))
    subprocess.run(["dvc", "commit", "--quiet", "--force"], cwd=folder, check=True)
    return folder


def write_verifier(folder: Path) -> Path:
    """The folder of a model whose head obeys the fake engine's rule."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"rms_norm_eps": 1e-5, "tie_word_embeddings": True}))
    weights = {"model.embed_tokens.weight": torch.eye(VOCABULARY), "model.norm.weight": torch.ones(HIDDEN)}
    save_file(weights, folder / "model.safetensors")
    return folder


def write_responses(out: Path) -> None:
    """data/responses with a few rows."""
    account = Account("generate", 0)
    rows: list[Row] = [
        dict.fromkeys(RESPONSES.names) | {"prompt_id": f"{number}", "content": f"answer {number}"}
        for number in range(5)
    ]
    account.rows_in = account.rows_out = len(rows)
    write_parts(out, rows, RESPONSES, "prompt_id", account)


def write_draft(data: Path) -> None:
    """data/draft: weights, config and lineage."""
    draft = data / "draft"
    draft.mkdir()
    save_file({"fc.weight": torch.arange(1000, dtype=torch.float32)}, draft / "model.safetensors")
    (draft / "config.json").write_text("{}")
    (draft / "README.md").write_text("# a draft\n")
    lineage = {"draft": {"model.safetensors": digest_file(draft / "model.safetensors")}}
    (draft / "lineage.json").write_text(json.dumps(lineage))


def copy_project(project: Path, folder: Path) -> Path:
    """A copy in which hard links are hard links; the current folder from now on."""
    subprocess.run(["cp", "--archive", str(project), str(folder)], check=True)
    os.chdir(folder)
    return folder


def experiments(folder: Path) -> dict[str, str]:
    """The DVC experiments of a repository that are done: name -> commit."""
    words = ["git", "for-each-ref", "--format", "%(refname) %(objectname)", "refs/exps/??/*/*"]
    refs = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True).stdout
    return {name.rpartition("/")[2]: commit for name, commit in map(str.split, refs.splitlines())}


def eagle3(*words: str) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(app, [str(word) for word in words])


def lines(result: Result) -> list[str]:
    """What it found wrong, without the summary."""
    return result.stdout.splitlines()[:-1]
