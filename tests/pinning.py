"""Gives each of pytest-xdist's workers one share of the cores, before torch counts them.

Engines and trainers spin while they wait: two of them that share several cores slow each other down many times over.
Where there are more workers than cores, several have the same single core, and nothing spins.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

if hasattr(os, "sched_setaffinity") and "PYTEST_XDIST_WORKER" in os.environ:
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[number::workers] or {cores[number % len(cores)]})


@contextmanager
def on_cores(cores: Iterable[int]) -> Iterator[None]:
    """Run on these cores, and then on those of before."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
