"""A small DVC project with a whole chain, prompts to draft: a tiny verifier's own answers and states, and `train`."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from eagle3.digests import canonical_json, digest, digest_tokens
from eagle3.draft.data import _opened
from eagle3.schemas import PROMPTS, RESPONSES
from eagle3.tables import Account, Row, read_table, write_parts, write_table
from eagle3.verifier import VerifierIdentity, identify_verifier, write_identity
from stages.train import train
from tests.draft_data import REASONING, Text, generate_texts, read_states, verifier_params, write_states
from tests.draft_runs import SETTINGS
from tests.token_tables import PROJECT, token_row, write_params, write_tokens

DATA = Path("data")
FOLDERS = ("prompts", "responses", "tokens", "hidden_states")
STAGES: dict[str, dict[str, Any]] = {
    "verifier": {"outs": ["data/verifier.json"], "params": ["reasoning", "verifier"]},
    "prompts": {
        "deps": ["mine.jsonl"],
        "outs": ["data/prompts/train.parquet", "data/prompts/validation.parquet"],
        "params": ["prompts"],
    },
    "generate": {
        "deps": ["data/prompts/train.parquet", "data/prompts/validation.parquet", "data/verifier.json"],
        "outs": ["data/responses"],
        "params": ["engine", "generate", "verifier"],
    },
    "reconstruct-tokens": {
        "deps": ["data/responses", "data/verifier.json"],
        "outs": ["data/tokens"],
        "params": ["reconstruct_tokens"],
    },
    "extract": {"deps": ["data/tokens", "data/verifier.json"], "outs": ["data/hidden_states"], "params": ["extract"]},
    "train": {"deps": ["data/hidden_states", "data/verifier.json"], "outs": ["data/draft"], "params": ["train"]},
    "evaluate": {"deps": ["data/draft"], "outs": [{"data/metrics/evaluate.json": {"cache": False}}]},
}
ARGUMENTS = [
    Path(f"data/{name}") for name in ("hidden_states", "verifier.json", "draft", "metrics/train.json", "plots")
]


def make_chain(folder: Path, verifier: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project: made, recorded in dvc.lock and committed to git, except that nothing is evaluated yet."""
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("EAGLE3_WORK_DIR", str(folder / ".work"))
    changes = {f"train__{name}": value for name, value in (SETTINGS | {"epochs": 1}).items()}
    endpoint = ["http://user:secret-word@10.1.2.3:8000/v1"]
    write_params(Path("params.yaml"), verifier, **changes, generate__endpoints=endpoint)
    stages = {name: {"cmd": "false", **stage} for name, stage in STAGES.items()}
    with Path("dvc.yaml").open("w") as file:
        YAML(typ="safe", pure=True).dump({"stages": stages}, file)
    Path(".gitignore").write_text("/data\n/.work\n")
    Path("mine.jsonl").write_text("".join(f'{{"prompt": "question {n}"}}\n' for n in range(24)))
    write_data(verifier)
    for command in (
        ["git", "init"],
        ["git", "config", "user.name", "t"],
        ["git", "config", "user.email", "t@localhost"],
    ):
        subprocess.run([*command, *(["--quiet"] if "init" in command else [])], check=True)
    subprocess.run(["dvc", "init", "--quiet"], check=True)
    config = (PROJECT / ".dvc/config").read_text()
    Path(".dvc/config").write_text(config.replace("eagle3-dvc-remote", "remote"))
    commit("before training")
    dvc("commit", "--force", *[name for name in STAGES if name not in ("train", "evaluate")])
    train_here()
    dvc("commit", "--force", "train")
    commit("after training")
    return folder


def write_data(verifier: Path) -> VerifierIdentity:
    """Prompts, answers, tokens and states of them, in data/."""
    identity = identify_verifier(verifier_params(verifier), REASONING)
    DATA.mkdir(exist_ok=True)
    write_identity(identity, DATA / "verifier.json")
    texts = []
    for number, made in enumerate(generate_texts(verifier, 24)):
        name = digest([["user", f"question {number}"]])
        texts.append(Text(name, made.split, made.input_ids, made.loss_mask))
    for split in ("train", "validation"):
        rows = [prompt_row(text, n) for n, text in enumerate(texts) if text.split == split]
        write_table(DATA / f"prompts/{split}.parquet", rows, PROMPTS)
    write_answers([answer_row(text, identity) for text in texts])
    write_tokens(DATA / "tokens", [sample_row(text) for text in texts])
    write_states(DATA / "hidden_states", texts, read_states(verifier, texts, identity.aux_layer_ids), identity)
    return identity


def prompt_row(text: Text, number: int) -> Row:
    return dict.fromkeys(PROMPTS.names) | {
        "prompt_id": text.sample_id,
        "split": text.split,
        "messages": [{"role": "user", "content": f"question {number}"}],
    }


def answer_row(text: Text, identity: VerifierIdentity) -> Row:
    prompt = text.loss_mask.index(True)
    return dict.fromkeys(RESPONSES.names) | {
        "prompt_id": text.sample_id,
        "sample": 0,
        "split": text.split,
        "prompt_token_ids": text.input_ids[:prompt],
        "output_token_ids": text.input_ids[prompt:],
        "sampling": canonical_json({"temperature": 0.0}),
        "latency_s": 1.0,
        "verifier_digest": identity.digest,
        "engine": identity.engine,
    }


def sample_row(text: Text) -> Row:
    row = token_row(text.input_ids, text.loss_mask.index(True), split=text.split)
    return row | {"sample_id": text.sample_id, "sample_digest": digest_tokens(text.input_ids, text.loss_mask)}


def write_answers(rows: list[Row]) -> None:
    """data/responses of these rows."""
    account = Account("generate", 0)
    account.rows_in = account.rows_out = len(rows)
    write_parts(DATA / "responses", rows, RESPONSES, "prompt_id", account)


def answers() -> list[Row]:
    """The rows of data/responses."""
    return [row for part in sorted(Path("data/responses").glob("part-*")) for row in read_table(part, RESPONSES)]


def edit_params(section: str, key: str, value: Any) -> None:
    yaml = YAML()
    params = yaml.load(Path("params.yaml").read_text())
    params[section][key] = value
    with Path("params.yaml").open("w") as file:
        yaml.dump(params, file)


def train_here() -> None:
    """The stage `train`, in this process and in the current folder."""
    _opened.cache_clear()  # it knows shards by their paths, which are the same in every project
    shutil.rmtree("data/draft", ignore_errors=True)  # as DVC does
    train(*ARGUMENTS, Path("params.yaml"))


def dvc(*words: str) -> None:
    subprocess.run(["dvc", words[0], "--quiet", *words[1:]], check=True)


def commit(message: str) -> str:
    """Commit everything; the commit."""
    subprocess.run(["git", "add", "--all"], check=True)
    subprocess.run(["git", "commit", "--quiet", "--allow-empty", "-m", message], check=True)
    return subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


def rewrite(path: Path, data: bytes) -> None:
    """New contents under a new inode: DVC's cache keeps the old ones."""
    path.unlink()
    path.write_bytes(data)


def enter(project: Path, folder: Path) -> Path:
    """A copy with its remote, hard links kept; the current folder from now on."""
    subprocess.run(["cp", "--archive", str(project.parent), str(folder)], check=True)
    os.chdir(folder / project.name)
    return folder / project.name
