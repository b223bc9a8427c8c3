"""Many independent requests to OpenAI-compatible vLLM endpoints: one per prompt, bounded, retried, watched.

Every question ends in exactly one outcome, an answer or a refusal. Endpoints share the work by load; one that fails is
spared for a while. Nothing is sent twice at once, and a request that is given up is cancelled at the server too
(its connection closes).
"""

import asyncio
import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp

from eagle3.console import Interrupted, say, visible
from eagle3.params import GenerateParams
from eagle3.reasoning import Markers
from eagle3.serving.answers import Answer, BadAnswerError, Limits, Question, Refusal, read_answer

API_KEY_VARIABLE = "EAGLE3_API_KEY"
KEEP_ALIVE_S = 4  # below the 5 s after which vLLM's server closes an idle connection
CONNECT_S = 60
SUSPENDED_S = 10  # a tick of the watchdog that takes longer means a suspended process, not a stalled server
SLOWEST_TOKENS_PER_S = 20  # of one endpoint, all requests together; what timeouts allow for
BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 30.0
TRANSIENT = {408, 409, 425, 429, 500, 502, 503, 504, 507, 529}
FATAL = {401, 403, 404, 405}
CONTEXT_ERROR = re.compile(r"context length|model length|max_tokens|max_completion_tokens|too long|input tokens", re.I)
TOKEN_COUNTER = re.compile(r"^vllm:(?:generation|prompt)_tokens_total(?:\{[^}]*\})? (\S+)$", re.M)
CACHE_SIZE = re.compile(r'^vllm:cache_config_info\{.*\bkv_cache_size_tokens="(\d+)"', re.M)
BROKEN = (aiohttp.ClientError, TimeoutError, OSError, ValueError)

HELLO = [{"role": "user", "content": "Hi"}]
NO_ROOM = "no room"
TOO_LONG = "prompt too long"
THINKING_SWITCHES = ("enable_thinking", "thinking")
THINKING_PROOF = 20  # answers without any thinking, although it was asked for, end the run

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """How one question ended."""

    question: Question
    result: Answer | Refusal
    sampling: dict[str, Any]  # as sent, with the max_tokens that fitted
    latency_s: float  # of the last try
    attempts: int


@dataclass(frozen=True)
class Service:
    """What every endpoint must be, and how it is asked."""

    model_names: tuple[str, ...]  # one of them must be served
    params: GenerateParams
    limits: Limits
    markers: Markers
    log_hint: str  # where to look when something is wrong

    @property
    def wants_thinking(self) -> bool:
        return any(self.params.chat_template_kwargs.get(switch) is True for switch in THINKING_SWITCHES)


@dataclass
class Endpoint:
    """One server."""

    url: str  # ends in /v1
    session: aiohttp.ClientSession
    model: str = ""  # as the server names it
    in_flight: int = 0
    failures: int = 0  # in a row
    spared_until: float = 0.0  # time.monotonic() before which others are preferred

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    def failed(self) -> None:
        self.failures += 1
        self.spared_until = time.monotonic() + min(LONGEST_BACKOFF_S, BACKOFF_S * 2**self.failures)

    def answered(self) -> None:
        self.failures, self.spared_until = 0, 0.0


@dataclass
class Tally:
    """Running counts of a client."""

    requests_sent: int = 0
    finished: int = 0
    answers: int = 0
    output_tokens: int = 0
    thinking: int = 0  # answers with thinking
    refused_in_a_row: int = 0


