"""Many independent requests to OpenAI-compatible vLLM endpoints: one per prompt, bounded, retried, watched.

Every question ends in exactly one outcome, an answer or a refusal. Endpoints share the work by load; one that is dead
is left out until it answers again (endpoints.py). Nothing is sent twice at once, and a request that is given up is
cancelled at the server too (its connection closes). Memory: the requests in flight, however many questions there are.
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
from typing import Any, NamedTuple, TypeVar

import aiohttp

from eagle3.console import Interrupted, say, visible
from eagle3.params import GenerateParams
from eagle3.reasoning import Markers
from eagle3.serving.answers import Answer, BadAnswerError, Limits, Question, Refusal, read_answer
from eagle3.serving.endpoints import API_KEY_VARIABLE, Endpoint, Pool, endpoint_url, is_loopback, retry_after_s

KEEP_ALIVE_S = 4  # below the 5 s after which vLLM's server closes an idle connection
CONNECT_S = 60
SUSPENDED_S = 10  # a tick of the watchdog that takes longer means a suspended process, not a stalled server
SLOWEST_TOKENS_PER_S = 20  # of one endpoint, all requests together; what timeouts allow for
BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 30.0
PROBE_TICK_S = 0.1
BODY_BYTES, BODY_BYTES_PER_TOKEN = 1 << 20, 256  # what a reply may weigh, more is not read
TOO_MANY = 429
TRANSIENT = {408, 409, 425, TOO_MANY, 500, 502, 503, 504, 507, 529}
FATAL = {401, 403, 404, 405}
NO_SUCH_PAGE = (404, 405, 501)
BUDGET_ERROR = re.compile(r"thinking_token_budget.*reasoning|reasoning.*thinking_token_budget", re.I | re.S)
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
    budget_hint: str  # what to do when the server cannot bound the thinking

    @property
    def wants_thinking(self) -> bool:
        return any(self.params.chat_template_kwargs.get(switch) is True for switch in THINKING_SWITCHES)


class UnreachableError(ValueError):
    """An endpoint that does not answer now; it may later."""


class Reply(NamedTuple):
    """What came back over HTTP."""

    status: int
    body: Any  # JSON where the status is 200, else text
    pause_s: float  # as asked for by Retry-After


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
    pool: Pool = field(default_factory=Pool)
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
            await self._stack.enter_async_context(session)
            self.pool.endpoints.append(Endpoint(url, session, self.service.params.concurrency))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    # -- before the first question

    async def preflight(self) -> str:
        """Check every endpoint; returns the engine's name and version. Raises ValueError that names the endpoint.

        One that does not answer is left out for now when another one does.
        """
        endpoints = self.pool.endpoints
        results = await asyncio.gather(*map(self._check, endpoints), return_exceptions=True)
        dead = [result for result in results if isinstance(result, UnreachableError)]
        for endpoint, result in zip(endpoints, results, strict=True):
            if isinstance(result, BaseException):
                if not isinstance(result, UnreachableError) or len(dead) == len(results):
                    raise result
                endpoint.trouble = str(result)
                endpoint.take_out()
            else:
                endpoint.engine = result
        return self._one_engine()

    def _one_engine(self) -> str:
        engines = {endpoint.url: endpoint.engine for endpoint in self.pool if endpoint.engine}
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
        try:
            version = await self._call(endpoint, "GET", f"{endpoint.root}/version")
        except BROKEN:
            version = Reply(0, None, 0.0)
        if version.status != HTTPStatus.OK or not isinstance(version.body, dict):
            say(f"{endpoint.url} does not tell its version; an upgrade there will not be noticed")
            return "vllm (version unknown)"
        return f"vllm {visible(str(version.body.get('version')))}"

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
        for attempt in range(1 if endpoint.out else self.service.params.retries + 1):
            if attempt:
                await asyncio.sleep(self._delay(attempt))
            try:
                reply = await self._call(endpoint, method, url, payload)
            except BROKEN as error:
                told = visible(str(error) or type(error).__name__)
                continue
            if reply.status == HTTPStatus.OK and isinstance(reply.body, dict):
                return reply.body
            told = f"HTTP {reply.status}: {self._message(reply.body)}"
            if reply.status not in TRANSIENT:
                raise ValueError(f"{url} does not answer as expected: {told}; {self.service.log_hint}")
        raise UnreachableError(f"{url} does not answer: {told}; {self.service.log_hint}")

    # -- the questions

    async def answer_all(
        self,
        questions: Iterator[Question],
        keep: Callable[[Outcome], None],
        alive: Callable[[], ValueError | None],
        total: int,
    ) -> None:
        """Ask every question, at most `generate.concurrency` at a time at each endpoint.

        keep: receives each outcome as it comes. alive: the error to end with when a local server has died, else None.
        Raises ValueError when the server dies, when nothing comes back for `generate.stall_timeout_s`, when a long row
        of requests failed, and when thinking was asked for and never came. What was kept before stays kept.
        """

        async def work() -> None:
            for question in questions:
                outcome = await self._outcome(question)
                self._count(outcome)
                keep(outcome)

        workers = [asyncio.create_task(work()) for _ in range(min(self._workers, total))]
        guards = [asyncio.create_task(self._watch(alive, total)), asyncio.create_task(self._probe())]
        try:
            pending: set[asyncio.Task[None]] = {*workers}
            while pending:
                done, _ = await asyncio.wait({*pending, *guards}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                pending -= done
        finally:
            for task in (*workers, *guards):
                task.cancel()
            await asyncio.gather(*workers, *guards, return_exceptions=True)

    @property
    def _workers(self) -> int:
        return self.service.params.concurrency * len(self.pool.endpoints)

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
        if tally.refused_in_a_row > max(2 * self._workers, 20):
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
        failed_at: Endpoint | None = None
        if len(self.hello_ids) + question.most_tokens + wanted > limits.max_tokens:
            exact = await self._count_tokens(question)
        while True:
            if exact is not None:
                most = min(wanted, limits.max_tokens - exact)
                if most < floor:
                    return Outcome(question, _too_long(exact, limits), {}, 0.0, tries)
            tries, began = tries + 1, time.monotonic()
            result, endpoint = await self._ask(question, most, failed_at)
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
                spare, failed_at = spare - 1, endpoint
                pause_s = result.pause_s * random.uniform(1.0, 1.1)
                await asyncio.sleep(max(pause_s, self._delay(self.service.params.retries - spare)))

    async def _ask(self, question: Question, most: int, avoid: Endpoint | None) -> tuple[Answer | Refusal, Endpoint]:
        """One try at the least loaded endpoint, and which one that was."""
        endpoint = await self.pool.take(avoid)
        try:
            return await self._try(endpoint, question, most), endpoint
        finally:
            self.pool.give(endpoint)

    async def _try(self, endpoint: Endpoint, question: Question, most: int) -> Answer | Refusal:
        timeout_s = request_timeout_s(most, self.service.params.concurrency)
        payload = self._payload(endpoint, question, most)
        self.tally.requests_sent += 1
        try:
            reply = await self._call(endpoint, "POST", f"{endpoint.url}/chat/completions", payload, timeout_s)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return self._broken(endpoint, error, timeout_s)
        if reply.status != HTTPStatus.OK:
            return self._refusal(endpoint, reply)
        endpoint.answered()
        try:
            return read_answer(reply.body, self.service.limits)
        except BadAnswerError as bad:
            return Refusal(bad.reason, visible(bad.detail), lasting=not bad.again)

    def _broken(self, endpoint: Endpoint, error: Exception, timeout_s: float) -> Refusal:
        """What a try without a whole reply counts as, and what it says of the endpoint."""
        told = visible(str(error) or type(error).__name__)
        if isinstance(error, ValueError) and not isinstance(error, aiohttp.ClientError):
            return Refusal("malformed response", told)
        if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
            refusal = Refusal("request timed out", f"after {timeout_s:.0f} s")
        else:
            refusal = Refusal("connection failed", told)
        endpoint.failed(f"{refusal.reason}: {refusal.detail}", self._delay(endpoint.failures + 1))
        return refusal

    def _refusal(self, endpoint: Endpoint, reply: Reply) -> Refusal:
        status, message = reply.status, self._message(reply.body)
        if status in FATAL:
            hint = f"set {API_KEY_VARIABLE}" if status in (401, 403) else "see generate.endpoints"
            raise ValueError(f"{endpoint.url}: HTTP {status}: {message}; {hint}")
        if status in TRANSIENT:
            pause_s = max(reply.pause_s, self._delay(endpoint.failures + 1))
            if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                endpoint.failed(f"HTTP {status}: {message}", pause_s)
            elif status == TOO_MANY:
                endpoint.busy(pause_s)
            return Refusal(f"HTTP {status}", message, pause_s=reply.pause_s)
        if status == HTTPStatus.BAD_REQUEST and BUDGET_ERROR.search(message):
            raise ValueError(f"{endpoint.url}: HTTP {status}: {message}; {self.service.budget_hint}")
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
            endpoint = self.pool.best()
            payload = {
                "model": endpoint.model,
                "messages": question.messages,
                "add_generation_prompt": True,
                "chat_template_kwargs": self.service.params.chat_template_kwargs,
            }
            try:
                reply = await self._call(endpoint, "POST", f"{endpoint.root}/tokenize", payload)
            except BROKEN:
                continue
            if reply.status == HTTPStatus.OK and isinstance(reply.body, dict) and type(reply.body.get("count")) is int:
                return int(reply.body["count"])
            if reply.status not in TRANSIENT:
                self.counts_tokens = reply.status not in NO_SUCH_PAGE
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
    ) -> Reply:
        """One HTTP exchange, with the body as JSON (or text). Raises one of BROKEN."""
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        async with endpoint.session.request(
            method, url, json=payload, timeout=timeout, allow_redirects=False
        ) as response:
            body = bytearray()
            async for piece in response.content.iter_any():
                body += piece
                if len(body) > BODY_BYTES + BODY_BYTES_PER_TOKEN * self.service.limits.max_tokens:
                    raise ValueError(f"the reply is longer than {len(body):,} bytes")
            pause_s = retry_after_s(response.headers.get("Retry-After"))
            if response.status != HTTPStatus.OK or as_text:
                return Reply(response.status, body.decode(errors="replace"), pause_s)
            try:
                return Reply(response.status, json.loads(body), pause_s)
            except RecursionError:
                raise ValueError("the JSON is nested too deeply") from None

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
                raise self._stalled(f"generate.stall_timeout_s = {patience:g} s", total)

    def _stalled(self, patience: str, total: int) -> ValueError:
        done = f"{self.tally.finished} of {total} are done and kept"
        if self.pool.all_out:
            listed = "; ".join(f"{endpoint.url}: {endpoint.trouble}" for endpoint in self.pool)
            return ValueError(f"no endpoint answered for {patience} ({listed}); {done}; start them and run again")
        return ValueError(
            f"no answer for {patience} with {self.pool.in_flight} requests in flight; {done}. Check that the server's "
            "KV cache holds verifier.max_model_len tokens (engine.cpu_kv_cache_gib, engine.gpu_memory_utilization), "
            f"lower generate.concurrency, or raise the timeout, then run again; {self.service.log_hint}"
        )

    async def _probe(self) -> None:
        """Asks endpoints that are out again and again, ever more rarely, and puts back those that answer.

        Raises ValueError when something else answers there now: another model, another version, no ids.
        """
        while True:
            await asyncio.sleep(PROBE_TICK_S)
            due = [endpoint for endpoint in self.pool if endpoint.out and endpoint.probe_at <= time.monotonic()]
            await asyncio.gather(*map(self._put_back, due))

    async def _put_back(self, endpoint: Endpoint) -> None:
        endpoint.probes += 1
        endpoint.probe_at = time.monotonic() + self._delay(endpoint.probes)
        try:
            health = await self._call(endpoint, "GET", f"{endpoint.root}/health", timeout_s=5, as_text=True)
            if health.status not in (HTTPStatus.OK, *NO_SUCH_PAGE):
                raise UnreachableError(f"HTTP {health.status} from /health")
            endpoint.engine = await self._check(endpoint)
        except (aiohttp.ClientError, OSError, UnreachableError):
            return
        self._one_engine()
        endpoint.put_back()
        self.pool.serve()

    async def tokens_so_far(self) -> float:
        """Tokens that the servers have read and written, as their metrics say; 0 where they do not say."""
        texts = await asyncio.gather(*map(self._metrics, self.pool))
        return sum(float(count) for text in texts for count in TOKEN_COUNTER.findall(text))

    async def _metrics(self, endpoint: Endpoint) -> str:
        """The server's metrics, empty where it has none."""
        try:
            reply = await self._call(endpoint, "GET", f"{endpoint.root}/metrics", timeout_s=5, as_text=True)
        except BROKEN:
            return ""
        return str(reply.body) if reply.status == HTTPStatus.OK else ""


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
