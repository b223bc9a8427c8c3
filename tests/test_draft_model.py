"""Sizes and rotary frequencies from the verifier's config, in every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.draft.model import DraftModel, DraftSizes, choose_sizes, initialise
from eagle3.params import TrainParams, load_params

PARAMS: TrainParams = load_params(Path(__file__).parent.parent / "params.yaml").train
CONFIG: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}


def sizes_of(config: dict[str, Any], max_positions: int = 128) -> DraftSizes:
    return choose_sizes(config, 3, 64, max_positions, PARAMS)


def frequencies(config: dict[str, Any]) -> torch.Tensor:
    return DraftModel(sizes_of(config)).rotary.inv_freq


def test_both_layouts_of_the_rotary_base_give_the_same_frequencies() -> None:
    old = frequencies({**CONFIG, "rope_theta": 1e6})
    new = frequencies({**CONFIG, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    assert torch.equal(old, new)
    torch.testing.assert_close(old, 1e6 ** -(torch.arange(16) / 16))


def test_scaling_survives_in_both_layouts() -> None:
    old = {**CONFIG, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}
    new = {**CONFIG, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}
    assert torch.equal(frequencies(old), frequencies(new))
    assert not torch.equal(frequencies(new), frequencies({**CONFIG, "rope_theta": 5e5}))
    assert sizes_of(old).rope_parameters == {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}


def test_the_config_that_was_read_is_not_changed() -> None:
    config = {**CONFIG, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}
    sizes_of(config)
    assert config["rope_scaling"] == {"rope_type": "llama3", **LLAMA3}


def test_sizes_may_be_others() -> None:
    config = {**CONFIG, "rope_theta": 1e4}
    own = PARAMS.model_copy(update={"intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 10})
    sizes = choose_sizes(config, 3, 64, 128, own)
    assert (sizes.intermediate_size, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim) == (96, 4, 2, 10)
    assert DraftModel(sizes).layers[0].self_attn.o_proj.weight.shape == (256, 40)
    for change, told in (
        ({"num_kv_heads": 3}, r"4 heads .* do not share 3 .* set train\.num_kv_heads"),
        ({"sliding_window": 2}, r"train\.sliding_window is 2, fewer tokens than train\.ttt_steps, 3"),
        ({"num_heads": 6}, r"width of 256 is no multiple of its 6 heads; set train\.num_heads"),
    ):
        with pytest.raises(ValueError, match=told):
            choose_sizes(config, 3, 64, 128, own.model_copy(update=change))


def test_sizes_are_those_of_a_verifier_layer() -> None:
    sizes = sizes_of({**CONFIG, "rope_theta": 1e4, "head_dim": 16})
    assert (sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, sizes.max_position_embeddings) == (8, 2, 16, 4096)
    assert sizes_of({**CONFIG, "rope_theta": 1e4}, max_positions=9000).max_position_embeddings == 9000
    nested = {"text_config": {**CONFIG, "rope_theta": 1e4}, "model_type": "vision"}
    assert sizes_of(nested) == sizes_of({**CONFIG, "rope_theta": 1e4})


@pytest.mark.parametrize(
    ("absent", "message"), [("intermediate_size", "intermediate_size"), ("rope_theta", "rope_theta")]
)
def test_a_missing_field_is_named(absent: str, message: str) -> None:
    config = {**CONFIG, "rope_theta": 1e4}
    del config[absent]
    with pytest.raises(ValueError, match=message):
        sizes_of(config)


def test_head_and_norm_start_from_the_verifier_and_the_rest_from_the_seed() -> None:
    sizes = sizes_of({**CONFIG, "rope_theta": 1e4})
    models = [DraftModel(sizes) for _ in range(3)]
    head, norm = torch.randn(64, 256), torch.randn(256)
    for model, seed in zip(models, (0, 0, 1), strict=True):
        initialise(model, head, norm, seed)
    for model in models:
        assert torch.equal(model.lm_head.weight, head) and torch.equal(model.norm.weight, norm)
    assert torch.equal(models[0].fc.weight, models[1].fc.weight)
    assert not torch.equal(models[0].fc.weight, models[2].fc.weight)
    assert all(torch.isfinite(parameter).all() for parameter in models[0].parameters())
