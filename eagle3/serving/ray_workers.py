"""The workers of executors.py as Ray actors. The only file that imports ray; it runs in a child process of the stage.

An actor does nothing but own a worker's process on its machine, and carry messages: so a worker is the same code
everywhere, and dies with its actor, which dies with its driver.

    stage -> this process (driver; a cluster of our own ends with it) -> actor -> worker's process -> engine
"""

import os
import select
import socket
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

from eagle3.console import visible
from eagle3.serving.devices import WHOLE_MACHINE, Share, core_shares, device_shares
from eagle3.serving.engine import runs_on_cpu
from eagle3.serving.executors import LOST, Crew, Unit, hand_out
from eagle3.serving.process import EngineError, EngineLost, ParentPipe

NEWS_S = 1.0  # an actor waits so long for news of its worker before it says that there are none
SILENCE_S = 60.0  # an actor that was there and answers nothing for so long is lost
PLACES_S = 30.0  # for a lost actor's cores to be free again
END_S = 5.0  # for all workers to end by themselves
OBJECT_STORE_BYTES = 100 << 20  # of a cluster of our own: only small messages pass through it
FAILED = "failed"


class Place:
    """The actor: a worker's process and the pipe to it."""

    def __init__(self, crew: Crew, number: int, cpus: int):
        """cpus: how many of its node's CPUs this actor has."""
        self._claim: socket.socket | None = None  # held as long as this actor lives
        share = self._claim_cores(cpus) if runs_on_cpu() else WHOLE_MACHINE  # Ray has set CUDA_VISIBLE_DEVICES
        self._process = crew.process(number, share, f" on {socket.gethostname()}")
        with share.confined():
            self._process.__enter__()

    def _claim_cores(self, cpus: int) -> Share:
        """Cores of this machine that no other actor has. Raises ValueError when there are none within PLACES_S."""
        here = ray.get_runtime_context().get_node_id()
        total = next(node["Resources"]["CPU"] for node in ray.nodes() if node["NodeID"] == here)
        shares = core_shares(int(total) // cpus, "workers on one node")
        deadline = time.monotonic() + PLACES_S
        while time.monotonic() < deadline:
            for number, share in enumerate(shares):
                claim = socket.socket(socket.AF_UNIX)
                try:
                    claim.bind(f"\0eagle3-{here}-{number}")  # such a name is free again when its holder is gone
                except OSError:
                    claim.close()
                    continue
                self._claim = claim
                return share
            time.sleep(0.1)
        raise ValueError(f"{socket.gethostname()}: other workers hold all cores")

    def exchange(self, units: Sequence[Unit | None]) -> list[tuple[str, Any]]:
        """Give the worker what it asked for; what it says, within NEWS_S."""
        for unit in units:
            self._process.post(unit)
        told: list[tuple[str, Any]] = []
        try:
            while select.select([self._process.fileno()], [], [], 0 if told else NEWS_S)[0]:
                told.append(self._process.receive(0))
        except EngineLost as error:
            told.append((LOST, str(error)))
        except EngineError as error:
            told.append((FAILED, str(error)))
        return told

    def stop(self) -> None:
        """End the worker."""
        self._process.stop()


class RayWorkers:
    """A context manager: the workers as actors of the cluster that this process is connected to."""

    def __init__(self, crew: Crew, cpus: int, gpus: int):
        """cpus, gpus: of one actor."""
        self._crew, self._cpus = crew, cpus
        self._kind = ray.remote(Place).options(num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_task_retries=0)
        self._actors: dict[int, Any] = {}
        self._calls: dict[Any, int] = {}  # what every actor is asked at the moment -> its number
        self._asked: dict[int, float] = {}  # number -> time.monotonic() of that; none before its first answer
        self._answers: dict[int, list[Unit | None]] = defaultdict(list)  # number -> what to give it with the next call
        self._told: deque[tuple[int, str, Any]] = deque()

    def __enter__(self) -> "RayWorkers":
        for number in range(1, self._crew.count + 1):
            self._start(number)
        return self

    def __exit__(self, *_: object) -> None:
        ray.wait([actor.stop.remote() for actor in self._actors.values()], num_returns=len(self._actors), timeout=END_S)
        for actor in self._actors.values():
            ray.kill(actor)

    def _start(self, number: int) -> None:
        self._actors[number] = self._kind.remote(self._crew, number, self._cpus)
        self._calls[self._actors[number].exchange.remote([])] = number

    def send(self, number: int, unit: Unit | None) -> None:
        self._answers[number].append(unit)

    def receive(self) -> tuple[int, str, Any]:
        while not self._told:
            self._exchange()
        number, kind, content = self._told.popleft()
        if kind == FAILED:
            raise ValueError(content)
        return number, kind, content

    def restart(self, number: int) -> None:
        ray.kill(self._actors[number])
        self._calls = {call: other for call, other in self._calls.items() if other != number}
        self._told = deque(told for told in self._told if told[0] != number)
        self._answers.pop(number, None)
        self._asked.pop(number, None)
        self._start(number)

    def _exchange(self) -> None:
        for number in self._actors.keys() - set(self._calls.values()):
            call = self._actors[number].exchange.remote(self._answers.pop(number, []))
            self._calls[call] = number
            self._asked[number] = time.monotonic()
        done, _ = ray.wait(list(self._calls), timeout=NEWS_S)
        for call in done:
            number = self._calls.pop(call)
            try:
                self._told.extend((number, kind, content) for kind, content in ray.get(call))
            except RayActorError as error:
                self._told.append((number, LOST, self._trouble(number, f"is gone: {' '.join(str(error).split())}")))
        now = time.monotonic()
        for number in [number for number in self._calls.values() if now - self._asked.get(number, now) > SILENCE_S]:
            self._told.append((number, LOST, self._trouble(number, f"has been silent for {SILENCE_S:g} s")))

    def _trouble(self, number: int, what: str) -> str:
        return f"{self._crew.name} worker {number}: its actor {visible(what, 500)}; log: {self._crew.log(number)}"


def run(pipe: ParentPipe, units: Sequence[Unit], crew: Crew, address: str | None, scratch: str) -> None:
    """For EngineProcess: sends the events of executors.run, and None when all has ended.

    scratch: a folder for the files of a cluster of our own. SIGTERM ends it at once: Ray sees to that.
    """
    # Some of Ray's helpers outlive a killed driver by a minute: with the guard, all of this process group ends with it.
    subprocess.Popen([sys.executable, "-m", "eagle3.serving.guard", str(os.getpid()), "sleep", "infinity"])
    try:
        cpus, gpus = _join(address, crew) if address else _start(crew, scratch)
        with RayWorkers(crew, cpus, gpus) as workers:
            for event in hand_out(units, workers, crew.name):
                pipe.send(event)
    finally:
        ray.shutdown()
    pipe.send(None)


def _start(crew: Crew, scratch: str) -> tuple[int, int]:
    """A cluster of this machine alone; CPUs and GPUs of an actor."""
    shares = device_shares(crew.count, crew.tensor_parallel_size, crew.setting)  # or the error of the local executor
    ray.init(
        address="local",
        num_cpus=len(shares),
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=scratch,
    )
    return 1, 0 if runs_on_cpu() else crew.tensor_parallel_size


def _join(address: str, crew: Crew) -> tuple[int, int]:
    """A cluster that runs; CPUs and GPUs of an actor. Raises ValueError when it is not there, or too small."""
    if "://" in address:
        raise ValueError(f"Ray at {address}: run this on a node of the cluster, with its address host:port or `auto`")
    try:
        ray.init(address=address, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ValueError(f"Ray at {address} cannot be joined: {error}") from None
    kind, least = ("CPU", 1) if runs_on_cpu() else ("GPU", crew.tensor_parallel_size)
    nodes = [int(node["Resources"].get(kind, 0)) for node in ray.nodes() if node["Alive"]]
    size = largest_share(nodes, crew.count)
    if size < least:
        raise ValueError(
            f"{crew.setting} = {crew.count}, each with {least} {kind} of one node: Ray at {address} has nodes with "
            f"{', '.join(map(str, nodes))}"
        )
    return (size, 0) if kind == "CPU" else (1, least)


def largest_share(nodes: Sequence[int], count: int) -> int:
    """The most devices that `count` workers can have each, all of one node; 0 when there are too few.

    nodes: how many each node has.
    """
    sizes = range(1, max(nodes, default=0) + 1)
    return max((size for size in sizes if sum(has // size for has in nodes) >= count), default=0)
