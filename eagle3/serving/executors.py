"""Units of work for several workers at once: processes of this machine, or actors of a Ray cluster.

    run           the results of units, as they come; what is lost with a worker is done by others, and it starts again
    hand_out      who works on what; the same for both kinds
    LocalWorkers  a process each, with a share of this machine's devices       ray_workers.py  the same on many machines
    Desk          a worker's end: it asks for units, in their order, and hands in results

A worker asks before it has finished what it has, so that its engine never runs dry. A unit and its result are small:
the bulk lies in files that both ends see.
"""

import importlib.util
import os
import secrets
import select
import tempfile
from collections import Counter, defaultdict, deque
from collections.abc import Generator, Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from eagle3.serving.devices import Share, device_shares
from eagle3.serving.process import EngineLost, EngineProcess, ParentPipe, resolve

RAY = "eagle3.serving.ray_workers:run"
LOSSES = 3  # of one unit, or of one worker before its first unit: then the fault is not chance
ASK, DONE, LOST = "ask", "done", "lost"

Unit = Hashable


@dataclass(frozen=True)
class Crew:
    """The workers of a run.

    target: "module:function", called with a ParentPipe, the worker's number and the arguments; it makes a Desk of the
        pipe. Whatever it raises ends the run, except an EngineLost: then it is started again.
    setting: the key of `count` in params.yaml. logs: the folder of <name>-worker-<number>.log, a worker's own output;
        numbers start at 1.
    """

    name: str
    target: str
    arguments: tuple[Any, ...]
    count: int
    tensor_parallel_size: int
    setting: str
    logs: Path

    def log(self, number: int) -> Path:
        """Where a worker's own output goes."""
        return self.logs / f"{self.name}-worker-{number}.log"

    def process(self, number: int, share: Share, place: str = "") -> EngineProcess:
        """A worker, not yet started. place: where it is, for errors."""
        return EngineProcess(
            "eagle3.serving.executors:work",
            (self.target, number, self.arguments),
            share.environment,
            self.log(number),
            f"{self.name} worker {number}{place}",
        )


@dataclass(frozen=True)
class Ready:
    """A worker's engine runs."""

    number: int


@dataclass(frozen=True)
class Lost:
    """A worker was lost, and is started again. units: how many it had that others do now."""

    number: int
    units: int
    reason: str


@dataclass(frozen=True)
class Finished:
    """A unit is done."""

    unit: Any
    result: Any


Event = Ready | Lost | Finished


class Desk:
    """A worker's end. Whoever waits here when the run is over, or its driver gone, ends by SystemExit."""

    def __init__(self, pipe: ParentPipe):
        self._pipe = pipe

    def wait(self) -> Any:
        """The next unit; waits until there is one. For a worker that has nothing left to do."""
        return self._ask(True)

    def take(self) -> Any | None:
        """The next unit, or None when there is none at present."""
        return self._ask(False)

    def done(self, unit: Unit, result: Any) -> None:
        """Hand in what came of a unit."""
        self._pipe.send((DONE, (unit, result)))

    def _ask(self, patient: bool) -> Any:
        self._pipe.send((ASK, patient))
        return self._pipe.receive()


class Workers(Protocol):
    """The driver's end of all workers."""

    def send(self, number: int, unit: Unit | None) -> None:
        """Answer a worker that asked; one that is gone will be told of by receive."""

    def receive(self) -> tuple[int, str, Any]:
        """Number, kind and content of the next message. Raises ValueError for what must end the run."""

    def restart(self, number: int) -> None:
        """Start a lost worker again."""


