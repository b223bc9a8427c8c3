"""Latent attention (MLA) of a draft, as vLLM serves DeepSeek's (vllm/model_executor/models/deepseek_v2.py).

Keys and values of all heads are made from one narrow latent row; a part of the key, the same for all heads, carries
the rotary positions. Training makes the keys and values of every head in full. Parameter names are the tensor names of
the export.

Letters: N rows, R query rows, H hidden size, h heads, d width of queries and keys, e width of values.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from eagle3.draft.layers import Linear, RMSNorm, RotaryAttention, rotate_pairs
from eagle3.params import TrainParams


@dataclass(frozen=True)
class LatentSizes:
    """Widths by DeepSeek's names; q_lora_rank None = queries are made from the input, without a latent row."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        """d."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


def choose_latent_sizes(config: dict[str, Any], params: TrainParams) -> LatentSizes:
    """From the verifier's (text) config, but for params. Raises ValueError that names what neither of them says."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes: dict[str, int] = {name: getattr(params, name) or config.get(name) or 0 for name in names}
    if absent := [name for name, size in sizes.items() if not size]:
        raise ValueError(
            f"latent attention of the draft: the verifier's config.json has no {', '.join(absent)}; "
            f"set train.{' and train.'.join(absent)}, or train.attention: heads"
        )
    if sizes["qk_rope_head_dim"] % 2:
        raise ValueError(f"train.qk_rope_head_dim is {sizes['qk_rope_head_dim']}; rotary positions need an even number")
    rank = config.get("q_lora_rank") if params.q_lora_rank is None else params.q_lora_rank
    return LatentSizes(q_lora_rank=rank or None, **sizes)


def latent_rope_parameters(rope_parameters: dict[str, Any]) -> dict[str, Any]:
    """The rotary parameters for transformers that give what vLLM's DeepSeek attention computes from `rope_parameters`.

    The two differ in the factor on cosine and sine where mscale or mscale_all_dim is left out. Raises ValueError for a
    kind that vLLM does not tell from yarn there.
    """
    kind = rope_parameters["rope_type"]
    if kind == "default":
        return {"rope_type": kind, "rope_theta": rope_parameters["rope_theta"]}
    needed = ("factor", "original_max_position_embeddings")
    if kind != "yarn" or any(not rope_parameters.get(name) for name in needed):
        raise ValueError(
            f"vLLM serves latent attention with plain rotary positions or with yarn that says {' and '.join(needed)}; "
            f"these are {rope_parameters}. Set train.attention: heads"
        )
    factor = rope_parameters["factor"]
    return {
        "rope_type": kind,
        "rope_theta": rope_parameters["rope_theta"],
        **{name: rope_parameters[name] for name in (*needed, "beta_fast", "beta_slow") if name in rope_parameters},
        "attention_factor": _stretch(factor, rope_parameters.get("mscale", 1))
        / _stretch(factor, rope_parameters.get("mscale_all_dim", 0)),
    }


def latent_scale(sizes: LatentSizes, rope_parameters: dict[str, Any]) -> float:
    """What vLLM multiplies scores with."""
    scale: float = sizes.qk_head_dim**-0.5
    if rope_parameters["rope_type"] == "default" or rope_parameters.get("attention_factor") == 1:
        return scale
    return scale * _stretch(rope_parameters["factor"], rope_parameters.get("mscale_all_dim") or 0) ** 2


def latent_config(sizes: LatentSizes, num_layers: int) -> dict[str, Any]:
    """What config.json of the export says of the attention; every MLP is dense.

    `deepseek_v2` on purpose: vLLM 0.32 takes a draft of `deepseek_v3` for that model's own multi-token prediction.
    """
    return {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "first_k_dense_replace": num_layers,
        **asdict(sizes),
    }


class LatentAttention(RotaryAttention):
    """Attention of h heads, each with keys and values of its own (g = h). width: of the input; eps: of the norms of
    latent rows. Cosine and sine hold each value twice."""

    def __init__(self, sizes: LatentSizes, num_heads: int, hidden_size: int, width: int, eps: float):
        super().__init__()
        self.sizes, self.num_heads = sizes, num_heads
        if sizes.q_lora_rank is None:
            self.q_proj = Linear(width, num_heads * sizes.qk_head_dim)
        else:
            self.q_a_proj = Linear(width, sizes.q_lora_rank)
            self.q_a_layernorm = RMSNorm(sizes.q_lora_rank, eps)
            self.q_b_proj = Linear(sizes.q_lora_rank, num_heads * sizes.qk_head_dim)
        self.kv_a_proj_with_mqa = Linear(width, sizes.kv_lora_rank + sizes.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(sizes.kv_lora_rank, eps)
        self.kv_b_proj = Linear(sizes.kv_lora_rank, num_heads * (sizes.qk_nope_head_dim + sizes.v_head_dim))
        self.o_proj = Linear(num_heads * sizes.v_head_dim, hidden_size)

    def queries(self, inputs: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        sizes = self.sizes
        if sizes.q_lora_rank is None:
            flat = self.q_proj(inputs, dtype)
        else:
            flat = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(inputs, dtype)), dtype)
        plain, turned = flat.unflatten(-1, (self.num_heads, -1)).split(
            [sizes.qk_nope_head_dim, sizes.qk_rope_head_dim], dim=-1
        )
        return torch.cat([plain, rotate_pairs(turned, cos, sin)], dim=-1)

    def keys_and_values(
        self, inputs: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = self.sizes
        latent, shared = self.kv_a_proj_with_mqa(inputs, dtype).split(
            [sizes.kv_lora_rank, sizes.qk_rope_head_dim], dim=-1
        )
        plain, value = (
            self.kv_b_proj(self.kv_a_layernorm(latent), dtype)
            .unflatten(-1, (self.num_heads, -1))
            .split([sizes.qk_nope_head_dim, sizes.v_head_dim], dim=-1)
        )
        turned = rotate_pairs(shared[:, None], cos, sin).expand(-1, self.num_heads, -1)
        return torch.cat([plain, turned], dim=-1), value


def _stretch(factor: float, mscale: float) -> float:
    """DeepSeek's yarn_get_mscale."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
