"""One step of an EAGLE-3 draft, as vLLM serves it (vllm/model_executor/models/llama_eagle3.py, deepseek_eagle3.py).

Parameter names are the tensor names of the export. Weights stay float32; matrix products run in `compute_dtype`, the
residual stream, the norms and the rotation in float32.

Letters: N rows, R query rows (those whose output is wanted), A auxiliary layers, H hidden size, D draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3.draft.attention import Document, LayerMemory
from eagle3.draft.latent import (
    LatentAttention,
    LatentSizes,
    choose_latent_sizes,
    latent_rope_parameters,
    latent_scale,
)
from eagle3.draft.layers import Linear, RMSNorm, RotaryAttention, rotate, widen
from eagle3.params import TrainParams


@dataclass(frozen=True)
class DraftSizes:
    """Everything that determines the draft's form; `rope_parameters` as transformers 5 keeps them.

    latent: None = grouped heads of head_dim, num_kv_heads for keys and values; else num_kv_heads is num_heads, and
    head_dim the width of queries and keys. sliding_window: of all layers; None = they see everything.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_aux_layers: int
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    latent: LatentSizes | None = None
    sliding_window: int | None = None


def choose_sizes(
    verifier_config: dict[str, Any], num_aux_layers: int, draft_vocab_size: int, max_positions: int, params: TrainParams
) -> DraftSizes:
    """The draft's form from the verifier's config.json: one of the verifier's layers, dense, but for params.

    Raises ValueError that names a field which is missing, or settings that do not go together.
    """
    config = {**verifier_config, **verifier_config.get("text_config", {})}
    absent = [
        key for key in ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads") if key not in config
    ]
    if absent:
        raise ValueError(f"the verifier's config.json has no {', '.join(absent)}: the draft takes its sizes from there")
    hidden = config["hidden_size"]
    kind = params.attention or ("latent" if config.get("kv_lora_rank") else "heads")
    latent = None
    if kind == "latent":
        latent = _choose_latent(config, params)
        heads = kv_heads = params.num_heads or config["num_attention_heads"]
        head_dim = latent.qk_head_dim
    else:
        heads, kv_heads, head_dim = _choose_heads(config, params)
    if hidden % heads:  # transformers' configs want it so, and vLLM reads the draft's with them
        raise ValueError(f"the draft's width of {hidden} is no multiple of its {heads} heads; set train.num_heads")
    if params.sliding_window is not None and params.sliding_window < params.ttt_steps:
        raise ValueError(
            f"train.sliding_window is {params.sliding_window}, fewer tokens than train.ttt_steps, {params.ttt_steps}"
        )
    positions = max(config.get("max_position_embeddings", 0), max_positions)
    return DraftSizes(
        hidden_size=hidden,
        intermediate_size=params.intermediate_size or config["intermediate_size"],
        num_layers=params.num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        num_aux_layers=num_aux_layers,
        vocab_size=config["vocab_size"],
        draft_vocab_size=draft_vocab_size,
        max_position_embeddings=positions,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_parameters=_rope_parameters(config, latent.qk_rope_head_dim if latent else head_dim, positions),
        norm_before_residual=params.norm_before_residual,
        norm_before_fc=params.norm_before_fc,
        fc_norm=params.fc_norm,
        norm_output=params.norm_output,
        latent=latent,
        sliding_window=params.sliding_window,
    )


