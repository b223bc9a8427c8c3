"""Which devices an engine gets where several of them share a machine: cores of its own on a CPU, GPUs elsewhere."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from eagle3.serving.engine import runs_on_cpu, usable_cores

GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Share:
    """The devices of one engine; empty = whatever the machine has. gpus: as CUDA_VISIBLE_DEVICES names them."""

    cores: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """Variables for the processes of the engine."""
        return {GPUS_VARIABLE: ",".join(self.gpus)} if self.gpus else {}

    @contextmanager
    def confined(self) -> Iterator[None]:
        """What this thread starts inside the block runs on these cores for good; the thread itself only inside."""
        if sys.platform != "linux" or not self.cores:
            yield
            return
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cores)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


WHOLE_MACHINE = Share()


def device_shares(count: int, tensor_parallel_size: int, setting: str) -> list[Share]:
    """This machine's devices for `count` engines, none in two shares. Raises ValueError that names `setting`."""
    if count == 1:
        return [WHOLE_MACHINE]
    if runs_on_cpu():
        return core_shares(count, setting)
    gpus, needed = visible_gpus(), count * tensor_parallel_size
    if needed > len(gpus):
        raise ValueError(
            f"{setting} = {count}: with engine.tensor_parallel_size = {tensor_parallel_size} that takes {needed} GPUs, "
            f"and this machine has {len(gpus)}"
        )
    return [Share(gpus=tuple(gpus[end - tensor_parallel_size : end])) for end in _ends(needed, count)]


def core_shares(count: int, setting: str) -> list[Share]:
    """This machine's cores for `count` engines. Raises ValueError that names `setting`."""
    cores = usable_cores()
    if count > len(cores):
        raise ValueError(f"{setting} = {count}: every engine needs a core, and this machine has {len(cores)}")
    ends = _ends(len(cores), count)
    return [Share(cores=tuple(cores[start:end])) for start, end in zip([0, *ends], ends, strict=False)]


def _ends(total: int, count: int) -> list[int]:
    """Where each of `count` equal parts of a list ends."""
    return [total * (number + 1) // count for number in range(count)]


def visible_gpus() -> list[str]:
    """Names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    named = os.environ.get(GPUS_VARIABLE)
    if named is not None:
        return [name for name in named.split(",") if name]
    return [str(number) for number in range(torch.cuda.device_count())]
