"""The processes that train together, and everything they tell each other.

Data parallel: each process works on its share of an optimiser step's batches. The loss is one sum over all positions of
the step, weighted with counts of all processes, so gradients are summed, not averaged. Where each process holds the
whole draft they are summed here, by name, rather than by DistributedDataParallel, which wants as many backward passes
of every process; eagle3.draft.sharding has the draft in shards.

Alone, a process has no process group and every method below returns at once.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from eagle3.console import Interrupted
from eagle3.params import TrainParams

LAUNCHER = "EAGLE3_LAUNCHER"  # process id of the torchrun that eagle3.draft.torchrun started, and the port of its store
LOOPBACK = "127.0.0.1"
TOLD = "eagle3/told"  # in the store: a process tells why it fails; the others end in silence
SILENCE = timedelta(minutes=10)  # of another process, and this one gives up
INTERRUPTED = 130  # exit code
_PR_SET_PDEATHSIG = 1
_Item = TypeVar("_Item")


class PeerLostError(ValueError):
    """Another process has ended, or was silent for too long."""


@dataclass(frozen=True)
class Processes:
    """This process (`rank`, from 0) among `count`. Collectives: all call the same methods in the same order."""

    rank: int
    count: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this is the one that writes files and speaks to the user."""
        return self.rank == 0

    def share(self, items: Sequence[_Item]) -> list[_Item]:
        """This process's part of what all have: dealt in turns."""
        return list(items[self.rank :: self.count])

    def most(self, items: int) -> int:
        """How many of so many items `share` gives to the process that gets most."""
        return -(-items // self.count)

    def sum(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace each tensor by its sum over all processes."""
        if self.count > 1:
            with _naming_lost_peers():
                for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                    work.wait()

    def totals(self, values: Sequence[float]) -> list[float]:
        """Each number summed over all processes, in float64 (counts stay exact)."""
        if self.count == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        self.sum([tensor])
        return list(tensor.tolist())

    def any(self, *flags: bool) -> list[bool]:
        """Of each flag whether any process says so. Also the place where all wait for each other."""
        return [total > 0 for total in self.totals([float(flag) for flag in flags])]

    def copy_from_first(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite each tensor with that of the first process."""
        if self.count > 1:
            with _naming_lost_peers():
                for tensor in tensors:
                    dist.broadcast(tensor, src=0)

    def text_from_first(self, text: str) -> str:
        """What the first process passes; the others' text is not read."""
        if self.count == 1:
            return text
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(self.device)
        size = torch.tensor([len(data)], device=self.device)
        self.copy_from_first([size])
        data = data if self.leads else data.new_empty(int(size))
        self.copy_from_first([data])
        return bytes(data.tolist()).decode()

    def agree(self, key: str) -> None:
        """Raise ValueError in all processes unless all have the same key."""
        if self.any(self.text_from_first(key) != key)[0]:
            raise ValueError(
                "train: the processes do not have the same data, verifier, settings and code; check out the same "
                "commit and run `dvc pull` on every machine"
            )

    @contextmanager
    def naming_lost_peers(self) -> Iterator[None]:
        """PeerLostError for what torch raises where it talks to the other processes by itself (sharded weights)."""
        try:
            yield
        except RuntimeError as error:
            if self.count == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            raise _lost(error) from error


def choose_device() -> torch.device:
    """The GPU when there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def alone() -> Processes:
    """The one process that needs no other."""
    return Processes(0, 1, choose_device())


def under_torchrun() -> bool:
    """Whether a torchrun (or whatever sets its variables) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_work(count: int, params: TrainParams) -> None:
    """Raise ValueError when `count` processes would leave one without a batch in every optimiser step."""
    if params.gradient_accumulation < count:
        raise ValueError(
            f"train.gradient_accumulation is {params.gradient_accumulation}, the batches of one optimiser step over "
            f"all processes: too few for {count} processes; set it to {count} or more, or train.nproc lower"
        )


@contextmanager
def joined(params: TrainParams) -> Iterator[Processes]:
    """The processes of the torchrun that started this one; without one, this process alone.

    Of errors in several processes one is told: the first; the others end with SystemExit. Raises ValueError when there
    is no work for a process or no GPU.
    """
    if not under_torchrun() or os.environ["WORLD_SIZE"] == "1":
        yield alone()
        return
    count, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if LAUNCHER in os.environ:
        _end_with(int(os.environ[LAUNCHER].split(":")[0]))
    with _naming_lost_peers():
        store = _store(rank, count)
    try:
        check_work(count, params)
        device = _own_device()
        with _naming_lost_peers():
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=count, timeout=SILENCE
            )
        yield Processes(rank, count, device)
    except (KeyboardInterrupt, Interrupted):
        _ignore_terminations()
        if rank == 0 and LAUNCHER not in os.environ:
            raise
        sys.exit(INTERRUPTED)
    except PeerLostError:
        _ignore_terminations()
        if LAUNCHER not in os.environ:
            raise
        sys.exit(1)
    except Exception:
        _ignore_terminations()
        if _told_already(store, rank):
            sys.exit(1)
        raise
    dist.destroy_process_group()


def _store(rank: int, count: int) -> Store:
    if LAUNCHER in os.environ:
        return TCPStore(LOOPBACK, int(os.environ[LAUNCHER].split(":")[1]), is_master=False, timeout=SILENCE)
    store: Store = next(rendezvous("env://", rank, count, timeout=SILENCE))[0]
    return store


def _own_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number, present = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if number >= present:
        raise ValueError(f"train: more processes than GPUs on this machine ({present}); lower train.nproc to {present}")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def _end_with(launcher: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:
        os._exit(1)


def _ignore_terminations() -> None:
    """torchrun terminates the others when one has ended; this one is on its way out already."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _told_already(store: Store, rank: int) -> bool:
    """Whether another process has told its error; from now on this one has."""
    try:
        return bool(store.compare_set(TOLD, "", str(rank)) != str(rank).encode())
    except RuntimeError:
        return False


@contextmanager
def _naming_lost_peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise _lost(error) from error


def _lost(error: RuntimeError) -> PeerLostError:
    told = str(error).splitlines()[0]
    return PeerLostError(f"train: another process has ended or does not answer ({told})")