def _choose_heads(config: dict[str, Any], params: TrainParams) -> tuple[int, int, int]:
    """Heads, key-value heads and their width; heads of 128 (or 64) for a verifier with latent attention."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    if config.get("kv_lora_rank"):
        head_dim = 128 if hidden % 128 == 0 else 64
        heads = hidden // head_dim
        kv_heads = max(1, heads // 8) if heads % 8 == 0 else heads
    heads = params.num_heads or heads
    kv_heads = params.num_kv_heads or min(kv_heads, heads)
    if heads % kv_heads:
        raise ValueError(f"{heads} heads of the draft do not share {kv_heads} key-value heads; set train.num_kv_heads")
    return heads, kv_heads, params.head_dim or head_dim


def _choose_latent(config: dict[str, Any], params: TrainParams) -> LatentSizes:
    """Raises ValueError for a setting that latent attention, or what vLLM serves of it, does not have."""
    for name in ("num_kv_heads", "head_dim", "sliding_window"):
        if getattr(params, name) is not None:
            raise ValueError(f"train.{name} is for train.attention: heads; leave it null for latent attention")
    if params.norm_before_fc:
        raise ValueError(
            "vLLM serves no draft with latent attention and norm_before_fc; set train.norm_before_fc: false "
            "(train.fc_norm is served)"
        )
    return choose_latent_sizes(config, params)


class DraftModel(nn.Module):
    """fc, decoder layers, final norm and draft head. The embedding is the verifier's and is not held here."""

    def __init__(self, sizes: DraftSizes, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        self.sizes, self.compute_dtype = sizes, compute_dtype
        wide = sizes.num_aux_layers * sizes.hidden_size
        self.input_norm = RMSNorm(wide, sizes.rms_norm_eps) if sizes.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(RMSNorm(sizes.hidden_size, sizes.rms_norm_eps) for _ in range(sizes.num_aux_layers))
            if sizes.fc_norm
            else None
        )
        self.fc = Linear(wide, sizes.hidden_size)
        self.layers = nn.ModuleList(DraftLayer(sizes, first=index == 0) for index in range(sizes.num_layers))
        self.norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.lm_head = Linear(sizes.hidden_size, sizes.draft_vocab_size)
        self.rotary = LlamaRotaryEmbedding(_rotary_config(sizes))

    def combine(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """Verifier states [N, A*H] to the state that step 0 reads [N, H]."""
        states = aux_hidden_states
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            chunks = states.chunk(self.sizes.num_aux_layers, dim=-1)
            states = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return widen(self.fc(states, self.compute_dtype))

    def memories(self) -> list[LayerMemory]:
        """Empty ones, one per layer, for one unroll."""
        sizes = self.sizes
        scale = latent_scale(sizes.latent, sizes.rope_parameters) if sizes.latent else sizes.head_dim**-0.5
        return [LayerMemory(scale, sizes.sliding_window) for _ in self.layers]

    def rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine [N, 1, d] of rows at these positions [N], laid out as the draft's attention rotates."""
        cos, sin = self.rotary(positions.new_empty(0, dtype=torch.float32), positions[None])
        if self.sizes.latent is not None:
            cos, sin = (half.chunk(2, dim=-1)[0].repeat_interleave(2, dim=-1) for half in (cos, sin))
        return cos[0][:, None], sin[0][:, None]

    def forward(
        self,
        embeds: torch.Tensor,
        state: torch.Tensor,
        positions: torch.Tensor,
        memories: Sequence[LayerMemory],
        documents: Sequence[Document],
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step. embeds, state [N, H] and positions [N] of the rows; memories: one per layer, extended here.

        documents: whose query rows are the wanted rows. rows: which of the N are wanted (None = all), so N > R only
        at step 0, where rows that nobody predicts from still serve as keys. Returns the normed output [R, H], which
        the head reads, and the state [R, H] that the next step reads.
        """
        rotation = self.rotation(positions)
        whole = [Document(start, start, end) for start, _, end in documents]
        residual: torch.Tensor | None = None
        for index, (layer, memory) in enumerate(zip(self.layers, memories, strict=True)):
            last = index == len(self.layers) - 1
            layer_documents = whole if rows is not None and not last else documents
            state, residual = layer(
                embeds, state, residual, rotation, memory, layer_documents, rows if last else None, self.compute_dtype
            )
        assert residual is not None
        prenorm = residual + state
        normed = self.norm(prenorm)
        return normed, normed if self.sizes.norm_output else prenorm


class DraftLayer(nn.Module):
    """A decoder layer with a dense MLP; the first one reads embedding and state side by side."""

    def __init__(self, sizes: DraftSizes, first: bool):
        super().__init__()
        hidden, eps = sizes.hidden_size, sizes.rms_norm_eps
        self.norm_before_residual = sizes.norm_before_residual
        self.hidden_norm = RMSNorm(hidden, eps) if first else None
        self.input_layernorm = RMSNorm(hidden, eps)
        width = 2 * hidden if first else hidden
        self.self_attn = (
            LatentAttention(sizes.latent, sizes.num_heads, hidden, width, eps)
            if sizes.latent
            else DraftAttention(sizes, width)
        )
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = DraftMLP(sizes)

    def forward(
        self,
        embeds: torch.Tensor,
        state: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: tuple[torch.Tensor, torch.Tensor],
        memory: LayerMemory,
        documents: Sequence[Document],
        rows: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output of the MLP and the residual it belongs to, [R, H] each."""
        if self.hidden_norm is not None:
            normed = self.hidden_norm(state)
            residual = normed if self.norm_before_residual else state
            inputs = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        else:
            assert residual is not None
            residual = residual + state
            inputs = self.input_layernorm(residual)
        attended = self.self_attn(inputs, rotation, memory, documents, rows, dtype)
        residual = attended + (residual if rows is None else residual[rows])
        return widen(self.mlp(self.post_attention_layernorm(residual), dtype)), residual


class DraftAttention(RotaryAttention):
    """Grouped-query attention, as Llama (d = e)."""

    def __init__(self, sizes: DraftSizes, width: int):
        super().__init__()
        self.head_dim = sizes.head_dim
        self.q_proj = Linear(width, sizes.num_heads * sizes.head_dim)
        self.k_proj = Linear(width, sizes.num_kv_heads * sizes.head_dim)
        self.v_proj = Linear(width, sizes.num_kv_heads * sizes.head_dim)
        self.o_proj = Linear(sizes.num_heads * sizes.head_dim, sizes.hidden_size)

    def queries(self, inputs: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return rotate(self._heads(self.q_proj(inputs, dtype)), cos, sin)

    def keys_and_values(
        self, inputs: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rotate(self._heads(self.k_proj(inputs, dtype)), cos, sin), self._heads(self.v_proj(inputs, dtype))

    def _heads(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(len(tensor), tensor.shape[-1] // self.head_dim, self.head_dim)


class DraftMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: DraftSizes):
        super().__init__()
        self.gate_proj = Linear(sizes.hidden_size, sizes.intermediate_size)
        self.up_proj = Linear(sizes.hidden_size, sizes.intermediate_size)
        self.down_proj = Linear(sizes.intermediate_size, sizes.hidden_size)

    def forward(self, inputs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[N, H] to [N, H]."""
        inputs = inputs.to(dtype)
        gate = functional.silu(self.gate_proj(inputs, dtype))
        result: torch.Tensor = self.down_proj(gate * self.up_proj(inputs, dtype), dtype)
        return result


@torch.no_grad()
def initialise(model: DraftModel, head: torch.Tensor, norm: torch.Tensor, seed: int, spread: float = 0.02) -> None:
    """Draft head [D, H] and final norm [H] from the verifier, the rest normal with standard deviation `spread`.

    fc starts out passing on the deepest auxiliary state: it is closest to what the verifier's head reads, and on small
    data the draft learns visibly faster from there (docs/measurements.md).
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and name != "lm_head.weight":
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    model.fc.weight[:, -model.sizes.hidden_size :] += torch.eye(model.sizes.hidden_size)
    model.lm_head.weight.copy_(head)
    model.norm.weight.copy_(norm)


def _rope_parameters(config: dict[str, Any], head_dim: int, positions: int) -> dict[str, Any]:
    """Rotary parameters in transformers 5's layout, from it or from the older `rope_theta` and `rope_scaling`."""
    fields = {
        key: config[key] for key in ("rope_parameters", "rope_theta", "rope_scaling") if config.get(key) is not None
    }
    if not fields:
        raise ValueError("the verifier's config.json has neither rope_parameters nor rope_theta; the draft needs one")
    fields = {key: dict(value) if isinstance(value, dict) else value for key, value in fields.items()}
    llama = LlamaConfig(head_dim=head_dim, max_position_embeddings=positions, **fields)
    return dict(llama.rope_parameters)


def _rotary_config(sizes: DraftSizes) -> LlamaConfig:
    rope = sizes.rope_parameters
    return LlamaConfig(
        head_dim=sizes.latent.qk_rope_head_dim if sizes.latent else sizes.head_dim,
        max_position_embeddings=sizes.max_position_embeddings,
        rope_parameters=latent_rope_parameters(rope) if sizes.latent else dict(rope),
    )
