"""A small project for `eagle3 estimate`: real tables, a fake engine that writes real shards, real DVC.

python -m tests.estimate_project LAYOUTS: for each layout of a JSON list, a project whose work store, out and cache lie
on the filesystems it names; prints what was estimated, and what `stages.extract` and `dvc commit` then took of each.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from eagle3.cli import app
from eagle3.prompts import write_splits
from eagle3.serving import recorder
from eagle3.tables import Row
from eagle3.verifier import write_identity
from stages.extract import extract
from tests.fake_recording_engine import HIDDEN, VOCABULARY
from tests.test_extract import FAKE, IDENTITY, make_row
from tests.token_tables import write_params, write_tokens

ARGUMENTS = [
    Path(name)
    for name in ("data/tokens", "data/verifier.json", "data/hidden_states", "data/metrics/extract.json", "params.yaml")
]


def make_rows(count: int, seed: int = 0) -> list[Row]:
    """Samples that obey the fake verifier."""
    choice = random.Random(seed)
    return [make_row(choice) for _ in range(count)]


def write_project(rows: list[Row], **changes: object) -> None:
    """params.yaml, the verifier and its identity, the prompts and tokens of `rows`, in the current folder."""
    folder = Path("verifier")
    folder.mkdir(exist_ok=True)
    config = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "num_hidden_layers": 8, "hidden_size": HIDDEN}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {"model.embed_tokens.weight": torch.eye(VOCABULARY), "model.norm.weight": torch.ones(HIDDEN)}
    save_file(weights, folder / "model.safetensors")
    small = {"extract__shard_min_mib": 0.2, "extract__shard_max_mib": 0.6}
    write_params(Path("params.yaml"), folder.absolute(), **small | changes)
    write_identity(IDENTITY, Path("data/verifier.json"))
    write_prompts(rows)
    write_tokens(Path("data/tokens"), rows)


def write_prompts(rows: list[Row]) -> None:
    """data/prompts that ask for these samples."""
    write_splits(Path("data/prompts"), (prompt_of(row) for row in rows))


def prompt_of(row: Row) -> Row:
    """A row of schemas.PROMPTS."""
    asked = [{"role": "user", "content": "a question of thirty letters."}]
    prompt: Row = {"prompt_id": row["sample_id"], "source": "s", "source_row": 1, "category": "c"}
    return prompt | {"split": row["split"], "messages": asked, "reference": None}


def run_extract(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The stage with the fake engine; its metrics."""
    monkeypatch.setenv("EAGLE3_FAKE_REQUESTS", str(Path("requests.log").absolute()))
    monkeypatch.setattr(recorder, "ENGINE", FAKE)
    extract(*ARGUMENTS)
    found: dict[str, float] = json.loads(ARGUMENTS[3].read_text())
    return found


def estimated(*words: str) -> dict[str, Any]:
    """`eagle3 estimate --json` as data."""
    result = CliRunner().invoke(app, ["estimate", "--json", *words])
    assert result.exit_code in (0, 1), result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def used(mount: Path) -> int:
    """Bytes of a filesystem that are taken."""
    return shutil.disk_usage(mount).used


def try_layout(layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Estimate, extract, `dvc commit`. layout: work, project, cache (filesystems), type (cache.type)."""
    mounts = {place: Path(layout[place]) for place in ("work", "project", "cache")}
    name = layout["name"]
    project = mounts["project"] / name
    project.mkdir()
    os.chdir(project)
    monkeypatch.setenv("EAGLE3_WORK_DIR", str(mounts["work"] / name / "work"))
    for command in (
        "git init --quiet",
        "dvc init --quiet",
        f"dvc cache dir --local {mounts['cache'] / name / 'cache'}",
        f"dvc config cache.type {layout['type']}",
    ):
        subprocess.run(command.split(), check=True)
    Path(".gitignore").write_text("/data\n")
    Path("dvc.yaml").write_text("stages:\n  extract:\n    cmd: 'false'\n    outs: [data/hidden_states]\n")
    write_project(make_rows(120))
    before = {mount: used(mount) for mount in mounts.values()}
    first = estimated()
    run_extract(monkeypatch)
    subprocess.run(["dvc", "commit", "--quiet", "--force"], check=True)
    took = {str(mount): used(mount) - before[mount] for mount in mounts.values()}
    again = estimated()
    shards = sorted(Path("data/hidden_states").glob("*.safetensors"))
    kinds = sorted({"symlinks" if path.is_symlink() else "files" for path in shards})
    os.chdir(mounts["project"])
    for mount in set(mounts.values()):
        shutil.rmtree(mount / name, ignore_errors=True)
    return {"first": first, "again": again, "took": took, "shards": kinds}


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        print(json.dumps([try_layout(layout, patch) for layout in json.loads(sys.argv[1])]))
