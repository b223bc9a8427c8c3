"""What turns a verifier's last hidden states into logits: its embedding, final norm and head."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from eagle3.verifier import tensor_files


@dataclass(frozen=True)
class HeadWeights:
    """What turns a residual stream into logits: lm_head(norm(state)); [V, H], [H], [V, H], as stored."""

    embed_tokens: torch.Tensor
    norm: torch.Tensor
    lm_head: torch.Tensor
    rms_norm_eps: float

    def logits(self, last_hidden_states: torch.Tensor) -> torch.Tensor:
        """Verifier logits [T, V] in float32 from states before the final norm [T, H]."""
        states = last_hidden_states.float()
        scale = torch.rsqrt(states.square().mean(-1, keepdim=True) + self.rms_norm_eps)
        return (states * scale * self.norm.float()) @ self.lm_head.float().T


def load_head(folder: Path) -> HeadWeights:
    """Embedding, final norm and head from a directory: tied or not, one file or several.

    Raises ValueError that lists the keys found when a weight is under none of the usual names.
    """
    names = tensor_files(folder)
    config = json.loads((folder / "config.json").read_text())
    config = {**config, **config.get("text_config", {})}
    embed = _load_tensor(folder, names, ".embed_tokens.weight")
    tied = config.get("tie_word_embeddings", "lm_head.weight" not in names)
    head = embed if tied else _load_tensor(folder, names, "lm_head.weight")
    return HeadWeights(embed, _load_tensor(folder, names, "model.norm.weight"), head, float(config["rms_norm_eps"]))


def _load_tensor(folder: Path, names: dict[str, str], ending: str) -> torch.Tensor:
    found = [name for name in names if name.endswith(ending)]
    if len(found) != 1:
        listed = ", ".join(sorted(names)[:8])
        raise ValueError(
            f"{folder}: expected one tensor named ...{ending}, found {found or 'none'}; there are {listed} ..."
        )
    with safe_open(folder / names[found[0]], framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(found[0])
        return tensor
