"""A fake OpenAI-compatible vLLM server on loopback that misbehaves on request. No model: ids follow from the text.

As a process of its own: python -m tests.faulty_server PORT LOG DELAY_S MODE. LOG gets a line for each request
(`asked TEXT`) and each answer that went out (`answered TEXT`) at once, so it outlives a kill. In mode `plain` all is
answered well. In mode `told` a text such as `17 reset once` says what happens to it (KINDS), and now and then nothing
happens at all for a while.
"""

import asyncio
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

MODEL = "fake/verifier"
VOCAB = 1000
TEMPLATE_TOKENS = 5


@dataclass
class Fault:
    """What to do with one try; the default is a good answer."""

    status: int = 200
    delay_s: float = 0.0
    reset: bool = False  # close the connection without a word
    hang: bool = False  # never answer
    half: bool = False  # close the connection in the middle of the body
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "as told by the test"
    change: Callable[[dict[str, Any]], Any] | None = None  # edits the good body, or returns another


def _cut(body: dict[str, Any]) -> str:
    text = json.dumps(body)
    return text[: len(text) // 2]


def _missing(body: dict[str, Any]) -> None:
    body["choices"][0]["token_ids"] = None


def _short(body: dict[str, Any]) -> None:
    body["choices"][0]["token_ids"].pop()


def _long(body: dict[str, Any]) -> None:
    body["prompt_token_ids"].append(5)


#: Every kind of trouble, by its word.
KINDS = {
    "slow": Fault(delay_s=1.0),
    "hang": Fault(hang=True),
    "reset": Fault(reset=True),
    "half": Fault(half=True),
    "cut": Fault(change=_cut),
    "missing": Fault(change=_missing),
    "short": Fault(change=_short),
    "long": Fault(change=_long),
    "408": Fault(status=408),
    "409": Fault(status=409),
    "429": Fault(status=429, headers={"Retry-After": "1"}),
    "500": Fault(status=500),
    "503": Fault(status=503),
}
#: What a row is listed with when that trouble does not end.
REASONS = {
    "hang": "request timed out",
    "reset": "connection failed",
    "half": "connection failed",
    "cut": "malformed response",
    "missing": "ids missing",
    "short": "ids disagree with usage",
    "long": "ids disagree with usage",
    **{status: f"HTTP {status}" for status in ("408", "409", "429", "500", "503")},
}
STANDSTILL_EVERY, STANDSTILL_S = 700, 0.3  # requests; nothing is accepted or answered meanwhile


def told(text: str, attempt: int) -> Fault:
    """The fault that a text such as `17 reset once` or `18 reset always` asks for."""
    _, kind, mode = text.split(maxsplit=2)
    return KINDS[kind] if kind in KINDS and (mode == "always" or attempt == 1) else Fault()


def prompt_ids(messages: list[dict[str, str]]) -> list[int]:
    """One id per character of the messages, and some for a template."""
    text = "".join(message["content"] for message in messages)
    return [1] * TEMPLATE_TOKENS + [10 + ord(c) % 900 for c in text]


def output_ids(messages: list[dict[str, str]], most: int) -> tuple[list[int], str]:
    """A deterministic answer of 3 to 12 ids that ends with the stop id 2, unless `most` cuts it."""
    ids = prompt_ids(messages)
    whole = [20 + (sum(ids) + i * 7) % 900 for i in range(3 + sum(ids) % 9)] + [2]
    return (whole, "stop") if len(whole) <= most else (whole[:most], "length")


@dataclass
class FaultyServer:
    """`with FaultyServer(plan) as server:` plan(text of the last message, its try from 1) -> Fault."""

    plan: Callable[[str, int], Fault] = lambda _text, _attempt: Fault()
    max_model_len: int = 512
    has_tokenize: bool = True
    model: str = MODEL
    wanted_port: int = 0
    backlog: int = 512
    delay_s: float = 0.0  # of every answer
    standstills: bool = False
    log: int | None = None  # descriptor of a file
    healthy: bool = True
    version: str = "9.9.9"
    extraction: bool = False
    with_ids: bool = True
    cache_tokens: int | None = None  # as told by /metrics; null = there is no /metrics
    tokens: float = 0.0  # generated so far, as told there
    caps_silently: bool = False  # answers with less than max_tokens where the context ends, instead of HTTP 400
    asked: Counter[str] = field(default_factory=Counter)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    times: list[tuple[str, float]] = field(default_factory=list)
    remembers: bool = True  # bodies, headers, times
    answered: int = 0
    cancelled: int = 0
    in_flight: int = 0
    most_in_flight: int = 0

    def __enter__(self) -> "FaultyServer":
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def _serve(self) -> None:
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_post("/v1/chat/completions", self._chat)
        if self.cache_tokens is not None:
            app.router.add_get("/metrics", self._metrics)
        if self.has_tokenize:
            app.router.add_post("/tokenize", self._tokenize)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.wanted_port, backlog=self.backlog)
        await site.start()
        self.port: int = runner.addresses[0][1]
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model, "max_model_len": self.max_model_len}]})

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def _metrics(self, _: web.Request) -> web.Response:
        cache = f'vllm:cache_config_info{{block_size="16",kv_cache_size_tokens="{self.cache_tokens}"}} 1.0'
        return web.Response(text=f'{cache}\nvllm:generation_tokens_total{{engine="0"}} {self.tokens}\n')

    async def _tokenize(self, request: web.Request) -> web.Response:
        messages = (await request.json())["messages"]
        return web.json_response({"count": len(prompt_ids(messages)), "max_model_len": self.max_model_len})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._answer(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        text = body["messages"][-1]["content"]
        if text == "Hi":
            return web.json_response(self._good(body), status=200 if self.healthy else 503)
        self._note(text, body, request)
        fault = self.plan(text, self.asked[text])
        await asyncio.sleep(3600 if fault.hang else fault.delay_s + self.delay_s)
        if fault.reset:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if fault.status != 200:
            told_error = {"error": {"message": fault.message}}
            return web.json_response(told_error, status=fault.status, headers=fault.headers)
        needed = len(prompt_ids(body["messages"])) + (1 if self.caps_silently else body["max_tokens"])
        if needed > self.max_model_len:
            message = (
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested {needed}"
            )
            return web.json_response({"error": {"message": message}}, status=400)
        good = self._good(body)
        reply = good if fault.change is None else fault.change(good) or good
        text_of_reply = reply if isinstance(reply, str) else json.dumps(reply)
        if fault.half:
            return await self._half(request, text_of_reply)
        response = web.Response(text=text_of_reply, content_type="application/json")
        await response.prepare(request)
        await response.write_eof()
        self.answered += 1
        if fault.change is None:
            self._write(f"answered {text}")
        return response

    def _note(self, text: str, body: dict[str, Any], request: web.Request) -> None:
        self.asked[text] += 1
        self._write(f"asked {text}")
        if self.remembers:
            self.bodies.append(body)
            self.headers.append(dict(request.headers))
            self.times.append((text, time.monotonic()))
        if self.standstills and self.asked.total() % STANDSTILL_EVERY == 0:
            time.sleep(STANDSTILL_S)

    def _write(self, line: str) -> None:
        if self.log is not None:
            os.write(self.log, f"{line}\n".encode())

    async def _half(self, request: web.Request, text: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(text)), "Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(text[: len(text) // 2].encode())
        assert request.transport is not None
        request.transport.close()
        return response

    def _good(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = prompt_ids(body["messages"])
        output, finish = output_ids(body["messages"], min(body["max_tokens"], self.max_model_len - len(prompt)))
        reply: dict[str, Any] = {
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "text", "reasoning": None},
                    "finish_reason": finish,
                    "stop_reason": None,
                    "token_ids": output,
                }
            ],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(output)},
            "prompt_token_ids": prompt,
        }
        if self.extraction:
            reply["kv_transfer_params"] = {"hidden_states_path": "/somewhere"}
        if not self.with_ids:
            del reply["prompt_token_ids"], reply["choices"][0]["token_ids"]
        return reply


def _main(port: str, log: str, delay_s: str, mode: str) -> None:
    server = FaultyServer(
        plan=told if mode == "told" else lambda _text, _attempt: Fault(),
        wanted_port=int(port),
        backlog=32 if mode == "told" else 512,
        delay_s=float(delay_s),
        standstills=mode == "told",
        log=os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT),
        remembers=False,
    )
    with server:
        print(server.port, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    _main(*sys.argv[1:])
