"""Two real engines at once: recording by processes and by Ray's actors, and generating on two servers."""

import json
import random
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch

from eagle3.prompts import write_splits
from eagle3.schemas import RESPONSES, STATES
from eagle3.serving.endpoints import Endpoint
from eagle3.shards import open_shard
from eagle3.tables import Row, read_parts, read_table
from eagle3.verifier import read_identity
from stages.extract import extract
from stages.generate import generate
from tests.draft_data import Text, read_states
from tests.stage_runs import prompt_row
from tests.token_tables import greedy_samples, token_row, write_params, write_tokens, write_verifier_json

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.usefixtures("all_cores")]


def write_inputs(folder: Path, verifier: Path) -> list[Row]:
    params = write_params(folder / "params.yaml", verifier)
    write_verifier_json(folder / "verifier.json", params)
    choice = random.Random(0)
    lengths = [(choice.randrange(5, 60), choice.randrange(4, 90)) for _ in range(40)]
    rows = [token_row(ids, prompt) for ids, (prompt, _) in zip(greedy_samples(verifier, lengths), lengths, strict=True)]
    write_tokens(folder / "tokens", rows)
    return rows


def record(folder: Path, name: str, verifier: Path, monkeypatch: pytest.MonkeyPatch, **changes: object) -> list[Row]:
    """Record into folder/name with a work store of its own; the index."""
    monkeypatch.setenv("EAGLE3_WORK_DIR", str(folder / name / "work"))
    (folder / name).mkdir()
    write_params(
        folder / name / "params.yaml", verifier, extract__shard_min_mib=0.1, extract__shard_max_mib=0.3, **changes
    )
    outs = [folder / name / file for file in ("hidden_states", "metrics.json", "params.yaml")]
    extract(folder / "tokens", folder / "verifier.json", *outs)
    metrics = json.loads((folder / name / "metrics.json").read_text())
    assert metrics["head_agreement"] >= 0.97
    return list(read_table(outs[0] / "index.parquet", STATES))


def test_workers_record_the_states_of_transformers(
    tiny_verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same shards of the same samples, whoever has the workers."""
    rows = write_inputs(tmp_path, tiny_verifier)
    layers = read_identity(tmp_path / "verifier.json").aux_layer_ids
    expected = read_states(
        tiny_verifier, [Text(row["sample_id"], "train", row["input_ids"], row["loss_mask"]) for row in rows], layers
    )
    indexes = []
    for executor in ("local", "ray"):
        own = {"extract__executor": executor, "extract__workers": 2}
        index = record(tmp_path, executor, tiny_verifier, monkeypatch, **own)
        indexes.append([{k: v for k, v in entry.items() if k != "shard_sha256"} for entry in index])
        assert [entry["sample_id"] for entry in index] == [row["sample_id"] for row in rows]
        for entry, right in zip(index, expected, strict=True):
            shard = open_shard(tmp_path / executor / "hidden_states" / entry["shard"])
            sample = shard.sample(entry["position"])
            assert torch.equal(sample.input_ids, right.input_ids) and torch.equal(sample.loss_mask, right.loss_mask)
            torch.testing.assert_close(sample.aux_hidden_states, right.aux_hidden_states, atol=2e-4, rtol=1e-4)
            torch.testing.assert_close(sample.last_hidden_states, right.last_hidden_states, atol=2e-4, rtol=1e-4)
        logs = {path.name for path in (tmp_path / executor / "work" / "logs").iterdir()}
        assert {"extract-worker-1.log", "extract-worker-2.log"} <= logs
        assert logs & {"extract-1.log", "extract-2.log"}  # one may do all of it before the other's engine has started
    assert indexes[0] == indexes[1]
    assert not psutil.wait_procs(psutil.Process().children(recursive=True), 10)[1]


def test_two_servers_share_the_prompts(tiny_verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outs, answered = [], list[Counter[str]]()
    note = Endpoint.answered

    def noting(endpoint: Endpoint) -> None:
        answered[-1][endpoint.url] += 1
        note(endpoint)

    monkeypatch.setattr(Endpoint, "answered", noting)
    for servers in (1, 2):
        answered.append(Counter())
        folder = tmp_path / str(servers)
        folder.mkdir()
        monkeypatch.setenv("EAGLE3_WORK_DIR", str(folder / "work"))
        params = write_params(
            folder / "params.yaml",
            tiny_verifier,
            generate__servers=servers,
            generate__concurrency=8,
            generate__max_new_tokens=16,
        )
        write_verifier_json(folder / "verifier.json", params)
        write_splits(folder / "prompts", (prompt_row(n, f"question {n}") for n in range(40)))
        paths = ("prompts", "verifier.json", "responses", "metrics.json", "params.yaml")
        generate(*(folder / name for name in paths))
        rows = read_parts(folder / "responses", RESPONSES)
        outs.append([{k: row[k] for k in row if k not in ("latency_s", "attempts")} for row in rows])
    assert outs[0] == outs[1] and len(outs[0]) == 40
    assert [*answered[0].values()] == [40]
    assert len(answered[1]) == 2 and answered[1].total() == 40 and min(answered[1].values()) >= 8
    assert {path.name for path in (tmp_path / "2/work/logs").iterdir()} == {"generate-1.log", "generate-2.log"}
    assert not psutil.wait_procs(psutil.Process().children(recursive=True), 10)[1]
