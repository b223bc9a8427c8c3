"""Gives each of pytest-xdist's workers cores of its own, before torch counts them.

Engines and trainers spin while they wait: two of them on the same cores slow each other down many times over.
"""

import os

if hasattr(os, "sched_setaffinity") and "PYTEST_XDIST_WORKER" in os.environ:
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[number :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])] or cores)
