"""params.yaml as frozen, strict types: one class per section, no defaults, no behaviour.

`load_params` reads the file with YAML 1.2 rules, as DVC writes it, and names every key that is unknown, missing or of
the wrong type.
"""

from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.tokens import AnchorToken

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Split = Literal["auto", "train", "validation", "evaluation"]


class Section(BaseModel):
    """Frozen; an unknown key or a wrong type is an error. Whole numbers are accepted where a float is wanted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class VerifierParams(Section):
    model: str
    revision: str | None
    trust_remote_code: bool
    chat_template: str | None
    dtype: Literal["bfloat16", "float16", "float32"]
    max_model_len: Annotated[int, Field(ge=16)]
    aux_layer_ids: list[Positive] | None


class ReasoningParams(Section):
    format: Literal["auto", "none", "kimi-k2.5", "kimi-k2-thinking", "deepseek-r1", "qwen3", "custom"]
    start: str | None
    end: str | None
    also_ended_by: list[str]


class EngineParams(Section):
    tensor_parallel_size: Positive
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)]
    cpu_kv_cache_gib: Annotated[float, Field(gt=0)]
    max_num_seqs: Positive
    max_num_batched_tokens: Positive
    enforce_eager: bool
    start_timeout_s: Positive
    extra_args: dict[str, Any]


class SourceParams(Section):
    path: str
    name: str
    category: str | None
    text_column: str
    reference_column: str | None
    split: Split
    limit: Positive | None


class PromptsParams(Section):
    sources: Annotated[list[SourceParams], Field(min_length=1)]
    multi_turn: Literal["first", "last"]
    min_characters: Count
    max_characters: Positive
    deduplicate: bool
    validation_share: Share
    evaluation_share: Share
    contamination_words: Positive
    contamination_share: Annotated[float, Field(gt=0, le=1)]
    seed: int
    max_rejected_share: Share


Temperature = Annotated[float, Field(ge=0)]


class GenerateParams(Section):
    reference_share: Share
    endpoints: list[str]
    servers: Positive
    concurrency: Positive
    samples_per_prompt: Positive
    max_new_tokens: Positive | Annotated[list[Positive], Field(min_length=1)]
    thinking_token_budget: Positive | Annotated[list[Positive], Field(min_length=1)] | None
    min_room_tokens: Positive
    temperature: Temperature | Annotated[list[Temperature], Field(min_length=1)]
    top_p: Annotated[float, Field(gt=0, le=1)]
    top_k: Count
    min_p: Share
    repetition_penalty: Annotated[float, Field(gt=0)]
    presence_penalty: float
    frequency_penalty: float
    seed: int
    chat_template_kwargs: dict[str, Any]
    require_ids: bool
    retries: Count
    stall_timeout_s: Annotated[float, Field(gt=0)]
    max_failed_share: Share


class ReconstructTokensParams(Section):
    min_loss_tokens: Annotated[int, Field(ge=2)]
    truncated: Literal["keep", "drop", "drop_thinking_cut"]
    audit_rows: Count
    max_rejected_share: Share


class ExtractParams(Section):
    storage: Literal["lossless", "fp8"]
    shard_min_mib: Annotated[float, Field(gt=0)]
    shard_max_mib: Annotated[float, Field(gt=0)]
    max_pending_mib: Annotated[float, Field(gt=0)]
    agreement_samples: Positive
    min_head_agreement: Share
    max_rejected_share: Share
    stall_timeout_s: Annotated[float, Field(gt=0)]
    executor: Literal["local", "ray"]
    workers: Positive
    ray_address: str | None


class TrainParams(Section):
    seed: int
    warm_start: str | None
    draft_vocab_size: Positive | None
    draft_vocab_coverage: Annotated[float, Field(gt=0, le=1)]
    num_layers: Annotated[int, Field(ge=1, le=4)]
    attention: Literal["heads", "latent"] | None
    intermediate_size: Positive | None
    num_heads: Positive | None
    num_kv_heads: Positive | None
    head_dim: Annotated[int, Field(ge=2, multiple_of=2)] | None
    sliding_window: Positive | None
    q_lora_rank: Count | None
    kv_lora_rank: Positive | None
    qk_nope_head_dim: Positive | None
    qk_rope_head_dim: Annotated[int, Field(ge=2, multiple_of=2)] | None
    v_head_dim: Positive | None
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    freeze_lm_head: bool
    loss: Literal["forward_kl", "hard_labels", "reverse_kl", "total_variation"]
    acceptance_share: Share
    feature_loss_weight: Annotated[float, Field(ge=0)]
    out_of_vocabulary: Literal["renormalise", "skip"]
    ttt_steps: Positive
    ttt_loss_decay: Annotated[float, Field(gt=0, le=1)]
    epochs: Positive
    batch_tokens: Positive
    gradient_accumulation: Positive
    optimiser: Literal["adamw", "muon"]
    learning_rate: Annotated[float, Field(gt=0)]
    warmup_share: Share
    final_learning_rate_share: Share
    weight_decay: Annotated[float, Field(ge=0)]
    beta1: Annotated[float, Field(ge=0, lt=1)]
    beta2: Annotated[float, Field(ge=0, lt=1)]
    max_gradient_norm: Annotated[float, Field(gt=0)]
    precision: Literal["float32", "bfloat16"]
    validations: Positive
    checkpoint_every_s: Annotated[float, Field(ge=0)]
    nproc: Positive
    sharding: Literal["none", "fsdp"]
    tensorboard: bool
    export_dtype: Literal["bfloat16", "float16", "float32"]


class EvaluateParams(Section):
    num_prompts: Positive
    max_new_tokens: Positive
    num_speculative_tokens: Positive | Annotated[list[Positive], Field(min_length=1)]
    batch_size: Positive | Annotated[list[Positive], Field(min_length=1)]
    temperature: Annotated[float, Field(ge=0)]
    seed: int
    side_by_side: bool
    lossless_prompts: Count
    estimate_prompts: Count
    viewer_answers: Count


class Params(Section):
    verifier: VerifierParams
    reasoning: ReasoningParams
    engine: EngineParams
    prompts: PromptsParams
    generate: GenerateParams
    reconstruct_tokens: ReconstructTokensParams
    extract: ExtractParams
    train: TrainParams
    evaluate: EvaluateParams


def load_params(path: Path) -> Params:
    """Read and validate params.yaml. Raises ValueError that names the file and every offending key."""
    try:
        return parse_params(path.read_text(encoding="utf-8"), path)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; run from the project's top folder") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from None


def parse_params(text: str, path: Path) -> Params:
    """Validate the text of a params.yaml. path: what errors call it."""
    try:
        typed = YAML(typ="safe", pure=True).load(text)
        spelled = YAML(typ="base", pure=True).load(text)
    except YAMLError as error:
        raise ValueError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from None
    if any(isinstance(token, AnchorToken) for token in YAML(typ="safe", pure=True).scan(text)):
        raise ValueError(f"{path}: YAML anchors are not supported: `dvc exp run -S` changes only one of their places")
    try:
        return Params.model_validate(_as_spelled(Params, typed, spelled))
    except ValidationError as error:
        raise ValueError(f"{path}: " + "; ".join(map(_explain, error.errors()))) from None


def _as_spelled(kind: Any, typed: Any, spelled: Any) -> Any:
    """Give text fields the text that was written: `-S name=1.10` or a dropped pair of quotes makes no number."""
    origin, options = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel) and isinstance(typed, dict):
        fields = kind.model_fields
        return {
            key: _as_spelled(fields[key].annotation, value, spelled[str(key)])
            if key in fields and str(key) in spelled
            else value
            for key, value in typed.items()
        }
    if origin is Annotated:
        return _as_spelled(options[0], typed, spelled)
    if origin is list and isinstance(typed, list):
        return [_as_spelled(options[0], a, b) for a, b in zip(typed, spelled, strict=True)]
    if origin is UnionType or NoneType in options:
        return None if typed is None else _as_spelled(next(o for o in options if o is not NoneType), typed, spelled)
    return spelled if kind is str and isinstance(spelled, str) and not isinstance(typed, list | dict) else typed


def _explain(error: Any) -> str:
    key = ".".join(map(str, error["loc"]))
    match error["type"]:
        case "extra_forbidden":
            return f"unknown key {key}"
        case "missing":
            return f"missing key {key}"
        case _:
            return f"{key}: {error['msg']} (found {error['input']!r})"
