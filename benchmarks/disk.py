"""What the disk does by itself: sequential writing and reading of a folder's filesystem, to compare with."""

import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

PIECE = 16 << 20


def write_sequentially(path: Path, size: int) -> float:
    """Seconds to write `size` bytes that do not compress into one new file, fsync included."""
    piece = memoryview(os.urandom(PIECE))
    os.sync()
    started = time.monotonic()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        left = size
        while left:
            left -= os.write(file, piece[:left])
        os.fsync(file)
    finally:
        os.close(file)
    return time.monotonic() - started


def read_sequentially(paths: Iterable[Path]) -> float:
    """Seconds to read these files from end to end into one buffer."""
    buffer = bytearray(PIECE)
    started = time.monotonic()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while file.readinto(buffer):
                pass
    return time.monotonic() - started


def drop_from_cache(paths: Iterable[Path]) -> None:
    """Have the kernel forget these files' pages; it keeps those that are dirty or that somebody has mapped."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bytes_from_disk() -> int:
    """Bytes that this process has caused to be read from a disk until now, cached ones left out."""
    found = re.search(r"^read_bytes: (\d+)$", Path("/proc/self/io").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])
