"""What this machine has: GPUs, memory, what its processor can, how its filesystems link. Imports no torch."""

import errno
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
QUERY = ("index", "name", "memory.total", "memory.used")
FICLONE = 0x40049409  # ioctl of Linux: share the blocks of another file
GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi has it. Bytes."""

    index: str
    name: str
    memory: int
    used: int


def visible_gpus() -> list[Gpu]:
    """The GPUs of this machine that CUDA_VISIBLE_DEVICES allows by number; none without nvidia-smi."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    words = [command, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    gpus = [Gpu(row[0], row[1], int(row[2]) * MIB, int(row[3]) * MIB) for row in rows if len(row) == len(QUERY)]
    allowed = os.environ.get(GPUS_VARIABLE)
    return gpus if allowed is None else [gpu for gpu in gpus if gpu.index in allowed.split(",")]


def processor_flags() -> set[str]:
    """The instruction sets of the processor as Linux names them; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.partition(":")[2].split()}


def nearest_folder(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.is_dir())


def links_between(source: Path, target: Path) -> list[str]:
    """Which of reflink, hardlink and symlink work for a file of one folder under a name in another: each is tried.

    Folders that are not there yet are judged by the nearest one above. Raises OSError when one cannot be written to.
    """
    with (
        tempfile.NamedTemporaryFile(dir=nearest_folder(source), prefix=".eagle3-link-") as file,
        tempfile.TemporaryDirectory(dir=nearest_folder(target), prefix=".eagle3-link-") as folder,
    ):
        file.write(b"x")
        file.flush()
        ways: dict[str, Callable[[str, str], None]] = {"reflink": _reflink, "hardlink": os.link, "symlink": os.symlink}
        return [name for name, way in ways.items() if _works(way, file.name, f"{folder}/{name}")]


def _works(way: Callable[[str, str], None], source: str, target: str) -> bool:
    try:
        way(source, target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EROFS):
            raise
        return False
    return True


def _reflink(source: str, target: str) -> None:
    with Path(source).open("rb") as reader, Path(target).open("wb") as writer:
        fcntl.ioctl(writer.fileno(), FICLONE, reader.fileno())