@dataclass
class Client:
    """`async with Client(urls, service) as client: await client.preflight(); await client.answer_all(...)`."""

    urls: list[str]
    service: Service
    backoff_s: float = BACKOFF_S
    tally: Tally = field(default_factory=Tally)
    endpoints: list[Endpoint] = field(default_factory=list)
    hello_ids: list[int] = field(default_factory=list)  # the prompt ids of HELLO, from the server asked last, if told
    counts_tokens: bool = True  # the servers have /tokenize
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def __aenter__(self) -> "Client":
        key = os.environ.get(API_KEY_VARIABLE)
        for url in map(endpoint_url, self.urls):
            local = is_loopback(url)
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
                trust_env=not local,  # a proxy of the environment is for the world outside
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=aiohttp.ClientTimeout(total=CONNECT_S, sock_connect=CONNECT_S),
            )
            self.endpoints.append(Endpoint(url, await self._stack.enter_async_context(session)))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    # -- before the first question

    async def preflight(self) -> str:
        """Check every endpoint; returns the engine's name and version. Raises ValueError that names the endpoint."""
        engines = {endpoint.url: await self._check(endpoint) for endpoint in self.endpoints}
        if len(set(engines.values())) > 1:
            listed = ", ".join(f"{url}: {engine}" for url, engine in engines.items())
            raise ValueError(f"generate.endpoints run different engine versions ({listed}); make them the same")
        return next(iter(engines.values()))

    async def _check(self, endpoint: Endpoint) -> str:
        models = await self._must(endpoint, "GET", f"{endpoint.url}/models")
        served = [model for model in models.get("data", []) if isinstance(model, dict)]
        known = self.service.model_names
        mine = [m for m in served if m.get("id") in known or m.get("root") in known]
        if not mine:
            names = ", ".join(visible(str(model.get("id"))) for model in served) or "nothing"
            raise ValueError(
                f"{endpoint.url} serves {names}, not verifier.model = {known[0]}; "
                f"start it with --served-model-name {known[0]} if it is the same model"
            )
        endpoint.model = str(mine[0]["id"])
        longest, needed = mine[0].get("max_model_len"), self.service.limits.max_tokens + 1
        if not isinstance(longest, int) or longest < needed:
            raise ValueError(
                f"{endpoint.url}: max_model_len is {longest}, verifier.max_model_len is {needed}; make them agree"
            )
        held = CACHE_SIZE.search(await self._metrics(endpoint))
        if held and int(held[1]) < needed:
            raise ValueError(
                f"{endpoint.url}: its KV cache holds {held[1]} tokens, verifier.max_model_len is {needed}: a long "
                "request would wait for ever; give the server more memory or lower verifier.max_model_len"
            )
        await self._try_ids(endpoint)
        version = await self._call(endpoint, "GET", f"{endpoint.root}/version")
        if version[0] != HTTPStatus.OK or not isinstance(version[1], dict):
            say(f"{endpoint.url} does not tell its version; an upgrade there will not be noticed")
            return "vllm (version unknown)"
        return f"vllm {visible(str(version[1].get('version')))}"

    async def _try_ids(self, endpoint: Endpoint) -> None:
        """One tiny request: ids must come back, and no sign of a server that extracts hidden states."""
        question = Question("preflight", HELLO, {"max_tokens": 1, "temperature": 0.0})
        body = await self._must(
            endpoint, "POST", f"{endpoint.url}/chat/completions", self._payload(endpoint, question, 1)
        )
        if body.get("kv_transfer_params") is not None:
            raise ValueError(
                f"{endpoint.url} returns kv_transfer_params: it runs in extraction mode and its answers are not "
                "those of a plain server; generate needs a vLLM server without a KV connector"
            )
        choice = (body.get("choices") or [{}])[0]
        if not isinstance(body.get("prompt_token_ids"), list) or not isinstance(choice.get("token_ids"), list):
            if self.service.limits.require_ids:
                raise ValueError(
                    f"{endpoint.url} returns no token ids for return_token_ids: true; it must be vLLM 0.11 or newer, "
                    "reached without a gateway that removes fields. generate.require_ids: false accepts it: ids are "
                    "then rebuilt from text, which is less exact"
                )
            say(f"warning: {endpoint.url} returns no token ids; they will be rebuilt from text, which is less exact")
            return
        self.hello_ids = body["prompt_token_ids"]

    async def _must(self, endpoint: Endpoint, method: str, url: str, payload: Any = None) -> dict[str, Any]:
        """A reply that has to be there; transient trouble is retried."""
        told = ""
        for attempt in range(self.service.params.retries + 1):
            if attempt:
                await asyncio.sleep(self._delay(attempt))
            try:
                status, body = await self._call(endpoint, method, url, payload)
            except BROKEN as error:
                told = visible(str(error) or type(error).__name__)
                continue
            if status == HTTPStatus.OK and isinstance(body, dict):
                return body
            told = f"HTTP {status}: {self._message(body)}"
            if status not in TRANSIENT:
                break
        raise ValueError(f"{url} does not answer as expected: {told}; {self.service.log_hint}")

    # -- the questions

    async def answer_all(
        self,
        questions: Iterator[Question],
        keep: Callable[[Outcome], None],
        alive: Callable[[], ValueError | None],
        total: int,
    ) -> None:
        """Ask every question, at most `generate.concurrency` at a time; `keep` receives each outcome as it comes.

        alive: the error to end with when a local server has died, else None.
        Raises ValueError when the server dies, when nothing comes back for `generate.stall_timeout_s`, when a long row
        of requests failed, and when thinking was asked for and never came. What was kept before stays kept.
        """

        async def work() -> None:
            for question in questions:
                outcome = await self._outcome(question)
                self._count(outcome)
                keep(outcome)

        workers = [asyncio.create_task(work()) for _ in range(min(self.service.params.concurrency, total))]
        watchdog = asyncio.create_task(self._watch(alive, total))
        try:
            pending: set[asyncio.Task[None]] = {*workers}
            while pending:
                done, _ = await asyncio.wait({*pending, watchdog}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                pending -= done
        finally:
            for task in (*workers, watchdog):
                task.cancel()
            await asyncio.gather(*workers, watchdog, return_exceptions=True)

    def _count(self, outcome: Outcome) -> None:
        tally = self.tally
        tally.finished += 1
        if isinstance(outcome.result, Answer):
            tally.answers += 1
            tally.output_tokens += outcome.result.completion_tokens
            tally.refused_in_a_row = 0
            tally.thinking += outcome.result.thinks(self.service.markers)
            if self.service.wants_thinking and not tally.thinking and tally.answers == THINKING_PROOF:
                raise ValueError(
                    f"generate.chat_template_kwargs asks for thinking, but none of the first {THINKING_PROOF} answers "
                    "has any: no reasoning field and no closing think marker. The verifier's chat template has no such "
                    f"switch; remove it or change verifier.chat_template; {self.service.log_hint}"
                )
            return
        tally.refused_in_a_row += outcome.result.reason != TOO_LONG
        if tally.refused_in_a_row > max(2 * self.service.params.concurrency, 20):
            raise ValueError(
                f"the last {tally.refused_in_a_row} requests all failed, the last one with {outcome.result.reason}: "
                f"{outcome.result.detail}; answers so far are kept; {self.service.log_hint}"
            )

    async def _outcome(self, question: Question) -> Outcome:
        """Ask until there is an answer, a lasting refusal, or no try left."""
        limits, wanted = self.service.limits, question.sampling["max_tokens"]
        floor = min(wanted, limits.min_room_tokens)
        most, spare, tries, measured = wanted, self.service.params.retries, 0, False
        exact: int | None = None  # tokens of the prompt, where they matter
        if len(self.hello_ids) + question.most_tokens + wanted > limits.max_tokens:
            exact = await self._count_tokens(question)
        while True:
            if exact is not None:
                most = min(wanted, limits.max_tokens - exact)
                if most < floor:
                    return Outcome(question, _too_long(exact, limits), {}, 0.0, tries)
            tries, began = tries + 1, time.monotonic()
            result = await self._ask(question, most)
            if isinstance(result, Answer):
                if measured or fits(result, most, wanted, limits):
                    if result.length > limits.max_tokens:
                        result = Refusal("over the length limit", f"{result.length} tokens", lasting=True)
                    sent = question.sampling | {"max_tokens": most}
                    return Outcome(question, result, sent, time.monotonic() - began, tries)
                exact, measured = result.prompt_tokens, True
            elif result.reason == NO_ROOM:
                if exact is not None or most <= floor:
                    return Outcome(question, Refusal(TOO_LONG, result.detail, lasting=True), {}, 0.0, tries)
                exact = await self._count_tokens(question)
                most = floor  # where no server counts: the answer will tell the length of the prompt
            elif result.lasting or not spare:
                return Outcome(question, result, {}, time.monotonic() - began, tries)
            else:
                spare -= 1
                await asyncio.sleep(self._delay(self.service.params.retries - spare))

    async def _ask(self, question: Question, most: int) -> Answer | Refusal:
        """One try at the least loaded endpoint."""
        now = time.monotonic()
        endpoint = min(self.endpoints, key=lambda e: (e.spared_until > now, e.in_flight, e.failures))
        timeout_s = request_timeout_s(most, self.service.params.concurrency)
        endpoint.in_flight += 1
        self.tally.requests_sent += 1
        try:
            payload = self._payload(endpoint, question, most)
            status, body = await self._call(endpoint, "POST", f"{endpoint.url}/chat/completions", payload, timeout_s)
        except TimeoutError:
            endpoint.failed()
            return Refusal("request timed out", f"after {timeout_s:.0f} s")
        except BROKEN as error:
            endpoint.failed()
            return Refusal("connection failed", visible(str(error) or type(error).__name__))
        finally:
            endpoint.in_flight -= 1
        if status == HTTPStatus.OK:
            endpoint.answered()
            try:
                return read_answer(body, self.service.limits)
            except BadAnswerError as bad:
                return Refusal(bad.reason, visible(bad.detail), lasting=not bad.again)
        return self._refusal(endpoint, status, self._message(body))

    def _refusal(self, endpoint: Endpoint, status: int, message: str) -> Refusal:
        if status in FATAL:
            hint = f"set {API_KEY_VARIABLE}" if status in (401, 403) else "see generate.endpoints"
            raise ValueError(f"{endpoint.url}: HTTP {status}: {message}; {hint}")
        if status in TRANSIENT:
            endpoint.failed()
            return Refusal(f"HTTP {status}", message)
        if status == HTTPStatus.BAD_REQUEST and CONTEXT_ERROR.search(message):
            return Refusal(NO_ROOM, message)
        return Refusal(f"HTTP {status}", message, lasting=True)

    async def _count_tokens(self, question: Question) -> int | None:
        """Length of the prompt as the server templates it; None where no server tells."""
        if not self.counts_tokens:
            return None
        for attempt in range(self.service.params.retries + 1):
            if attempt:
                await asyncio.sleep(self._delay(attempt))
            endpoint = self.endpoints[(attempt + self.tally.requests_sent) % len(self.endpoints)]
            payload = {
                "model": endpoint.model,
                "messages": question.messages,
                "add_generation_prompt": True,
                "chat_template_kwargs": self.service.params.chat_template_kwargs,
            }
            try:
                status, body = await self._call(endpoint, "POST", f"{endpoint.root}/tokenize", payload)
            except BROKEN:
                continue
            if status == HTTPStatus.OK and isinstance(body, dict) and isinstance(body.get("count"), int):
                return int(body["count"])
            if status not in TRANSIENT:
                self.counts_tokens = status not in (404, 405, 501)
                return None
        return None

    def _payload(self, endpoint: Endpoint, question: Question, most: int) -> dict[str, Any]:
        return {
            **question.sampling,
            "max_tokens": most,
            "model": endpoint.model,
            "messages": question.messages,
            "stream": False,
            "return_token_ids": True,
            "add_generation_prompt": True,
            "chat_template_kwargs": self.service.params.chat_template_kwargs,
        }

    async def _call(
        self,
        endpoint: Endpoint,
        method: str,
        url: str,
        payload: Any = None,
        timeout_s: float = CONNECT_S,
        as_text: bool = False,
    ) -> tuple[int, Any]:
        """Status and JSON (or text) of one HTTP exchange. Raises one of BROKEN."""
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        async with endpoint.session.request(
            method, url, json=payload, timeout=timeout, allow_redirects=False
        ) as response:
            if response.status == HTTPStatus.OK and not as_text:
                return response.status, await response.json(content_type=None)
            return response.status, await response.text(errors="replace")

    def _message(self, body: Any) -> str:
        """What a server said, fit for a terminal, without our key should the server repeat it."""
        text = str(body)
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            text = str(json.loads(text)["error"]["message"])
        key = os.environ.get(API_KEY_VARIABLE)
        return visible(text.replace(key, "***") if key else text, 400)

    def _delay(self, attempt: int) -> float:
        longest = min(LONGEST_BACKOFF_S, self.backoff_s * 2.0 ** (attempt - 1))
        return longest * random.uniform(0.5, 1.5)

    # -- the watchdog

    async def _watch(self, alive: Callable[[], ValueError | None], total: int) -> None:
        """Ends the run when the local server is gone, or when neither an answer nor a token came for too long."""
        patience = self.service.params.stall_timeout_s
        seen, since, probed = (self.tally.finished, 0.0), time.monotonic(), time.monotonic()
        last = since
        while True:
            await asyncio.sleep(min(0.5, patience / 4))
            error = alive()
            if error is not None:
                raise error
            now = time.monotonic()
            if now - last > SUSPENDED_S:  # this process, and most likely the server too, was asleep
                since += now - last
            last = now
            tokens = seen[1]
            if now - probed > patience / 4 and self.tally.finished == seen[0]:
                probed, tokens = now, await self.tokens_so_far()
            if (self.tally.finished, tokens) != seen:
                seen, since = (self.tally.finished, tokens), now
            if now - since > patience:
                in_flight = sum(endpoint.in_flight for endpoint in self.endpoints)
                raise ValueError(
                    f"no answer for generate.stall_timeout_s = {patience:g} s with {in_flight} requests in flight; "
                    f"{self.tally.finished} of {total} are done and kept. Check that the server's KV cache holds "
                    "verifier.max_model_len tokens (engine.cpu_kv_cache_gib, engine.gpu_memory_utilization), lower "
                    f"generate.concurrency, or raise the timeout, then run again; {self.service.log_hint}"
                )

    async def tokens_so_far(self) -> float:
        """Tokens that the servers have read and written, as their metrics say; 0 where they do not say."""
        texts = [await self._metrics(endpoint) for endpoint in self.endpoints]
        return sum(float(count) for text in texts for count in TOKEN_COUNTER.findall(text))

    async def _metrics(self, endpoint: Endpoint) -> str:
        """The server's metrics, empty where it has none."""
        try:
            status, text = await self._call(endpoint, "GET", f"{endpoint.root}/metrics", timeout_s=5, as_text=True)
        except BROKEN:
            return ""
        return str(text) if status == HTTPStatus.OK else ""


def fits(answer: Answer, asked: int, wanted: int, limits: Limits) -> bool:
    """Whether the answer is what asking for min(wanted, the room that its prompt leaves) tokens would have given."""
    room = min(wanted, limits.max_tokens - answer.prompt_tokens)
    if room < min(wanted, limits.min_room_tokens) or answer.length > limits.max_tokens:
        return False
    return answer.finish_reason == "stop" or asked >= room


def _too_long(prompt_tokens: int, limits: Limits) -> Refusal:
    told = f"{prompt_tokens} tokens, {limits.min_room_tokens} at least for the answer, {limits.max_tokens} in all"
    return Refusal(TOO_LONG, told, lasting=True)


def request_timeout_s(max_tokens: int, concurrency: int) -> float:
    """How long one request may take: everything in flight at the slowest rate that is still sensible."""
    return CONNECT_S + max_tokens * concurrency / SLOWEST_TOKENS_PER_S


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


def run_async(main: Callable[[], Awaitable[T]]) -> T:
    """asyncio.run for a stage: SIGTERM cancels the work and becomes Interrupted, as Ctrl-C becomes an interrupt."""
    interrupted = False

    async def body() -> T:
        task = asyncio.current_task()
        assert task is not None

        def interrupt() -> None:
            nonlocal interrupted
            interrupted = True
            task.cancel()

        if threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, interrupt)
        return await main()

    before = signal.getsignal(signal.SIGTERM)
    try:
        return asyncio.run(body())
    except asyncio.CancelledError:
        if interrupted:
            raise Interrupted from None
        raise
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
