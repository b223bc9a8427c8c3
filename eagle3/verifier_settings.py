"""Settings that follow from a verifier and a machine, for `eagle3 init`. They are written into params.yaml once, where
anybody may change them; nothing reads them from here when the pipeline runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from eagle3.machine import Gpu
from eagle3.model_facts import INDEX_FILE, ModelFacts, read_facts, recommended_sampling
from eagle3.params import Params, VerifierParams
from eagle3.reasoning import DEEPSEEK_TOOL_CALLS, THINK, TOOL_CALLS
from eagle3.serving.engine import GIB
from eagle3.verifier import BUNDLED, TEXT_FILES, choose_aux_layers, is_hub_id, load_tokenizer, locate_verifier

LONGEST_CONTEXT = 10_240  # prompt and answer of one row; longer contexts are a decision, not a default
ANSWER_SHARE = 0.8  # of the context: a thinking verifier wants 8,192 tokens
WEIGHTS_SHARE = 0.6  # of a GPU's memory; the rest is for the KV cache and the recording of states


Settings = dict[str, Any]  # by dotted key of params.yaml


@dataclass(frozen=True)
class Reading:
    """What was read from a verifier. told: the facts in one line."""

    settings: Settings
    told: str


def read_verifier(model: str, revision: str | None, template: Params, given: Settings, gpus: Sequence[Gpu]) -> Reading:
    """The settings for a verifier: a local directory, a hub id (pinned to a commit here), or a bundled one.

    template: params.yaml as it is shipped, with the `given` settings in it, which are left alone and what others follow
    from. Raises ValueError that names what is wrong with the model.
    """
    if model in BUNDLED:
        return Reading({"verifier.model": model}, "as it is shipped")
    if is_hub_id(model):
        folder, revision = _text_files(model, revision)
        settings: Settings = {"verifier.model": model, "verifier.revision": revision}
    else:
        folder = locate_verifier(template.verifier.model_copy(update={"model": str(Path(model).expanduser())}))
        settings = {"verifier.model": str(folder), "verifier.revision": None}
    facts = read_facts(folder)
    own = template.verifier.model_copy(update={"model": str(folder), "revision": None})
    settings |= _of_model(facts, own) | given
    settings["generate.max_new_tokens"] = int(settings["verifier.max_model_len"] * ANSWER_SHARE)
    settings |= _of_tokenizer(facts, own)
    settings |= {f"generate.{name}": value for name, value in recommended_sampling(folder).items()}
    settings |= _of_gpus(facts, template, gpus) if gpus else _of_processor(facts, template, settings)
    told = (
        f"{facts.architecture}, {facts.num_layers} layers of {facts.hidden_size:,}, {facts.positions:,} positions, "
        f"{facts.weight_bytes / 1e9:,.1f} GB of weights"
    )
    return Reading(settings, told)


def _text_files(model: str, revision: str | None) -> tuple[Path, str]:
    """Configuration and tokenizer of a hub model, without its weights, and the commit that `revision` is now."""
    try:
        commit = str(HfApi().model_info(model, revision=revision).sha)
        wanted = [*TEXT_FILES, INDEX_FILE, "*.py"]
        return Path(snapshot_download(model, revision=commit, allow_patterns=wanted)), commit
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        told = " ".join(str(error).split())[:200]
        raise ValueError(f"verifier {model}: its configuration cannot be had from the hub ({told})") from None


def _of_model(facts: ModelFacts, own: VerifierParams) -> Settings:
    """Context, dtype and layers."""
    layers = facts.num_layers
    try:
        choose_aux_layers(None, layers)
        aux = None
    except ValueError:  # shallow
        aux = list(choose_aux_layers([1, layers // 2, layers - 1], layers))
    return {
        "verifier.max_model_len": min(facts.positions, LONGEST_CONTEXT),
        "verifier.dtype": facts.dtype or own.dtype,
        "verifier.aux_layer_ids": aux,
    }


def _of_tokenizer(facts: ModelFacts, own: VerifierParams) -> Settings:
    """The reasoning format. Raises ValueError for a model without a chat template."""
    tokenizer = load_tokenizer(own)
    if not tokenizer.chat_template:
        raise ValueError(
            f"verifier.model {own.model} has no chat template; name one: -S verifier.chat_template=/path/to/it.jinja"
        )
    known = reasoning_format(set(tokenizer.get_vocab()), str(tokenizer.chat_template), facts.model_type)
    return {} if known is None else {"reasoning.format": known}


def reasoning_format(vocabulary: set[str], chat_template: str, model_type: str) -> str | None:
    """The preset whose markers a tokenizer has; None = leave it to `auto`."""
    if not {*THINK} <= vocabulary or THINK[0] not in chat_template:
        return None
    if TOOL_CALLS in vocabulary:
        return "kimi-k2.5" if model_type == "kimi_k25" else "kimi-k2-thinking"
    if DEEPSEEK_TOOL_CALLS in vocabulary:
        return "deepseek-r1"
    return "qwen3" if model_type.startswith("qwen3") else None


def _of_processor(facts: ModelFacts, template: Params, settings: Settings) -> Settings:
    """A KV cache that holds the longest request while its states are recorded."""
    aux_layers = len(choose_aux_layers(settings["verifier.aux_layer_ids"], facts.num_layers))
    longest = settings["verifier.max_model_len"] * facts.recorded_bytes(aux_layers, settings["verifier.dtype"])
    return {"engine.cpu_kv_cache_gib": max(template.engine.cpu_kv_cache_gib, math.ceil(longest / GIB))}


def _of_gpus(facts: ModelFacts, template: Params, gpus: Sequence[Gpu]) -> Settings:
    """How many GPUs an engine has, and how many engines."""
    ranks = tensor_parallelism(facts, [gpu.memory for gpu in gpus])
    engines = len(gpus) // ranks
    return {
        "engine.tensor_parallel_size": ranks,
        "generate.servers": engines,
        "extract.workers": engines,
        "train.nproc": len(gpus),
        "train.gradient_accumulation": max(len(gpus), template.train.gradient_accumulation),
        "evaluate.side_by_side": False,  # two engines at engine.gpu_memory_utilization do not fit on one GPU
    }


def tensor_parallelism(facts: ModelFacts, memory: Sequence[int]) -> int:
    """The fewest GPUs that hold the weights, of the numbers that divide the attention heads; else the most.

    memory: bytes of each GPU.
    """
    possible = [count for count in (1, 2, 4, 8, 16) if count <= len(memory) and facts.num_heads % count == 0]
    enough = [count for count in possible if facts.weight_bytes <= WEIGHTS_SHARE * min(memory) * count]
    return (enough or possible[-1:])[0]
