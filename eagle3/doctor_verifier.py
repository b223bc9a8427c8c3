"""`eagle3 doctor`: the verifier, and whether the devices have room for it and its longest request."""

import math
from collections.abc import Iterator, Sequence

import psutil
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from eagle3.estimate import size
from eagle3.findings import Finding
from eagle3.machine import Gpu, visible_gpus
from eagle3.model_facts import ModelFacts, read_facts
from eagle3.params import Params
from eagle3.serving.engine import GIB, runs_on_cpu
from eagle3.verification import IDENTITY
from eagle3.verifier import (
    BUNDLED,
    bundled_folder,
    choose_aux_layers,
    is_hub_id,
    kept_identity,
    locate_verifier,
    read_identity,
)


def look_at_verifier(params: Params) -> Iterator[Finding]:
    """Devices for the engines; whether the verifier can be loaded and is still the one of the last run; room for it."""
    gpus = None if runs_on_cpu() else visible_gpus()
    if gpus is not None:
        yield from look_at_devices(params, gpus)
    later = _comes_later(params)
    if later is not None:
        yield later
        return
    try:
        identity = kept_identity(params.verifier, params.reasoning)
        before = read_identity(IDENTITY) if IDENTITY.is_file() else identity
        facts = read_facts(locate_verifier(params.verifier))
    except (ValueError, OSError) as error:
        yield Finding("stops", "verifier", str(error), "see the section verifier of params.yaml")
        return
    told = f"{params.verifier.model}, {identity.architecture}, digest {identity.digest[:12]}, for {identity.engine}"
    if before != identity:
        then = f"{before.name}, digest {before.digest[:12]}, for {before.engine}"
        remedy = "if that is intended `dvc repro` runs what depends on it; else bring the old model or engine back"
        yield Finding("warning", "verifier", f"{told}; the last run was with {then}", remedy)
    else:
        yield Finding("ok", "verifier", told)
    yield look_at_cache(params, facts, gpus)
    if gpus is None:
        yield look_at_memory(params, facts, psutil.virtual_memory().total)


def _comes_later(params: Params) -> Finding | None:
    """What there is to say of a verifier that the first run will bring here, or cannot."""
    model = params.verifier.model
    if model in BUNDLED:
        try:
            here = bundled_folder(model).is_dir()
        except ValueError as error:
            what, _, remedy = str(error).partition("; ")
            return Finding("stops", "verifier", what, remedy)
        return None if here else Finding("ok", "verifier", f"{model}; the first run converts it, in about 20 s")
    if is_hub_id(model) and not _is_downloaded(model, params.verifier.revision):
        told = f"{model} at {params.verifier.revision} is not on this machine yet"
        remedy = "`dvc repro` downloads it: see that there is room for its weights where HF_HOME points"
        return Finding("warning", "verifier", told, remedy)
    return None


def _is_downloaded(model: str, revision: str | None) -> bool:
    """Is a hub model in the cache of the hub's client. Asks nobody."""
    try:
        snapshot_download(model, revision=revision, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return False
    return True


def look_at_devices(params: Params, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """Whether there are as many GPUs as the engines want, with enough memory that nobody else has."""
    ranks = params.engine.tensor_parallel_size
    wanted = {
        "engine.tensor_parallel_size": ranks,
        "generate.servers x engine.tensor_parallel_size": params.generate.servers * ranks,
        "train.nproc": params.train.nproc,
    }
    if params.extract.executor == "local":
        wanted["extract.workers x engine.tensor_parallel_size"] = params.extract.workers * ranks
    for setting, count in wanted.items():
        if count > len(gpus):
            yield Finding("stops", "gpus", f"{setting} = {count}, and there are {len(gpus)}", f"lower {setting}")
    share = params.engine.gpu_memory_utilization
    for gpu in gpus:
        if gpu.memory - gpu.used < share * gpu.memory:
            told = f"GPU {gpu.index}: {size(gpu.used)} of {size(gpu.memory)} are taken, and an engine wants {share:.0%}"
            remedy = "end what runs there (nvidia-smi), or lower engine.gpu_memory_utilization"
            yield Finding("stops", "gpus", told, remedy)


def look_at_cache(params: Params, facts: ModelFacts, gpus: Sequence[Gpu] | None) -> Finding:
    """Whether the KV cache holds the longest request while its states are recorded. gpus: None on a CPU."""
    aux_layers = len(choose_aux_layers(params.verifier.aux_layer_ids, facts.num_layers))
    context = params.verifier.max_model_len
    longest = context * facts.recorded_bytes(aux_layers, params.verifier.dtype)
    if gpus is None:
        room, source = int(params.engine.cpu_kv_cache_gib * GIB), "engine.cpu_kv_cache_gib"
        remedy = f"set it to {math.ceil(100 * longest / GIB) / 100} or more, or lower verifier.max_model_len"
    else:
        ours = min((gpu.memory for gpu in gpus), default=0) * params.engine.gpu_memory_utilization
        room = max(0, int(params.engine.tensor_parallel_size * ours) - facts.weight_bytes)
        source = "what the weights leave of the GPUs"
        remedy = "raise engine.tensor_parallel_size or engine.gpu_memory_utilization, or lower verifier.max_model_len"
    told = f"the longest request ({context:,} tokens) takes {size(longest)}, with its recorded states; {source} has "
    if longest > room:
        return Finding("stops", "KV cache", told + size(room), remedy)
    return Finding("ok", "KV cache", told + size(room))


def look_at_memory(params: Params, facts: ModelFacts, memory: int) -> Finding:
    """Whether weights and KV cache of an engine fit the machine. memory: bytes."""
    needed = facts.weight_bytes + int(params.engine.cpu_kv_cache_gib * GIB)
    told = f"weights and KV cache of an engine take {size(needed)}, this machine has {size(memory)}"
    if needed > memory:
        return Finding("stops", "memory", told, "lower engine.cpu_kv_cache_gib, or take a smaller verifier")
    return Finding("ok", "memory", told)
