"""Recording a verifier of Kimi's kind (latent attention, mixture of experts) with real vLLM, against transformers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle3.schemas import STATES
from eagle3.shards import open_shard
from eagle3.tables import read_table
from stages.extract import extract
from tests.token_tables import greedy_samples, token_row, write_params, write_tokens, write_verifier_json

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.usefixtures("one_core")]
AUX = [2, 3, 4]
PLAIN = {"rope_type": "default", "rope_theta": 50000.0}


@pytest.mark.parametrize("positions", ["yarn", "plain"])
def test_states_are_those_of_transformers(tiny_kimi: Path, tmp_path: Path, positions: str) -> None:
    """With rope of both kinds: the CPU kernel of vLLM 0.32 turns the wrong values for the plain one (engine.py)."""
    verifier = tmp_path / "verifier"
    shutil.copytree(tiny_kimi, verifier)
    config = json.loads((verifier / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "yarn"
    if positions == "plain":
        (verifier / "config.json").write_text(json.dumps(config | {"rope_parameters": PLAIN}))
    params = write_params(tmp_path / "params.yaml", verifier, verifier__aux_layer_ids=AUX)
    write_verifier_json(tmp_path / "verifier.json", params)
    lengths = [(5 + 3 * number, 20 + 2 * number) for number in range(16)]
    samples = greedy_samples(verifier, lengths)
    write_tokens(
        tmp_path / "tokens", [token_row(ids, prompt) for ids, (prompt, _) in zip(samples, lengths, strict=True)]
    )
    names = ("tokens", "verifier.json", "hidden_states", "metrics.json", "params.yaml")
    extract(*(tmp_path / name for name in names))

    model = AutoModelForCausalLM.from_pretrained(verifier, dtype="auto")
    before_norm: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0][0]))
    entries = list(read_table(tmp_path / "hidden_states" / "index.parquet", STATES))
    assert len(entries) == len(samples)
    for entry, ids in zip(entries, samples, strict=True):
        sample = open_shard(tmp_path / "hidden_states" / entry["shard"]).sample(entry["position"])
        with torch.inference_mode():
            expected = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        aux = torch.cat([expected[layer][0] for layer in AUX], dim=1)
        torch.testing.assert_close(sample.aux_hidden_states, aux, atol=2e-3, rtol=1e-3)
        torch.testing.assert_close(sample.last_hidden_states, before_norm.pop(), atol=2e-3, rtol=1e-3)
