"""The servers of a client: which one is asked next, and what a reply says about its health.

The least loaded one is next, and
    3 failures in a row           take it out: it gets no questions, only probes, ever more rarely
    a probe that it answers       puts it back on trial: the next failure takes it out again
    an answer                     ends the trial
    HTTP 429                      gives it fewer at a time, and again more as answers come
    a question that failed there  is asked elsewhere if there is another
"""

import re
import time
from asyncio import Future, get_running_loop
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from urllib.parse import urlsplit

import aiohttp

from eagle3.console import say, visible

API_KEY_VARIABLE = "EAGLE3_API_KEY"
OUT_AFTER = 3  # failures in a row
LONGEST_PAUSE_S = 120.0  # however long a server asks to be left alone
ANSWERS_PER_STEP = 16  # so many answers let a server that was too busy have one request more at a time


@dataclass
class Endpoint:
    """One server. `most` requests at a time, fewer after it said that it has too many."""

    url: str  # ends in /v1
    session: aiohttp.ClientSession
    most: int
    model: str = ""  # as the server names it
    engine: str = ""  # name and version; empty until it was checked
    in_flight: int = 0
    room: int = 0  # in flight at once for now
    failures: int = 0  # in a row
    spared_until: float = 0.0  # time.monotonic() before which others are preferred
    out: bool = False  # gets no questions
    probes: int = 0  # since it answered a question
    probe_at: float = 0.0  # time.monotonic() of the next one
    trouble: str = ""  # what went wrong last
    _step: int = 0

    def __post_init__(self) -> None:
        self.room = self.most

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    def failed(self, trouble: str, pause_s: float) -> None:
        """It broke, or says that it is broken: others are preferred for a while, and after several times it is out."""
        self.failures += 1
        self.trouble = trouble
        self.spared_until = time.monotonic() + pause_s
        if self.failures >= OUT_AFTER and not self.out:
            self.take_out()

    def take_out(self) -> None:
        """No more questions until it answers a probe."""
        self.out = True
        say(f"{self.url} is left out until it answers again: {self.trouble}")

    def busy(self, pause_s: float) -> None:
        """It has more than it wants: what is in flight beside this request is what it can do."""
        self.room, self._step = max(1, min(self.room, self.in_flight) - 1), 0
        self.spared_until = time.monotonic() + pause_s

    def answered(self) -> None:
        """It works."""
        self.failures = self.probes = 0
        self.out = False
        self._step += 1
        if self.room < self.most and self._step >= ANSWERS_PER_STEP:
            self.room, self._step = self.room + 1, 0

    def put_back(self) -> None:
        """It answered a probe, which is not yet an answer to a question."""
        self.out, self.failures = False, OUT_AFTER - 1
        say(f"{self.url} answers again")


@dataclass
class Pool:
    """The endpoints of a run. `take` gives the least loaded one that has room; each must come back by `give`."""

    endpoints: list[Endpoint] = field(default_factory=list)
    _waiting: list[tuple[Future[Endpoint], Endpoint | None]] = field(default_factory=list)  # and whom they avoid

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self.endpoints)

    @property
    def in_flight(self) -> int:
        return sum(endpoint.in_flight for endpoint in self.endpoints)

    @property
    def all_out(self) -> bool:
        return all(endpoint.out for endpoint in self.endpoints)

    def best(self) -> Endpoint:
        """The one to ask something small, whether it has room or not."""
        now = time.monotonic()
        return min(self.endpoints, key=lambda e: (e.out, e.spared_until > now, e.in_flight, e.failures))

    async def take(self, avoid: Endpoint | None) -> Endpoint:
        """Waits while every endpoint is out or full. avoid: taken only while all others are out."""
        endpoint = self._free(avoid)
        if endpoint is not None:
            endpoint.in_flight += 1
            return endpoint
        turn: Future[Endpoint] = get_running_loop().create_future()
        self._waiting.append((turn, avoid))
        return await turn

    def give(self, endpoint: Endpoint) -> None:
        """A request has ended."""
        endpoint.in_flight -= 1
        self.serve()

    def serve(self) -> None:
        """Hand what is free to those that wait, the first one first."""
        left: list[tuple[Future[Endpoint], Endpoint | None]] = []
        for place, (turn, avoid) in enumerate(self._waiting):
            if self._free(None) is None:
                left += self._waiting[place:]
                break
            endpoint = None if turn.done() else self._free(avoid)
            if endpoint is not None:
                endpoint.in_flight += 1
                turn.set_result(endpoint)
            elif not turn.done():  # else its task was cancelled
                left.append((turn, avoid))
        self._waiting = left

    def _free(self, avoid: Endpoint | None) -> Endpoint | None:
        now = time.monotonic()
        up = [endpoint for endpoint in self.endpoints if not endpoint.out]
        usable = [endpoint for endpoint in up if endpoint is not avoid] or up
        free = [endpoint for endpoint in usable if endpoint.in_flight < endpoint.room]
        return min(free, key=lambda e: (e.spared_until > now, e.in_flight, e.failures), default=None)


def retry_after_s(header: str | None) -> float:
    """Seconds that a Retry-After header (seconds, or a date) asks to wait, at most LONGEST_PAUSE_S; 0 without one."""
    text = (header or "").strip()
    try:
        if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
            left = float(text)
        else:
            date = parsedate_to_datetime(text)
            left = (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    except ValueError:
        return 0.0
    return min(max(left, 0.0), LONGEST_PAUSE_S)


def endpoint_url(text: str) -> str:
    """An endpoint as written -> its base ending in /v1. Raises ValueError for anything but a plain http(s) address."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"generate.endpoints: {visible(text)} is not an address such as http://10.0.0.1:8000/v1")
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"generate.endpoints: no keys in addresses; set the variable {API_KEY_VARIABLE} instead")
    return text.rstrip("/").removesuffix("/v1").rstrip("/") + "/v1"


def is_loopback(url: str) -> bool:
    """Whether a URL points at this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