def hand_out(units: Sequence[Unit], workers: Workers, name: str) -> Iterator[Event]:
    """Give out the units in order until all of them are done.

    Raises ValueError when a worker reports an error, or when the same unit or worker is lost again and again.
    """
    waiting, idle = deque(units), deque[int]()
    held: dict[int, list[Unit]] = defaultdict(list)
    losses: Counter[Unit] = Counter()
    seen: set[int] = set()
    left = len(units)

    def give(number: int) -> None:
        held[number].append(waiting.popleft())
        workers.send(number, held[number][-1])

    while left:
        number, kind, content = workers.receive()
        if kind == ASK:
            if number not in seen:
                seen.add(number)
                yield Ready(number)
            if waiting:
                give(number)
            elif content:
                idle.append(number)
            else:
                workers.send(number, None)
        elif kind == DONE:
            unit, result = content
            held[number].remove(unit)
            left -= 1
            yield Finished(unit, result)
        else:
            lost = held.pop(number, [])
            losses.update(lost or [("worker", number)])
            if max(losses.values()) >= LOSSES:
                raise ValueError(f"{name}: {LOSSES} workers were lost over the same work, the last one so: {content}")
            seen.discard(number)
            if number in idle:
                idle.remove(number)
            waiting.extendleft(reversed(lost))
            workers.restart(number)
            yield Lost(number, len(lost), content)
            while waiting and idle:
                give(idle.popleft())


class LocalWorkers:
    """A context manager: the workers as processes of this machine, each on devices of its own."""

    def __init__(self, crew: Crew):
        self._crew = crew
        self._shares = device_shares(crew.count, crew.tensor_parallel_size, crew.setting)
        self._processes: dict[int, EngineProcess] = {}

    def __enter__(self) -> "LocalWorkers":
        try:
            for number in range(1, self._crew.count + 1):
                self._start(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.end()
        with ExitStack() as stack:  # every one is stopped, whatever happens meanwhile
            for process in self._processes.values():
                stack.callback(process.stop)

    def _start(self, number: int) -> None:
        share = self._shares[number - 1]
        self._processes[number] = self._crew.process(number, share)
        with share.confined():
            self._processes[number].__enter__()

    def send(self, number: int, unit: Unit | None) -> None:
        self._processes[number].post(unit)

    def receive(self) -> tuple[int, str, Any]:
        numbers = {process.fileno(): number for number, process in self._processes.items()}
        ready, _, _ = select.select(list(numbers), [], [])
        number = numbers[ready[0]]
        try:
            kind, content = self._processes[number].receive(0)
        except EngineLost as error:
            return number, LOST, str(error)
        return number, kind, content

    def restart(self, number: int) -> None:
        self._processes[number].stop()
        self._start(number)


def work(pipe: ParentPipe, target: str, number: int, arguments: tuple[Any, ...]) -> None:
    """What runs in a worker's process: the crew's target; a lost engine of its own makes it a lost worker."""
    try:
        resolve(target)(pipe, number, *arguments)
    except EngineLost as error:
        pipe.send((LOST, str(error)))


def require_executor(executor: str, setting: str) -> None:
    """Raise ValueError, naming `setting`, where an executor needs what is not installed."""
    if executor == "ray" and importlib.util.find_spec("ray") is None:
        raise ValueError(f"{setting}: ray needs the package ray: pip install -e '.[ray]', or set it to local")


def own_cluster_environment() -> dict[str, str]:
    """Variables that keep a Ray of ours to itself: loopback only, a token of its own, nothing told to anybody."""
    return {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # despite its name: the node's address is 127.0.0.1, on any system
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray 2.60 writes one into the user's home
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # else 15, for the engines too: anything else on the machine would come first
    }


def run(units: Sequence[Unit], crew: Crew, executor: str, ray_address: str | None) -> Generator[Event, None, None]:
    """Have the crew do all units. executor: local | ray. Closing the iterator ends the workers.

    ray_address: a cluster to join; None = RAY_ADDRESS, or else one of our own on this machine's loopback.
    """
    if executor == "local":
        with LocalWorkers(crew) as workers:
            yield from hand_out(units, workers, crew.name)
        return
    address = ray_address or os.environ.get("RAY_ADDRESS")
    with tempfile.TemporaryDirectory(prefix="eagle3-ray-", ignore_cleanup_errors=True) as scratch:
        arguments = (list(units), crew, address, scratch)
        environment = {} if address else own_cluster_environment()
        log = crew.logs / f"{crew.name}-ray.log"
        with EngineProcess(RAY, arguments, environment, log, f"{crew.name} on Ray") as process:
            while (event := process.receive(None)) is not None:
                yield event
