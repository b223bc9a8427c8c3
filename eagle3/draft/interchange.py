"""A draft in the two formats that the world exchanges, and back to ours: the same tensors, bit by bit.

    plain         what `train` exports and vLLM serves: every flag at the top of config.json
    speculators   the layer's form in `transformer_layer_config`, the flags beside it, no top-level model_type

Contract of both: vLLM 0.32 (transformers_utils/configs/speculators). A draft with latent attention has only the plain
form. The embedding stays out of both: vLLM shares the verifier's.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eagle3.console import visible
from eagle3.draft.export import CONFIG, OWN_SECTION, WEIGHTS, check_names, draft_config
from eagle3.draft.latent import LatentSizes
from eagle3.draft.model import DraftModel, DraftSizes
from eagle3.draft.vocab import DraftVocabulary
from eagle3.draft.warm_start import Checkpoint
from eagle3.verifier import VerifierIdentity, choose_aux_layers

SPECULATORS_VERSION = "0.9.0"
LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
#: What vLLM computes otherwise than our draft if a config says so: field, what it must be, where absent that is it.
FIXED = (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False), ("logit_scale", 1))
#: Fields of our config.json that describe the decoder layers.
LAYER = (
    "model_type", "head_dim", "layer_types", "sliding_window", "dtype", "vocab_size", "hidden_size",
    "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_act",
    "rms_norm_eps", "rope_parameters", "max_position_embeddings", "attention_bias", "mlp_bias", "tie_word_embeddings",
    "bos_token_id", "eos_token_id", "num_aux_hidden_states",
)  # fmt: skip


def speculators_config(
    config: dict[str, Any], verifier: VerifierIdentity, verifier_place: str, num_speculative_tokens: int
) -> dict[str, Any]:
    """config.json of the speculators format, from ours. verifier_place: hub id or folder, for `vllm serve <draft>`.

    Raises ValueError for a draft with latent attention.
    """
    if config["model_type"] != "llama":
        raise ValueError("the speculators format has no draft with latent attention; use --format plain")
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_speculative_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier_place, "architectures": [verifier.architecture]},
        },
        "transformer_layer_config": {
            "architectures": ["LlamaForCausalLM"],
            **{name: config[name] for name in LAYER if name in config},
        },
        "dtype": config["dtype"],
        "draft_vocab_size": config["draft_vocab_size"],
        "target_hidden_size": config["target_hidden_size"],
        "eagle_aux_hidden_state_layer_ids": config["eagle_aux_hidden_state_layer_ids"],
        **{name: config[name] for name in FLAGS},
        "tie_word_embeddings": False,
        OWN_SECTION: {name: value for name, value in config[OWN_SECTION].items() if name != "sizes"},
    }


def write_ours(folder: Path, checkpoint: Checkpoint, verifier: VerifierIdentity) -> DraftVocabulary:
    """Write config.json and model.safetensors of a checkpoint as `train` exports a draft, into an existing folder.

    verifier: whose draft it is; it must have the sizes that the checkpoint wants. Raises ValueError that names what of
    the checkpoint our draft does not have, or what does not fit.
    """
    place = f"import: {checkpoint.folder}"
    try:
        sizes, dtype, coverage, layer_ids = _read_form(checkpoint, verifier)
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"{place}: its {CONFIG} does not say what the draft's form is ({error!r})") from None
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    if (sizes.hidden_size, sizes.vocab_size) != (verifier.hidden_size, verifier.vocab_size):
        raise ValueError(
            f"{place} drafts for states of {sizes.hidden_size} and {sizes.vocab_size:,} tokens; "
            f"{visible(verifier.name)} has {verifier.hidden_size} and {verifier.vocab_size:,}"
        )
    with torch.device("meta"):
        expected = DraftModel(sizes).state_dict()
    check_names(checkpoint.folder, expected, checkpoint.tensors)
    if int(checkpoint.token_ids[-1]) >= sizes.vocab_size:
        raise ValueError(f"{place}: d2t leads to id {int(checkpoint.token_ids[-1])} of {sizes.vocab_size:,} tokens")
    vocabulary = DraftVocabulary(checkpoint.token_ids, sizes.vocab_size, coverage)
    tensors = dict(checkpoint.tensors)
    if len(vocabulary) < sizes.vocab_size:
        tensors |= {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    config = draft_config(sizes, replace(verifier, aux_layer_ids=layer_ids), dtype, coverage)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return vocabulary


def _read_form(checkpoint: Checkpoint, verifier: VerifierIdentity) -> tuple[DraftSizes, str, float, tuple[int, ...]]:
    """Sizes, dtype, coverage (0: not known) and auxiliary layers. Raises ValueError for what we do not have."""
    config, layer = checkpoint.config, checkpoint.layer
    for name, value in FIXED:
        if layer.get(name, value) != value:
            raise ValueError(f"{name} is {visible(str(layer[name]))}; drafts of this pipeline have {value}")
    hidden, heads = int(layer["hidden_size"]), int(layer["num_attention_heads"])
    if config.get("use_aux_hidden_state", True) is not True:
        raise ValueError("it reads one state of the verifier only (use_aux_hidden_state: false)")
    if config.get("target_hidden_size") not in (None, hidden):
        raise ValueError(f"target_hidden_size is {config['target_hidden_size']}, not hidden_size {hidden}")
    told = config.get("eagle_aux_hidden_state_layer_ids") or choose_aux_layers(None, verifier.num_layers)
    layer_ids = choose_aux_layers([int(number) for number in told], verifier.num_layers)
    if tuple(told) != layer_ids:
        raise ValueError(f"its auxiliary layers {visible(str(told))} do not ascend")
    latent = (
        LatentSizes(layer.get("q_lora_rank"), *(int(layer[name]) for name in LATENT)) if _is_latent(layer) else None
    )
    fields = {
        "num_kv_heads": heads if latent else int(layer.get("num_key_value_heads") or heads),
        "head_dim": latent.qk_head_dim if latent else int(layer.get("head_dim") or hidden // heads),
    }
    if checkpoint.sliding_window is not None and set(layer["layer_types"]) != {"sliding_attention"}:
        raise ValueError("layer_types mixes windows of several lengths; drafts of this pipeline have one")
    if checkpoint.rope_parameters is None:
        raise ValueError("neither rope_parameters nor rope_theta is there")
    kinds = {str(value.dtype).removeprefix("torch.") for value in checkpoint.tensors.values()}
    if len(kinds) != 1:
        raise ValueError(f"its weights have several dtypes: {', '.join(sorted(kinds))}")
    sizes = DraftSizes(
        hidden_size=hidden,
        intermediate_size=int(layer["intermediate_size"]),
        num_layers=_count_layers(checkpoint),
        num_heads=heads,
        num_aux_layers=len(layer_ids),
        vocab_size=int(layer["vocab_size"]),
        draft_vocab_size=len(checkpoint.token_ids),
        max_position_embeddings=int(layer["max_position_embeddings"]),
        rms_norm_eps=float(layer["rms_norm_eps"]),
        rope_parameters=checkpoint.rope_parameters,
        norm_before_residual=checkpoint.flags["norm_before_residual"],
        norm_before_fc=bool(config.get("norm_before_fc", False)),
        fc_norm=bool(config.get("fc_norm", False)),
        norm_output=checkpoint.flags["norm_output"],
        latent=latent,
        sliding_window=checkpoint.sliding_window,
        **fields,
    )
    if latent is not None and sizes.norm_before_fc:
        raise ValueError("vLLM serves no draft with latent attention and norm_before_fc")
    coverage = 1.0 if sizes.draft_vocab_size == sizes.vocab_size else 0.0
    return sizes, kinds.pop(), float(config.get(OWN_SECTION, {}).get("draft_vocab_coverage", coverage)), layer_ids


def _is_latent(layer: dict[str, Any]) -> bool:
    return bool(layer.get("kv_lora_rank"))


def _count_layers(checkpoint: Checkpoint) -> int:
    """As many as the weights are of. Raises ValueError when the config says another number."""
    count = len({name.split(".")[1] for name in checkpoint.tensors if name.startswith("layers.")})
    if int(checkpoint.layer["num_hidden_layers"]) != count:
        raise ValueError(f"num_hidden_layers is {checkpoint.layer['num_hidden_layers']}, its weights are of {count}")
    return count
