"""Sizes of a model come from its files alone."""

import json
from pathlib import Path

import pytest

from eagle3.model_facts import read_facts, recommended_sampling


def write_config(folder: Path, config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


PLAIN = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
LATENT = {**PLAIN, "num_hidden_layers": 61, "hidden_size": 7168, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


def test_the_tiny_verifier(tiny_verifier: Path) -> None:
    facts = read_facts(tiny_verifier)
    assert (facts.architecture, facts.num_layers, facts.hidden_size) == ("LlamaForCausalLM", 8, 128)
    assert (facts.positions, facts.dtype, facts.num_heads) == (512, "float32", 4)
    assert facts.cache_bytes("float32") == 8 * 2 * 2 * 32 * 4  # layers, keys and values, heads, width, bytes
    assert facts.weight_bytes == (tiny_verifier / "model.safetensors").stat().st_size


def test_the_kv_cache_of_a_token_as_the_models_pages_have_it(tmp_path: Path) -> None:
    assert read_facts(write_config(tmp_path, PLAIN)).cache_bytes("bfloat16") == 131_072  # 128 KiB
    latent = read_facts(write_config(tmp_path, LATENT))
    assert latent.cache_bytes("bfloat16") == 61 * 576 * 2  # 68.6 KiB, as DeepSeek-V3 and Kimi-K2 have it
    assert latent.recorded_bytes(3, "bfloat16") == 61 * 576 * 2 + 4 * 7168 * 2


def test_a_text_model_inside_another(tmp_path: Path) -> None:
    whole = {"architectures": ["Both"], "model_type": "both", "vision_config": {"hidden_size": 1}, "text_config": PLAIN}
    facts = read_facts(write_config(tmp_path, whole))
    assert (facts.architecture, facts.model_type, facts.hidden_size, facts.dtype) == ("Both", "both", 4096, "bfloat16")


def test_bytes_of_weights_that_are_not_there_come_from_their_index(tmp_path: Path) -> None:
    folder = write_config(tmp_path, PLAIN)
    (folder / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 16060522496}, "weight_map": {}}')
    assert read_facts(folder).weight_bytes == 16_060_522_496


@pytest.mark.parametrize("config", [{}, [], {**PLAIN, "hidden_size": "wide"}, {**LATENT, "qk_rope_head_dim": None}])
def test_what_is_no_language_model_is_named(tmp_path: Path, config: object) -> None:
    with pytest.raises(ValueError, match=r"config\.json: no"):
        read_facts(write_config(tmp_path, config))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json: not readable"):
        read_facts(tmp_path)


def test_sampling_is_what_the_model_recommends(tmp_path: Path) -> None:
    assert recommended_sampling(tmp_path) == {}
    config = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert recommended_sampling(tmp_path) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    assert recommended_sampling(tmp_path) == {}  # greedy: the temperature is not used
