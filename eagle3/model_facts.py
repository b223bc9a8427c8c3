"""What the files of a model say of its size, without loading anything: config.json and the sizes of its weights."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX_FILE = "model.safetensors.index.json"
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class ModelFacts:
    """Of the text part of a model. cache_values: what one token takes of a KV cache, over all layers.

    dtype: None where the file names none that verifier.dtype knows. positions: max_position_embeddings.
    """

    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    positions: int
    cache_values: int
    dtype: str | None
    weight_bytes: int

    def cache_bytes(self, dtype: str) -> int:
        """What one token takes of a KV cache. Models that keep a window of tokens in some layers take less."""
        return self.cache_values * BYTES[dtype]

    def recorded_bytes(self, aux_layers: int, dtype: str) -> int:
        """What one token takes of the KV cache of an engine that records: its states lie there too."""
        return self.cache_bytes(dtype) + (aux_layers + 1) * self.hidden_size * BYTES[dtype]


def read_facts(folder: Path) -> ModelFacts:
    """The facts of a model directory. Raises ValueError that names the file and what it lacks."""
    path = folder / "config.json"
    whole = _read_json(path)
    config = {**whole, **whole.get("text_config", {})}
    try:
        layers, hidden, heads = (
            int(config[name]) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
        )
        positions = int(config["max_position_embeddings"])
        if "kv_lora_rank" in config:
            values = layers * (int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"]))
        else:
            width = int(config.get("head_dim") or hidden // heads)
            values = layers * 2 * width * int(config.get("num_key_value_heads") or heads)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: no sizes of a language model in there ({error!r})") from None
    dtype = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return ModelFacts(
        architecture=(whole.get("architectures") or ["?"])[0],
        model_type=str(whole.get("model_type", "?")),
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        positions=positions,
        cache_values=values,
        dtype=dtype if dtype in BYTES else None,
        weight_bytes=_weight_bytes(folder),
    )


def recommended_sampling(folder: Path) -> dict[str, float | int]:
    """The sampling that the model's generation_config.json recommends; empty where it recommends none."""
    path = folder / "generation_config.json"
    config = _read_json(path) if path.is_file() else {}
    if not config.get("do_sample"):
        return {}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: config[name] for name in names if isinstance(config.get(name), int | float)}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not readable ({error}); a model directory has it") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: not a JSON object")
    return found


def _weight_bytes(folder: Path) -> int:
    index = folder / INDEX_FILE
    said = _read_json(index).get("metadata", {}).get("total_size") if index.is_file() else None
    return int(said) if said else sum(path.stat().st_size for path in folder.glob("*.safetensors"))
