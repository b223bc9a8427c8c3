"""Several workers: units and losses, the stage `extract` with processes and with Ray, kills of everything."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest

from eagle3 import recording
from eagle3.hidden_states import TokenTable
from eagle3.params import load_params
from eagle3.serving import executors
from eagle3.serving.devices import WHOLE_MACHINE, Share, device_shares
from eagle3.serving.engine import usable_cores, vllm_package
from eagle3.serving.executors import ASK, DONE, LOSSES, LOST, Finished, Lost, Ready, Unit, hand_out
from eagle3.serving.ray_workers import largest_share
from eagle3.serving.recorder import digest_ids
from eagle3.tables import Row
from eagle3.verifier import write_identity
from tests.stage_runs import wait_until
from tests.test_extract import FAKE, IDENTITY, Run, make_row, make_run
from tests.token_tables import PROJECT, write_tokens

pytestmark = pytest.mark.usefixtures("all_cores")
WORKER = "tests.fake_recording_worker:work"
LOCAL = {"extract__executor": "local", "extract__workers": 2}
RAY = {"extract__executor": "ray", "extract__workers": 2}
KINDS = [pytest.param(LOCAL, id="local"), pytest.param(RAY, id="ray", marks=[pytest.mark.slow, pytest.mark.exhaustive])]


class ScriptedWorkers:
    """Workers that say what a script says, and note what they are given."""

    def __init__(self, *script: tuple[int, str, Any]):
        self._script = deque(script)
        self.given: list[tuple[int, Any]] = []
        self.restarted: list[int] = []

    def send(self, number: int, unit: Unit | None) -> None:
        self.given.append((number, unit))

    def receive(self) -> tuple[int, str, Any]:
        return self._script.popleft()

    def restart(self, number: int) -> None:
        self.restarted.append(number)


def test_units_are_given_out_in_order_to_whoever_asks() -> None:
    workers = ScriptedWorkers(
        (1, ASK, True), (2, ASK, True), (1, ASK, False), (1, ASK, False),
        (2, DONE, ("b", 2)), (1, DONE, ("c", 3)), (1, DONE, ("a", 1)),
    )  # fmt: skip
    events = list(hand_out(["a", "b", "c"], workers, "x"))
    assert events == [Ready(1), Ready(2), Finished("b", 2), Finished("c", 3), Finished("a", 1)]
    assert workers.given == [(1, "a"), (2, "b"), (1, "c"), (1, None)]


def test_what_a_lost_worker_had_goes_to_one_that_waits() -> None:
    workers = ScriptedWorkers(
        (1, ASK, True), (2, ASK, True), (1, ASK, False), (2, DONE, ("b", 0)), (2, ASK, True),
        (1, LOST, "gone"), (2, ASK, False), (2, DONE, ("a", 0)), (1, ASK, True), (2, DONE, ("c", 0)),
    )  # fmt: skip
    events = list(hand_out(["a", "b", "c"], workers, "x"))
    assert events[3:] == [Lost(1, 2, "gone"), Finished("a", 0), Ready(1), Finished("c", 0)]
    assert workers.given == [(1, "a"), (2, "b"), (1, "c"), (2, "a"), (2, "c")]
    assert workers.restarted == [1]


@pytest.mark.parametrize("asks", [True, False])
def test_the_same_loss_again_and_again_is_an_error(asks: bool) -> None:
    one_life = [(1, ASK, True), (1, LOST, "engine gone")] if asks else [(1, LOST, "engine gone")]
    workers = ScriptedWorkers(*one_life * LOSSES)
    with pytest.raises(ValueError, match="x: 3 workers were lost over the same work, the last one so: engine gone"):
        list(hand_out(["a"], workers, "x"))
    assert workers.restarted == [1] * (LOSSES - 1)


def test_losses_of_different_units_are_no_error() -> None:
    script: list[tuple[int, str, Any]] = []
    for unit in range(10):
        script += [(1, ASK, True), (1, LOST, "?"), (1, ASK, True), (1, DONE, (unit, 0))]
    workers = ScriptedWorkers(*script)
    assert [event.unit for event in hand_out(range(10), workers, "x") if isinstance(event, Finished)] == [*range(10)]
    assert workers.restarted == [1] * 10


def test_shares_of_cores_and_gpus_are_disjoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle3.serving.devices.usable_cores", lambda: [1, 2, 5, 6, 7])
    assert device_shares(1, 8, "s") == [WHOLE_MACHINE]
    assert device_shares(2, 1, "s") == [Share(cores=(1, 2)), Share(cores=(5, 6, 7))]
    with pytest.raises(ValueError, match="s = 6: every engine needs a core, and this machine has 5"):
        device_shares(6, 1, "s")
    monkeypatch.setattr("eagle3.serving.devices.runs_on_cpu", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,0,GPU-ab,7,2")
    shares = device_shares(2, 2, "s")
    assert shares == [Share(gpus=("3", "0")), Share(gpus=("GPU-ab", "7"))]
    assert shares[1].environment == {"CUDA_VISIBLE_DEVICES": "GPU-ab,7"}
    with pytest.raises(ValueError, match=r"s = 3: with engine.tensor_parallel_size = 2 that takes 6 GPUs, .* has 5"):
        device_shares(3, 2, "s")


@pytest.mark.parametrize(
    ("nodes", "count", "size"),
    [([8], 1, 8), ([8], 3, 2), ([4, 4], 1, 4), ([4, 8], 2, 4), ([4, 8], 3, 4), ([2], 3, 0), ([8, 0], 8, 1), ([], 1, 0)],
)
def test_a_worker_has_devices_of_one_node(nodes: list[int], count: int, size: int) -> None:
    assert largest_share(nodes, count) == size


@pytest.fixture(autouse=True)
def fake_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "WORKER", WORKER)
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))


@pytest.fixture
def rows() -> list[Row]:
    choice = random.Random(0)
    return [make_row(choice) for _ in range(60)]


def contents(run: Run) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.out.iterdir()}


def requested(run: Run) -> Counter[str]:
    """How often each sample was recorded, by the digest of its ids."""
    return Counter(run.requests())


def samples_of(run: Run, rows: list[Row], shards: set[str]) -> set[str]:
    """Digests of the ids of all samples in these shards."""
    inside = {row["sample_id"] for row in run.index() if row["shard"].removesuffix(".safetensors") in shards}
    return {digest_ids(row["input_ids"]) for row in rows if row["sample_id"] in inside}


def nobody_left() -> bool:
    return not psutil.wait_procs(psutil.Process().children(recursive=True), 5)[1]


@pytest.mark.parametrize("kind", KINDS)
def test_outs_are_the_same_whoever_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Row], kind: dict[str, object]
) -> None:
    outs = []
    for name, changes in (("one", {}), ("many", kind)):
        (tmp_path / name).mkdir()
        monkeypatch.setenv("EAGLE3_WORK_DIR", str(tmp_path / name / "work"))
        run = make_run(tmp_path / name, monkeypatch, **changes)
        metrics = run.extract(rows, seconds_each=0.01, crew_of=changes.get("extract__workers", 1))
        assert len(run.requests()) == 60
        assert metrics.pop("tokens_per_second") > 0
        outs.append((contents(run), metrics))
    assert outs[0] == outs[1]
    assert len(outs[0][0]) > 6
    bound = (tmp_path / "many" / "requests.log.cores").read_text().split()
    cores = [{int(core) for core in line.split(",")} for line in bound]
    assert len(cores) == 2 and cores[0].isdisjoint(cores[1]) and cores[0] | cores[1] == set(usable_cores())
    assert not list(run.work.glob("*.partial")) and not list(run.work.glob("*.tmp"))
    assert nobody_left()


def test_one_worker_starts_no_process_but_the_engine(
    run: Run, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "run", None)
    assert run.extract(rows)["rows_out"] == 60


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return make_run(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("kind", "victim"),
    [
        pytest.param(LOCAL, "fake_recording_engine", id="engine"),
        pytest.param(LOCAL, "eagle3.serving.process", id="worker"),
        pytest.param(RAY, "ray::Place", id="actor", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_kill_9_is_survived_and_nothing_finished_is_recorded_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: list[Row],
    kind: dict[str, object],
    victim: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, note = make_run(tmp_path, monkeypatch, **kind), tmp_path / "note"
    if victim == "fake_recording_engine":
        metrics = run.extract(rows, crew_of=2, seconds_each=0.05, die_once_after=16, kill_note=str(note))
    else:
        metrics = run.extract(rows, crew_of=2, seconds_each=0.05, kill_after=16, kill_note=str(note), kill_name=victim)
    assert metrics["rows_out"] == 60
    finished = set(json.loads(note.read_text()))
    assert finished
    asked = requested(run)
    assert all(asked[sample] == 1 for sample in samples_of(run, rows, finished))
    assert set(asked) == {digest_ids(row["input_ids"]) for row in rows}
    told = capsys.readouterr().err
    assert told.count("was lost, its ") == 1 and "log: " in told
    assert not list(run.work.glob("*.partial"))
    assert nobody_left()
    expected = contents(run)
    assert run.extract(rows)["shards_reused"] == metrics["shards"]
    assert contents(run) == expected
    assert run.requests() == []


class StageProcess:
    """The stage as a process of its own, with fake workers."""

    def __init__(self, run: Run, rows: list[Row], **faults: object):
        write_tokens(run.folder / "tokens", rows)
        write_identity(IDENTITY, run.folder / "verifier.json")
        script = f"""
            import signal
            from eagle3 import recording
            from eagle3.serving import recorder
            from eagle3.stage import run_stage
            from stages.extract import extract
            signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever it was inherited as
            recording.WORKER, recorder.ENGINE = {WORKER!r}, {FAKE!r}
            run_stage(extract)
        """
        self._run = run
        self._process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), *map(str, run.arguments())],
            env=os.environ | {"EAGLE3_FAKE": json.dumps(faults)},
            cwd=run.folder,
            stderr=subprocess.PIPE,
            text=True,
        )

    def await_shards(self, count: int) -> list[psutil.Process]:
        """Wait until so many shards are finished; all processes below the stage."""
        wait_until(
            lambda: len(list(self._run.work.glob("*.safetensors"))) >= count or self._process.poll() is not None, 120
        )
        assert self._process.poll() is None
        return psutil.Process(self._process.pid).children(recursive=True)

    def end(self, number: int) -> tuple[int, str]:
        """Send a signal; exit code and what it said."""
        self._process.send_signal(number)
        _, told = self._process.communicate(timeout=60)
        return self._process.returncode, told


@pytest.mark.parametrize(
    ("kind", "number"),
    [  # SIGTERM to a stage with Ray: test_ray_of_ours_...
        pytest.param(LOCAL, signal.SIGKILL, id="local-kill"),
        pytest.param(LOCAL, signal.SIGTERM, id="local-term"),
        pytest.param(LOCAL, signal.SIGINT, id="local-int"),
        pytest.param(RAY, signal.SIGKILL, id="ray-kill", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_a_stage_that_is_ended_takes_everything_along_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Row], kind: dict[str, object], number: int
) -> None:
    run = make_run(tmp_path, monkeypatch, **kind)
    stage = StageProcess(run, rows, crew_of=2, seconds_each=0.1)
    below = stage.await_shards(2)
    assert sum("eagle3.serving.process" in " ".join(process.cmdline()) for process in below) >= 4
    code, told = stage.end(number)
    assert code == (-number if number == signal.SIGKILL else 130), told
    assert not psutil.wait_procs(below, 20)[1]
    assert not run.out.exists()
    kept = {path.stem: path.stat().st_mtime_ns for path in run.work.glob("*.safetensors")}
    run.requests()
    metrics = run.extract(rows)
    assert metrics["shards_reused"] == len(kept) >= 2
    assert {name: run.shards()[f"{name}.safetensors"] for name in kept} == kept
    left = {digest_ids(row["input_ids"]) for row in rows} - samples_of(run, rows, set(kept))
    assert requested(run) == Counter(left)
    assert not list(run.work.glob("*.partial"))
    assert nobody_left()


def test_workers_that_die_again_and_again_end_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Row]
) -> None:
    run = make_run(tmp_path, monkeypatch, **LOCAL)
    with pytest.raises(ValueError, match=r"extract: 3 workers were lost over the same work") as error:
        run.extract(rows, die_after=1)
    assert "SomethingError: the engine met its end" in str(error.value)
    assert str(run.folder / "work" / "logs" / "extract-") in str(error.value)
    assert nobody_left()
    assert run.extract(rows)["rows_out"] == 60


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_engine_reports_ends_the_stage_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Row], kind: dict[str, object]
) -> None:
    run = make_run(tmp_path, monkeypatch, **kind)
    with pytest.raises(ValueError, match=r"extract worker \d.*: failed: .*No space left on device.*log: .*extract-\d"):
        run.extract(rows, raise_after=10)
    assert len(run.requests()) < 60
    assert not list(run.work.glob("*.partial"))
    assert nobody_left()


def test_more_workers_than_cores_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Row]) -> None:
    run = make_run(tmp_path, monkeypatch, extract__workers=len(usable_cores()) + 1)
    with pytest.raises(ValueError, match=r"extract.workers = \d+: every engine needs a core"):
        run.extract(rows)


def test_without_ray_one_line_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Row]
) -> None:
    run = make_run(tmp_path, monkeypatch, extract__executor="ray")
    monkeypatch.setattr(executors.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"extract.executor: ray needs the package ray: pip install -e '.\[ray\]'"):
        run.extract(rows)


@pytest.mark.parametrize("absent", ["mark", "verifier", "table"])
def test_a_worker_on_another_disk_or_with_another_vllm_says_so(tmp_path: Path, absent: str) -> None:
    params = load_params(PROJECT / "params.yaml")
    there = {name: tmp_path / name for name in ("mark", "verifier", "table")}
    for path in there.values():
        path.mkdir()
    way = recording.Recording(IDENTITY, params.verifier, params.engine, params.extract)
    table = TokenTable(there["table"], 8)
    job = recording.Job(way, vllm_package(), table, there["verifier"], tmp_path, there["mark"], tmp_path)
    job.require_same_place()
    with pytest.raises(ValueError, match=r"vllm 0\.1 where the stage runs"):
        replace(job, package=("vllm", "0.1")).require_same_place()
    there[absent].rmdir()
    with pytest.raises(ValueError, match=rf"{there[absent]} is not there on .* disk that all machines share"):
        job.require_same_place()


def listening(processes: list[psutil.Process]) -> dict[str, str]:
    """Every internet address that one of these processes takes connections or datagrams at, and whose it is."""
    found = {}
    for process in processes:
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN or (connection.type == socket.SOCK_DGRAM and connection.laddr):
                found[connection.laddr.ip] = process.name()
    return found


@pytest.mark.slow
@pytest.mark.exhaustive
def test_ray_of_ours_listens_on_loopback_only_and_writes_nothing_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Row]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run = make_run(tmp_path, monkeypatch, **RAY)
    stage = StageProcess(run, rows, crew_of=2, seconds_each=0.1)
    below = stage.await_shards(1)
    assert {"raylet", "gcs_server"} <= {process.name() for process in below}
    found = listening(below)
    assert found
    assert all(is_loopback(ip) for ip in found), found
    words = " ".join(word for process in below for word in process.cmdline())
    scratch = {Path(found) for found in re.findall(r"[\w./-]+/eagle3-ray-\w+", words)}
    assert scratch and all(path.is_dir() for path in scratch)
    assert stage.end(signal.SIGTERM)[0] == 130
    assert not any(path.exists() for path in scratch)
    assert not (tmp_path / "home").exists()


def is_loopback(ip: str) -> bool:
    address = ip_address(ip)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


CLUSTER = """
import sys, time, ray
context = ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=sys.argv[1])
print(context.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, psutil.Process]]:
    """Address and process of a Ray that others started."""
    for name, value in executors.own_cluster_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("EAGLE3_FAKE", json.dumps({"seconds_each": 0.2, "crew_of": 2}))
    monkeypatch.setenv("EAGLE3_FAKE_REQUESTS", str(tmp_path / "requests.log"))  # engines have what the cluster has
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as scratch:
        command = [sys.executable, "-c", CLUSTER, scratch]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), psutil.Process(process.pid)
            process.communicate()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_cluster_that_runs_is_joined_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Row], cluster: tuple[str, psutil.Process]
) -> None:
    """By its variable; the test after this one names it in params.yaml."""
    address, process = cluster
    monkeypatch.setenv("RAY_ADDRESS", address)
    run = make_run(tmp_path, monkeypatch, **RAY)
    assert run.extract(rows)["rows_out"] == 60
    assert process.is_running()
    assert not ours_below(process)
    (tmp_path / "more").mkdir()
    more = make_run(tmp_path / "more", monkeypatch, **RAY | {"extract__workers": 3})
    with pytest.raises(
        ValueError, match=rf"extract.workers = 3, each with 1 CPU of one node: Ray at {address} has nodes with 2"
    ):
        more.extract(rows[:10], seconds_each=0)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_driver_that_is_killed_leaves_no_worker_on_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Row], cluster: tuple[str, psutil.Process]
) -> None:
    address, process = cluster
    run = make_run(tmp_path, monkeypatch, **RAY, extract__ray_address=address)
    stage = StageProcess(run, rows)
    wait_until(lambda: len(ours_below(process)) >= 4, 240)
    stage.await_shards(2)
    assert stage.end(signal.SIGKILL)[0] == -signal.SIGKILL
    wait_until(lambda: not ours_below(process), 30)
    kept = len(run.shards())
    assert run.extract(rows)["shards_reused"] == kept >= 2
    assert process.is_running()


def ours_below(process: psutil.Process) -> list[psutil.Process]:
    """Workers and engines among what a Ray has started."""
    found = []
    for child in process.children(recursive=True):
        with suppress(psutil.Error):  # it ends just now
            if "eagle3.serving" in " ".join(child.cmdline()):
                found.append(child)
    return found


def test_an_address_where_no_ray_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Row]) -> None:
    run = make_run(tmp_path, monkeypatch, **RAY, extract__ray_address="ray://127.0.0.1:10001")
    with pytest.raises(ValueError, match=r"Ray at ray://127.0.0.1:10001: run this on a node of the cluster"):
        run.extract(rows)
