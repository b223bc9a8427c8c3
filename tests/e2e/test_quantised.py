"""A verifier whose weights are quantised (int8, compressed-tensors) is recorded, and sped up by a draft that is not."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.acceptance import Setting
from eagle3.serving.speculative import Decoder, sampling_fields
from stages.extract import extract
from tests.draft_data import verifier_params
from tests.e2e.test_speculative import DEFAULT, ENGINE, STEPS, make_draft, prompts
from tests.tiny_verifiers import build_tiny_verifier
from tests.token_tables import token_row, write_params, write_tokens, write_verifier_json

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTISATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**INT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**INT8, "strategy": "token", "dynamic": True},
        }
    },
}


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny verifier whose projections are int8 with a scale per row, as Kimi's experts are int4."""
    folder = build_tiny_verifier(tmp_path_factory.mktemp("verifier") / "int8", tied=False)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 127
        tensors[f"{name}_scale"] = scale
        tensors[name] = (tensors[name] / scale).round().to(torch.int8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTISATION}))
    return folder


def test_its_states_pass_the_gates(quantised: Path, tmp_path: Path) -> None:
    params = write_params(tmp_path / "params.yaml", quantised, verifier__aux_layer_ids=[2, 4, 5])
    write_verifier_json(tmp_path / "verifier.json", params)
    choice = random.Random(5)
    texts = [[choice.randrange(3, 600) for _ in range(choice.randrange(20, 90))] for _ in range(20)]
    write_tokens(tmp_path / "tokens", [token_row(ids, 10, greedy=False, rebuilt=True) for ids in texts])
    names = ("tokens", "verifier.json", "hidden_states", "metrics.json", "params.yaml")
    extract(*(tmp_path / name for name in names))
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["rows_out"] == 20
    assert metrics["head_agreement"] >= 0.97


def test_x09_a_plain_draft_does_not_inherit_the_quantisation(quantised: Path, tmp_path: Path) -> None:
    draft = make_draft(quantised, tmp_path / "draft")
    own = DEFAULT.evaluate.model_copy(update={"max_new_tokens": 24})
    asked = prompts(quantised, 8)
    with Decoder(verifier_params(quantised), ENGINE, quantised, draft, STEPS) as decoder:
        decoder.wait_until_ready()
        sampling = [sampling_fields(own, prompt, 100) for prompt in asked]
        answers = decoder.decode(asked, sampling, Setting(STEPS, len(asked)), 0).answers
    steps = [step for answer in answers for step in answer.steps]
    assert len(steps) > 50
    assert sum(step.accepted for step in steps) > 0
