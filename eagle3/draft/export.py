"""A trained draft as vLLM 0.32 loads it (plain EAGLE-3 format), and back.

Contract: vllm/model_executor/models/llama_eagle3.py, or deepseek_eagle3.py for latent attention. `embed_tokens` is left
out on purpose: vLLM then shares the verifier's. `lm_head` has rows of its own; `d2t` and `t2d` are there exactly when
the draft vocabulary is the smaller.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from eagle3.draft.latent import LatentSizes, latent_config
from eagle3.draft.model import DraftModel, DraftSizes
from eagle3.draft.vocab import DraftVocabulary, validate_mapping
from eagle3.lineage import public_name
from eagle3.tables import new_folder
from eagle3.verifier import VerifierIdentity

CONFIG, WEIGHTS = "config.json", "model.safetensors"
OWN_SECTION = "eagle3_pipeline"  # a part of config.json that vLLM does not read
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_draft(
    out: Path, model: DraftModel, vocabulary: DraftVocabulary, verifier: VerifierIdentity, dtype: str
) -> None:
    """Write config.json and model.safetensors into the folder `out`, aside and renamed."""
    tensors = {name: value.detach().cpu().to(DTYPES[dtype]).contiguous() for name, value in model.state_dict().items()}
    if len(vocabulary) < vocabulary.verifier_size:
        validate_mapping(vocabulary.d2t, vocabulary.t2d, vocabulary.verifier_size)
        tensors |= {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
    for name, value in tensors.items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise ValueError(
                f"the trained {name} is not finite in {dtype}; set train.export_dtype to float32 or bfloat16"
            )
    with new_folder(out) as folder:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        config = draft_config(model.sizes, verifier, dtype, vocabulary.coverage)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def draft_config(sizes: DraftSizes, verifier: VerifierIdentity, dtype: str, coverage: float) -> dict[str, Any]:
    """config.json: every flag is written, because vLLM's defaults differ between formats."""
    layer_ids = list(verifier.aux_layer_ids)
    if sizes.latent is None:
        attention: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "head_dim": sizes.head_dim,
        }
        if sizes.sliding_window is not None:
            attention |= {
                "layer_types": ["sliding_attention"] * sizes.num_layers,
                "sliding_window": sizes.sliding_window,
            }
    else:
        attention = latent_config(sizes.latent, sizes.num_layers)
    return {
        **attention,
        "dtype": dtype,
        "torch_dtype": dtype,
        "vocab_size": sizes.vocab_size,
        "draft_vocab_size": sizes.draft_vocab_size,
        "hidden_size": sizes.hidden_size,
        "target_hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": sizes.rms_norm_eps,
        "rope_parameters": sizes.rope_parameters,
        "max_position_embeddings": sizes.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": list(verifier.stop_token_ids),
        "norm_before_residual": sizes.norm_before_residual,
        "norm_before_fc": sizes.norm_before_fc,
        "fc_norm": sizes.fc_norm,
        "norm_output": sizes.norm_output,
        "num_aux_hidden_states": sizes.num_aux_layers,
        "eagle_aux_hidden_state_layer_ids": layer_ids,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "norm_before_fc": sizes.norm_before_fc,
            "eagle_aux_hidden_state_layer_ids": layer_ids,
        },
        OWN_SECTION: {
            "verifier_digest": verifier.digest,
            "verifier_name": public_name(verifier.name),
            "draft_vocab_coverage": coverage,
            "sizes": asdict(sizes),
        },
    }


def load_draft(folder: Path) -> tuple[DraftModel, DraftVocabulary]:
    """Read an export back. Raises ValueError that names files, missing and unexpected tensors, or a wrong mapping."""
    try:
        own = json.loads((folder / CONFIG).read_text())[OWN_SECTION]
        tensors = load_file(folder / WEIGHTS)
        sizes = _read_sizes(own["sizes"])
        coverage = float(own["draft_vocab_coverage"])
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise ValueError(f"{folder}: not a draft that this pipeline exported ({error!r})") from None
    vocabulary = _load_vocabulary(folder, sizes, tensors, coverage)
    model = DraftModel(sizes)
    check_names(folder, model.state_dict(), tensors)
    model.load_state_dict({name: value.float() for name, value in tensors.items()})
    return model, vocabulary


def _read_sizes(fields: dict[str, Any]) -> DraftSizes:
    latent = fields.get("latent")
    return DraftSizes(**{**fields, "latent": LatentSizes(**latent) if latent else None})


def _load_vocabulary(
    folder: Path, sizes: DraftSizes, tensors: dict[str, torch.Tensor], coverage: float
) -> DraftVocabulary:
    reduced = sizes.draft_vocab_size < sizes.vocab_size
    tables = [tensors.pop(name, None) for name in ("d2t", "t2d")]
    d2t, t2d = tables
    if not reduced:
        if d2t is not None or t2d is not None:
            raise ValueError(f"{folder}: d2t or t2d present although the draft has the verifier's whole vocabulary")
        return DraftVocabulary(torch.arange(sizes.vocab_size), sizes.vocab_size, coverage)
    if d2t is None or t2d is None or len(d2t) != sizes.draft_vocab_size:
        raise ValueError(f"{folder}: d2t and t2d for {sizes.draft_vocab_size} draft tokens are needed in {WEIGHTS}")
    try:
        validate_mapping(d2t, t2d, sizes.vocab_size)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    return DraftVocabulary(d2t + torch.arange(len(d2t)), sizes.vocab_size, coverage)


def check_names(folder: Path, expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    """Raises ValueError that lists the tensors which are missing, unexpected or of another shape."""
    missing, unexpected = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    wrong = [name for name in expected.keys() & found.keys() if expected[name].shape != found[name].shape]
    problems = [
        f"{word} {', '.join(names)}"
        for word, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", sorted(wrong)))
        if names
    ]
    if problems:
        raise ValueError(f"{folder / WEIGHTS}: tensors {'; '.join(problems)}")
