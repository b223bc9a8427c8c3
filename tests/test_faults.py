"""20,000 rows at 200 in flight through every kind of trouble, killed midway: each exactly once, or listed as failed."""

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from eagle3.digests import digest
from tests.faulty_server import KINDS, REASONS
from tests.stage_runs import ServerProcess, Stage, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

ROWS, CONCURRENCY = 20_000, 200
ONCE, ALWAYS = 60, 4  # rows of each kind
SHORT_TIMEOUT = "from eagle3.serving import client\nclient.request_timeout_s = lambda *_: 4.0"


def make_texts() -> list[str]:
    modes = [
        (kind, mode) for kind in KINDS for mode, count in (("once", ONCE), ("always", ALWAYS)) for _ in range(count)
    ]
    modes += [("good", "x")] * (ROWS - len(modes))
    random.Random(0).shuffle(modes)
    return [f"{i} {kind} {mode}" for i, (kind, mode) in enumerate(modes)]


def peak_memory(pid: int) -> int:
    """Most resident bytes so far of a running program; 0 where it has ended. (A rusage counts its parent's, too.)"""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def test_every_row_once_or_listed_and_memory_stays(tmp_path: Path) -> None:
    texts, work = make_texts(), Path(os.environ["EAGLE3_WORK_DIR"])
    with ServerProcess(tmp_path, "told") as server:
        stage = Stage(tmp_path, server.url, texts, concurrency=CONCURRENCY, retries=2)
        first = stage.start(SHORT_TIMEOUT)
        wait_until(lambda: len(server.texts("answered")) > ROWS // 10)
        small = psutil.Process(first.pid).memory_info().rss
        wait_until(lambda: len(server.texts("answered")) > ROWS // 2)
        grown = psutil.Process(first.pid).memory_info().rss - small
        first.send_signal(signal.SIGKILL)
        first.communicate()
        kept, place = stage.kept(work), len(server.events())
        assert len(set(server.texts("answered")) - kept) <= CONCURRENCY

        second = stage.start(SHORT_TIMEOUT)
        peak = 0
        while second.poll() is None:
            peak = max(peak, peak_memory(second.pid))
            time.sleep(0.1)
        assert second.returncode == 0, second.stderr and second.stderr.read()
        asked_again = Counter(server.texts("asked", place))
        asked = Counter(server.texts("asked"))

    assert kept.isdisjoint(asked_again)
    failed = {text for text in texts if text.endswith("always") and text.split()[1] != "slow"}
    assert [row["prompt_id"] for row in stage.rows()] == [
        name for name in stage.expected_order() if name not in set(map(digest, failed))
    ]
    assert stage.rejected() == {digest(text): REASONS[text.split()[1]] for text in failed}
    assert stage.metrics()["rows_out"] == ROWS - len(failed)
    assert max(asked.values()) <= 2 * 3  # the tries of two runs
    assert 0 < peak < 1_000_000_000
    assert grown < 100 << 20, f"{grown} bytes more between 2,000 and 10,000 rows"
