"""Recording with real vLLM, against transformers: a verifier of Kimi's kind (latent attention, mixture of experts),
and one that is spread over two ranks."""

import json
import os
import shutil
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle3.schemas import STATES
from eagle3.shards import open_shard
from eagle3.tables import read_table
from stages.extract import extract
from tests.pinning import on_cores
from tests.token_tables import greedy_samples, token_row, write_params, write_tokens, write_verifier_json

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.usefixtures("one_core")]
AUX = [2, 3, 4]
PLAIN = {"rope_type": "default", "rope_theta": 50000.0}


@pytest.mark.parametrize("positions", ["yarn", "plain"])
def test_states_of_latent_attention(tiny_kimi: Path, tmp_path: Path, positions: str) -> None:
    """With rope of both kinds: the CPU kernel of vLLM 0.32 turns the wrong values for the plain one (engine.py)."""
    verifier = tmp_path / "verifier"
    shutil.copytree(tiny_kimi, verifier)
    config = json.loads((verifier / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "yarn"
    if positions == "plain":
        (verifier / "config.json").write_text(json.dumps(config | {"rope_parameters": PLAIN}))
    require_right_states(tmp_path, verifier, tolerance=2e-3)


def test_e11_two_ranks_write_every_state_once(tiny_verifier: Path, tmp_path: Path) -> None:
    """Tensor parallelism: one rank writes, and its engine ends with the stage, ranks included."""
    with on_cores(range(os.cpu_count() or 1)):
        require_right_states(tmp_path, tiny_verifier, tolerance=2e-4, engine__tensor_parallel_size=2)
    assert not psutil.Process().children(recursive=True)


def require_right_states(folder: Path, verifier: Path, tolerance: float, **settings: object) -> None:
    """Record samples of the verifier's own; every state must be that of transformers."""
    params = write_params(folder / "params.yaml", verifier, verifier__aux_layer_ids=AUX, **settings)
    write_verifier_json(folder / "verifier.json", params)
    lengths = [(5 + 3 * number, 20 + 2 * number) for number in range(16)]
    samples = greedy_samples(verifier, lengths)
    rows = [token_row(ids, prompt) for ids, (prompt, _) in zip(samples, lengths, strict=True)]
    write_tokens(folder / "tokens", rows)
    names = ("tokens", "verifier.json", "hidden_states", "metrics.json", "params.yaml")
    extract(*(folder / name for name in names))

    model = AutoModelForCausalLM.from_pretrained(verifier, dtype="auto")
    before_norm: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0][0]))
    entries = list(read_table(folder / "hidden_states" / "index.parquet", STATES))
    assert len(entries) == len(samples)
    for entry, ids in zip(entries, samples, strict=True):
        sample = open_shard(folder / "hidden_states" / entry["shard"]).sample(entry["position"])
        with torch.inference_mode():
            expected = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        aux = torch.cat([expected[layer][0] for layer in AUX], dim=1)
        torch.testing.assert_close(sample.aux_hidden_states, aux, atol=tolerance, rtol=1e-3)
        torch.testing.assert_close(sample.last_hidden_states, before_norm.pop(), atol=tolerance, rtol=1e-3)
