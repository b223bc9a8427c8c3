"""The client against a server that misbehaves: every question ends in exactly one outcome."""

import asyncio
import json
import os
import random
import signal
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from eagle3 import schemas
from eagle3.console import Interrupted
from eagle3.digests import derived_seed, digest
from eagle3.params import GenerateParams, load_params
from eagle3.prompts import write_splits
from eagle3.reasoning import Marker, Markers
from eagle3.serving import client as client_module
from eagle3.serving.answers import Answer, Limits, Question, Refusal, sampling_fields
from eagle3.serving.client import SLOWEST_TOKENS_PER_S, Client, Outcome, Service, request_timeout_s, run_async
from eagle3.serving.endpoints import LONGEST_PAUSE_S, endpoint_url, is_loopback, retry_after_s
from eagle3.tables import read_table
from tests.faulty_server import (
    KINDS,
    MODEL,
    REASONS,
    TEMPLATE_TOKENS,
    VOCAB,
    Fault,
    FaultyServer,
    output_ids,
    prompt_ids,
    told,
)
from tests.stage_runs import Stage, prompt_row

ROOT = Path(__file__).parent.parent
PARAMS = load_params(ROOT / "params.yaml").generate.model_copy(
    update={"max_new_tokens": 32, "concurrency": 16, "stall_timeout_s": 20.0, "retries": 3}
)
MAX_TOKENS = 511
MARKERS = Markers(Marker("<think>", (6,)), Marker("</think>", (7,)), ())


def service(**changes: Any) -> Service:
    params: GenerateParams = PARAMS.model_copy(update=changes)
    limits = Limits(VOCAB, MAX_TOKENS, params.min_room_tokens, frozenset({2}), params.require_ids)
    return Service((MODEL,), params, limits, markers=MARKERS, log_hint="see the log", budget_hint="ask for less")


def questions(texts: list[str], **changes: Any) -> list[Question]:
    params: GenerateParams = PARAMS.model_copy(update=changes)
    return [Question(text, [{"role": "user", "content": text}], sampling_fields(params, text)) for text in texts]


def ask(
    urls: list[str],
    texts: list[str],
    alive: Callable[[], ValueError | None] = lambda: None,
    kept: list[Outcome] | None = None,
    **changes: Any,
) -> dict[str, Outcome]:
    """All outcomes by text; asserts that each question has exactly one."""
    found: list[Outcome] = [] if kept is None else kept

    async def main() -> None:
        async with Client(urls, service(**changes), backoff_s=0.01) as client:
            await client.preflight()
            await client.answer_all(iter(questions(texts, **changes)), found.append, alive, len(texts))

    run_async(main)
    by_text = {outcome.question.row_id: outcome for outcome in found}
    assert len(by_text) == len(found) == len(texts)
    return by_text


def good(outcome: Outcome) -> bool:
    """Whether the outcome is the answer that a server without faults gives."""
    messages, answer = outcome.question.messages, outcome.result
    return (
        isinstance(answer, Answer)
        and answer.prompt_token_ids == prompt_ids(messages)
        and (answer.output_token_ids, answer.finish_reason) == output_ids(messages, outcome.sampling["max_tokens"])
    )


def refusal(outcome: Outcome) -> str:
    assert isinstance(outcome.result, Refusal), outcome.result
    return outcome.result.reason


def message(**fields: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        body["choices"][0]["message"] = {"role": "assistant", **fields}

    return change


@pytest.mark.parametrize(
    ("fields", "reasoning"),
    [
        ({"reasoning": "new", "content": "c"}, "new"),
        ({"reasoning_content": "old", "content": "c"}, "old"),
        ({"reasoning": "new", "reasoning_content": "old", "content": "c"}, "new"),
        ({"reasoning": None, "reasoning_content": "old", "content": None}, "old"),
        ({"reasoning": "", "content": "c"}, None),
        ({"content": "c"}, None),
        ({"reasoning": 5, "content": "half \ud83d"}, None),
    ],
)
def test_g01_both_reasoning_fields_are_read(fields: dict[str, Any], reasoning: str | None) -> None:
    with FaultyServer(lambda _t, _n: Fault(change=message(**fields))) as server:
        answer = ask([server.url], ["q"])["q"].result
    assert isinstance(answer, Answer)
    assert answer.reasoning == reasoning
    (answer.content or "").encode()  # fit for Parquet


def test_g01_a_run_that_wants_thinking_stops_when_there_is_none() -> None:
    kept: list[Outcome] = []
    texts = [f"q{i}" for i in range(60)]
    with FaultyServer() as server, pytest.raises(ValueError, match="asks for thinking, but none of the first 20"):
        ask([server.url], texts, kept=kept, chat_template_kwargs={"enable_thinking": True})
    assert len(kept) >= 19
    assert server.bodies[0]["chat_template_kwargs"] == {"enable_thinking": True}


def shorter(body: dict[str, Any]) -> None:
    body["choices"][0]["token_ids"].pop()


def longer(body: dict[str, Any]) -> None:
    body["choices"][0]["token_ids"].append(5)


def empty_ids(body: dict[str, Any]) -> None:
    body["choices"][0]["token_ids"] = []


def null_id(body: dict[str, Any]) -> None:
    body["choices"][0]["token_ids"][0] = None


def no_ids(body: dict[str, Any]) -> None:
    body["choices"][0]["token_ids"] = None


def short_prompt(body: dict[str, Any]) -> None:
    body["prompt_token_ids"].pop()


def outside(body: dict[str, Any]) -> None:
    body["choices"][0]["token_ids"][0] = VOCAB


def empty_answer(body: dict[str, Any]) -> None:
    body["choices"][0].update(token_ids=[], message={"content": ""})
    body["usage"]["completion_tokens"] = 0


def two_choices(body: dict[str, Any]) -> None:
    body["choices"] *= 2


def aborted(body: dict[str, Any]) -> None:
    body["choices"][0]["finish_reason"] = "abort"


BAD_BODIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "shorter": shorter,
    "longer": longer,
    "empty": empty_ids,
    "null": null_id,
    "missing": no_ids,
    "prompt": short_prompt,
    "outside": outside,
    "nothing": empty_answer,
    "choices": two_choices,
    "aborted": aborted,
    "list": lambda _body: [1],
    "garbage": lambda _body: '{"choices": [',
    "no usage": lambda body: {**body, "usage": None},
}


def test_g05_wrong_ids_are_asked_again_then_rejected_and_never_kept() -> None:
    texts = [f"{kind}/{mode}" for kind in BAD_BODIES for mode in ("once", "always")] + ["good"]

    def plan(text: str, attempt: int) -> Fault:
        kind, _, mode = text.partition("/")
        return Fault(change=BAD_BODIES[kind]) if mode == "always" or (mode == "once" and attempt == 1) else Fault()

    with FaultyServer(plan) as server:
        outcomes = ask([server.url], texts)
    assert good(outcomes["good"])
    assert outcomes["good"].attempts == 1
    for kind in BAD_BODIES:
        assert good(outcomes[f"{kind}/once"])
        assert outcomes[f"{kind}/once"].attempts == 2
        assert outcomes[f"{kind}/always"].attempts == PARAMS.retries + 1
        assert server.asked[f"{kind}/always"] == PARAMS.retries + 1
    assert refusal(outcomes["shorter/always"]) == "ids disagree with usage"
    assert refusal(outcomes["null/always"]) == "ids out of range"
    assert refusal(outcomes["nothing/always"]) == "empty answer"


def test_an_answer_of_nothing_but_a_stop_token_is_rejected_without_another_try() -> None:
    def only_stop(body: dict[str, Any]) -> None:
        body["choices"][0]["token_ids"] = [2]
        body["usage"]["completion_tokens"] = 1

    with FaultyServer(lambda _t, _n: Fault(change=only_stop)) as server:
        outcome = ask([server.url], ["q"])["q"]
    assert (refusal(outcome), server.asked["q"]) == ("empty answer", 1)


def test_g09_timeouts_allow_for_the_whole_queue() -> None:
    assert request_timeout_s(8192, 200) > 8192 * 200 / 100  # a slow server: 100 tokens per s for all together
    with FaultyServer(lambda _t, _n: Fault(delay_s=1.0)) as server:
        outcomes = ask([server.url], [f"q{i}" for i in range(200)], concurrency=200)
    assert all(map(good, outcomes.values()))
    assert server.most_in_flight == 200


def test_g09_a_request_that_times_out_is_cancelled_at_the_server_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "request_timeout_s", lambda *_: 0.5)
    with FaultyServer(lambda text, n: Fault(hang=text == "slow" and n == 1)) as server:
        outcomes = ask([server.url], ["slow", "q1", "q2"])
        assert server.cancelled == 1
    assert all(map(good, outcomes.values()))
    assert outcomes["slow"].attempts == 2


def test_g10_many_at_once_with_every_kind_of_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    dice = random.Random(1)
    troubles = [Fault(reset=True), Fault(status=429), Fault(status=503), Fault(status=500), Fault(delay_s=0.2)]
    fate = {f"q{i}": dice.choice(troubles) if dice.random() < 0.1 else None for i in range(1000)}
    with FaultyServer(lambda text, n: (fate[text] if n == 1 else None) or Fault(delay_s=0.02)) as server:
        outcomes = ask([server.url], list(fate), concurrency=200)
    assert all(map(good, outcomes.values()))
    assert 100 < server.most_in_flight <= 200
    tries = {text: outcome.attempts for text, outcome in outcomes.items()}
    assert tries == dict(server.asked)
    assert set(tries.values()) == {1, 2}


def test_g10_trouble_without_end_is_a_refusal_of_that_row_alone() -> None:
    faults = {"reset": Fault(reset=True), "busy": Fault(status=503, message="\x1b[31mbusy"), "bad": Fault(status=400)}
    with FaultyServer(lambda text, _n: faults.get(text, Fault())) as server:
        outcomes = ask([server.url], [*faults, "q1", "q2"])
    assert refusal(outcomes["reset"]) == "connection failed"
    assert refusal(outcomes["busy"]) == "HTTP 503"
    assert refusal(outcomes["bad"]) == "HTTP 400"
    assert server.asked == Counter({"reset": 4, "busy": 4, "bad": 1, "q1": 1, "q2": 1})
    assert isinstance(outcomes["busy"].result, Refusal)
    assert "\\x1b[31mbusy" in outcomes["busy"].result.detail
    assert good(outcomes["q1"])


def test_a_run_in_which_everything_fails_ends_early() -> None:
    texts = [f"q{i}" for i in range(500)]
    with (
        FaultyServer(lambda _t, _n: Fault(status=400, message="bad switch")) as server,
        pytest.raises(ValueError, match=r"the last \d+ requests all failed.*HTTP 400.*bad switch"),
    ):
        ask([server.url], texts)
    assert len(server.asked) < 60


def test_g12_no_answer_at_all_ends_the_run_with_advice_and_keeps_the_rest() -> None:
    kept: list[Outcome] = []
    texts = ["never", *[f"q{i}" for i in range(30)]]
    began = time.monotonic()
    with FaultyServer(lambda text, _n: Fault(hang=text == "never")) as server:
        with pytest.raises(
            ValueError, match=r"no answer for generate\.stall_timeout_s = 1 s with 1 requests.*30 of 31"
        ):
            ask([server.url], texts, kept=kept, stall_timeout_s=1.0)
        assert time.monotonic() - began < 10
        time.sleep(0.5)
        assert server.cancelled == 1
    assert len(kept) == 30


def test_g12_a_slow_server_that_still_writes_tokens_is_not_stalled() -> None:
    server = FaultyServer(lambda _t, _n: Fault(delay_s=2.5), cache_tokens=1024)

    def alive() -> None:
        server.tokens += 1.0

    with server:
        outcomes = ask([server.url], ["a", "b"], alive, stall_timeout_s=1.0)
    assert all(map(good, outcomes.values()))


def test_a_dead_server_of_our_own_ends_the_run_at_once() -> None:
    began = time.monotonic()

    def alive() -> ValueError | None:
        return ValueError("the server ended; log: here") if time.monotonic() - began > 1 else None

    with FaultyServer(lambda _t, _n: Fault(hang=True)) as server, pytest.raises(ValueError, match="log: here"):
        ask([server.url], ["a", "b"], alive)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("has_tokenize", [True, False])
@pytest.mark.parametrize("caps_silently", [True, False])
@pytest.mark.parametrize("wanted", [40, 8192])
def test_g14_the_answer_budget_shrinks_to_the_room_left(has_tokenize: bool, caps_silently: bool, wanted: int) -> None:
    rooms = [0, 1, 15, 16, 17, 39, 40, 41, 300, -1, -2, -100]
    texts = {f"{room:+d}|".ljust(MAX_TOKENS - TEMPLATE_TOKENS - room, "x"): room for room in rooms}
    with FaultyServer(max_model_len=MAX_TOKENS + 1, has_tokenize=has_tokenize, caps_silently=caps_silently) as server:
        outcomes = ask([server.url], list(texts), max_new_tokens=wanted)
    for text, room in texts.items():
        outcome = outcomes[text]
        if room < PARAMS.min_room_tokens:
            assert refusal(outcome) == "prompt too long", room
        else:
            assert good(outcome), room
            assert isinstance(outcome.result, Answer)
            assert outcome.result.length <= MAX_TOKENS
            assert outcome.sampling["max_tokens"] <= wanted


def test_g13_every_sampling_field_is_sent_and_the_seed_depends_on_the_prompt_alone() -> None:
    with FaultyServer() as server:
        ask([server.url], ["b", "a"])
        body = next(body for body in server.bodies if body["messages"][0]["content"] == "a")
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ):
        assert body[name] == PARAMS.model_dump()[name]
    assert body["seed"] == derived_seed(PARAMS.seed, "a")
    assert (body["n"], body["stream"], body["return_token_ids"], body["max_tokens"]) == (1, False, True, 32)


@pytest.mark.parametrize(
    ("server", "told"),
    [
        (FaultyServer(model="other"), "serves other, not verifier.model = fake/verifier"),
        (FaultyServer(max_model_len=256), "max_model_len is 256, verifier.max_model_len is 512"),
        (FaultyServer(cache_tokens=480), "its KV cache holds 480 tokens, verifier.max_model_len is 512"),
        (FaultyServer(extraction=True), "extraction mode"),
        (FaultyServer(with_ids=False), "returns no token ids"),
    ],
)
def test_preflight_refuses_an_endpoint_that_cannot_do(server: FaultyServer, told: str) -> None:
    with server, pytest.raises(ValueError, match=told):
        ask([server.url], ["q"])
    assert not server.asked


def test_preflight_names_an_endpoint_that_is_down_or_another_version() -> None:
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:9/v1/models does not answer"):
        ask(["http://127.0.0.1:9"], ["q"], retries=1)
    with FaultyServer(version="1") as one, FaultyServer(version="2") as two, pytest.raises(ValueError, match="vllm 2"):
        ask([one.url, two.url], ["q"])


def test_two_endpoints_share_the_work_and_one_that_dies_is_spared() -> None:
    texts = [f"q{i}" for i in range(200)]
    with (
        FaultyServer(lambda _t, _n: Fault(delay_s=0.02)) as one,
        FaultyServer(lambda _t, _n: Fault(delay_s=0.02)) as two,
    ):
        ask([one.url, two.url], texts)
        assert abs(one.answered - two.answered) < 40
    dead = FaultyServer(lambda _t, _n: Fault(reset=True))
    with FaultyServer(lambda _t, _n: Fault(delay_s=0.02)) as one, dead as two:
        outcomes = ask([one.url, two.url], texts)
    assert all(map(good, outcomes.values()))
    assert set(dead.asked.values()) == {1}  # a question that failed there is asked elsewhere


def test_every_endpoint_has_its_own_share_of_requests_in_flight() -> None:
    slow = Fault(delay_s=0.3)
    with FaultyServer(lambda _t, _n: slow) as one, FaultyServer(lambda _t, _n: slow) as two:
        ask([one.url, two.url], [f"q{i}" for i in range(120)], concurrency=12)
        assert (one.most_in_flight, two.most_in_flight) == (12, 12)


def test_an_endpoint_that_dies_is_left_out_and_comes_back(capfd: pytest.CaptureFixture[str]) -> None:
    dead_until, asked_while_dead = time.monotonic() + 1.5, 0

    def plan(_text: str, _attempt: int) -> Fault:
        nonlocal asked_while_dead
        two.healthy = time.monotonic() > dead_until
        asked_while_dead += not two.healthy
        return Fault(delay_s=0.02, reset=not two.healthy)

    def alive() -> None:
        two.healthy = time.monotonic() > dead_until

    two = FaultyServer(plan)
    with FaultyServer(lambda _t, _n: Fault(delay_s=0.1)) as one, two:
        outcomes = ask([one.url, two.url], [f"q{i}" for i in range(600)], alive, concurrency=8)
        assert all(map(good, outcomes.values()))
        assert asked_while_dead <= 8  # none after those that showed that it was dead
        assert two.answered > 50
    assert f"{two.url} is left out until it answers again: connection failed" in (told := capfd.readouterr().err)
    assert f"{two.url} answers again" in told


def test_an_endpoint_that_is_down_at_the_start_joins_later(capfd: pytest.CaptureFixture[str]) -> None:
    late = FaultyServer()
    with late:
        late.wanted_port = late.port
    started = False

    def alive() -> None:
        nonlocal started
        if not started:
            started = True
            late.__enter__()

    with FaultyServer(lambda _t, _n: Fault(delay_s=0.05)) as one:
        outcomes = ask([one.url, late.url], [f"q{i}" for i in range(400)], alive, retries=0, concurrency=4)
    late.__exit__()
    assert all(map(good, outcomes.values()))
    assert late.answered > 0
    assert f"{late.url} is left out" in capfd.readouterr().err


def test_all_endpoints_dead_for_too_long_end_the_run_by_name() -> None:
    kept: list[Outcome] = []

    def alive() -> None:
        one.healthy = two.healthy = len(kept) < 10

    def plan(_text: str, _attempt: int) -> Fault:
        return Fault(reset=len(kept) >= 10)

    one, two = FaultyServer(plan), FaultyServer(plan)
    texts = [f"q{i}" for i in range(200)]
    with one, two, pytest.raises(ValueError, match=r"no endpoint answered for.*connection failed.*run again") as error:
        ask([one.url, two.url], texts, alive, kept, stall_timeout_s=1.0, retries=10)
    assert one.url in str(error.value)
    assert two.url in str(error.value)
    assert all(map(good, kept))  # nobody lost its tries on dead servers
    assert len(kept) >= 10


def test_another_version_that_comes_back_ends_the_run() -> None:
    def plan(_text: str, attempt: int) -> Fault:
        two.version = "other"
        return Fault(reset=True)

    two = FaultyServer(plan)
    with (
        FaultyServer(lambda _t, _n: Fault(delay_s=0.05)) as one,
        two,
        pytest.raises(ValueError, match=r"different engine versions.*vllm other"),
    ):
        ask([one.url, two.url], [f"q{i}" for i in range(300)])


def test_retry_after_is_read_as_seconds_or_date_and_capped() -> None:
    def date(seconds: float) -> str:
        return format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)

    assert [retry_after_s(text) for text in (None, "", "soon", "-3", "0", "7", "1.5")] == [0, 0, 0, 0, 0, 7, 1.5]
    assert 8 < retry_after_s(date(10)) <= 10
    assert retry_after_s(date(-10)) == 0
    assert retry_after_s("9" * 400) == retry_after_s(date(1e6)) == LONGEST_PAUSE_S


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_honoured(status: int) -> None:
    fault = Fault(status=status, headers={"Retry-After": "1"})
    with FaultyServer(lambda text, n: fault if text == "q1" and n <= 2 else Fault()) as server:
        outcomes = ask([server.url], ["q1", "q2"])
    assert all(map(good, outcomes.values()))
    times = [moment for text, moment in server.times if text == "q1"]
    assert len(times) == 3
    assert all(later - earlier >= 1 for earlier, later in pairwise(times))


def test_a_server_that_takes_only_so_many_gets_so_many() -> None:
    """Nobody runs out of tries at a limit that is far below generate.concurrency."""
    refused = 0

    def plan(_text: str, _attempt: int) -> Fault:
        nonlocal refused
        over = server.in_flight > 6
        refused += over
        return Fault(status=429) if over else Fault(delay_s=0.02)

    server = FaultyServer(plan)
    with server:
        outcomes = ask([server.url], [f"q{i}" for i in range(400)], concurrency=64)
    assert all(map(good, outcomes.values()))
    assert refused < 64 + 100


def test_every_kind_of_trouble_is_tried_again_and_listed_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "request_timeout_s", lambda *_: 3.0)
    texts = [f"{i} {kind} {mode}" for i, kind in enumerate(KINDS) for mode in ("once", "always")] + ["0 good x"]
    with FaultyServer(told) as server:
        outcomes = ask([server.url], texts, retries=2)
    for text, outcome in outcomes.items():
        _, kind, mode = text.split()
        if kind in ("slow", "good") or mode == "once":
            assert good(outcome), text
            assert outcome.attempts == server.asked[text] == (1 if kind in ("slow", "good") else 2)
        else:
            assert server.asked[text] == outcome.attempts == 3
    reasons = {text.split()[1]: refusal(outcome) for text, outcome in outcomes.items() if not good(outcome)}
    assert reasons == REASONS


@pytest.mark.parametrize("text", ["[" * 100_000, '{"choices": "' + "x" * (5 << 20) + '"}'])
def test_a_monstrous_reply_is_a_refusal(text: str) -> None:
    with FaultyServer(lambda _t, _n: Fault(change=lambda _body: text)) as server:
        outcome = ask([server.url], ["q"], retries=1)["q"]
    assert refusal(outcome) == "malformed response"


def test_a_server_that_cannot_bound_thinking_ends_the_run_with_the_remedy() -> None:
    said = "thinking_token_budget is set but reasoning_config is not configured. Please set --reasoning-parser"
    with (
        FaultyServer(lambda _t, _n: Fault(status=400, message=said)) as server,
        pytest.raises(ValueError, match=r"reasoning_config is not configured.*ask for less"),
    ):
        ask([server.url], [f"q{i}" for i in range(50)], thinking_token_budget=16)
    assert server.bodies[0]["thinking_token_budget"] == 16
    assert server.asked.total() < 50


def test_timeouts_follow_the_drawn_length_of_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(client_module, "request_timeout_s", lambda *given: asked.append(given) or 60.0)
    with FaultyServer() as server:
        ask([server.url], [f"q{i}" for i in range(30)], max_new_tokens=[8, 32])
    assert Counter(asked) == Counter((body["max_tokens"], PARAMS.concurrency) for body in server.bodies)
    assert {most for most, _ in asked} == {8, 32}


def test_timeouts_grow_with_the_length_and_the_load() -> None:
    assert request_timeout_s(32, 16) - request_timeout_s(8, 16) == pytest.approx(24 * 16 / SLOWEST_TOKENS_PER_S)
    assert request_timeout_s(32, 16) < request_timeout_s(32, 17)


def test_the_key_is_sent_and_never_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_API_KEY", "sk-secret")
    with FaultyServer() as server:
        ask([server.url], ["q"])
    assert server.headers[0]["Authorization"] == "Bearer sk-secret"
    plan = Fault(status=401, message="wrong key sk-secret")
    with FaultyServer(lambda _t, _n: plan) as server, pytest.raises(ValueError, match="EAGLE3_API_KEY") as error:
        ask([server.url], ["q"])
    assert "sk-secret" not in str(error.value)


def test_addresses() -> None:
    for text in ("http://h:8000", "http://h:8000/", "http://h:8000/v1", "http://h:8000/v1/"):
        assert endpoint_url(text) == "http://h:8000/v1"
    for bad in ("h:8000", "ftp://h", "http://", "http://h/v1?key=1"):
        with pytest.raises(ValueError, match="not an address"):
            endpoint_url(bad)
    with pytest.raises(ValueError, match="EAGLE3_API_KEY"):
        endpoint_url("http://user:key@h/v1")
    assert is_loopback("http://127.0.0.1:1/v1")
    assert is_loopback("http://[::1]:1/v1")
    assert is_loopback("http://localhost/v1")
    assert not is_loopback("http://10.0.0.1/v1")


def test_g11_one_slow_row_among_many_holds_nothing_up_and_memory_stays() -> None:
    texts = [f"q{i}" for i in range(1500)]
    order: list[str] = []

    async def main() -> None:
        def stream() -> Iterator[Question]:
            for text in texts:
                yield questions([text])[0]

        async with Client([server.url], service(), backoff_s=0.01) as client:
            await client.preflight()
            await client.answer_all(
                stream(), lambda outcome: order.append(outcome.question.row_id), lambda: None, len(texts)
            )

    with FaultyServer(lambda text, _n: Fault(delay_s=3.0 if text == "q0" else 0.0)) as server:
        server.bodies = server.headers = Forgetful()
        tracemalloc.start()
        run_async(main)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert sorted(order) == sorted(texts)
    assert order.index("q0") > 2 * PARAMS.concurrency
    assert peak < 8 << 20


class Forgetful(list[Any]):
    def append(self, _item: Any) -> None:
        pass


def test_sigterm_becomes_an_interruption_and_the_handler_is_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)

    async def main() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(5)

    with pytest.raises(Interrupted):
        run_async(main)
    assert signal.getsignal(signal.SIGTERM) is before


# -- the stage as a process


def test_g11_killed_and_resumed_every_row_is_there_exactly_once(tmp_path: Path) -> None:
    texts = [f"question {i}" for i in range(60)]
    with FaultyServer(lambda text, _n: Fault(delay_s=0.1 + (60 - int(text.split()[1])) / 30)) as server:
        stage = Stage(tmp_path, server.url, texts, concurrency=6)
        process = stage.start()
        while server.answered < 25:
            time.sleep(0.05)
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        before, answered = server.asked.total(), server.answered
        assert not (tmp_path / "responses").exists()
        stage.run()
        asked_again = server.asked.total() - before
        assert 60 - answered <= asked_again <= 60 - answered + 6  # at most what was in flight is lost
        assert [row["prompt_id"] for row in stage.rows()] == stage.expected_order()
        metrics = stage.metrics()
        assert metrics["reused"] == 60 - asked_again
        assert metrics["requests_sent"] == asked_again
        assert metrics["finish_stop"] + metrics["finish_length"] == metrics["rows_out"] == 60
        assert metrics["completion_tokens"] == sum(len(row["output_token_ids"]) for row in stage.rows())
        after = server.asked.total()
        stage.run()
        assert server.asked.total() == after
        assert stage.metrics()["reused"] == 60


def test_sigterm_keeps_what_is_done_and_exits_130(tmp_path: Path) -> None:
    texts = [f"question {i}" for i in range(40)]
    with FaultyServer(lambda _t, _n: Fault(delay_s=0.2)) as server:
        stage = Stage(tmp_path, server.url, texts, concurrency=4)
        process = stage.start()
        while server.answered < 12:
            time.sleep(0.05)
            assert process.poll() is None
        process.terminate()
        _, told = process.communicate(timeout=30)
        assert process.returncode == 130, told
        assert "Traceback" not in told
        before = server.asked.total()
        stage.run()
        assert server.asked.total() - before <= 40 - 12


def test_g10_failed_rows_fail_the_stage_by_name_and_a_rerun_fills_only_the_gaps(tmp_path: Path) -> None:
    texts = [f"question {i}" for i in range(30)]
    broken = {"question 3", "question 4"}
    with FaultyServer(lambda text, _n: Fault(status=500 if text in broken else 200)) as server:
        stage = Stage(tmp_path, server.url, texts)
        with pytest.raises(ValueError, match=r"2 of 30 rows rejected \(2 HTTP 500\)") as error:
            stage.run()
        assert digest("question 3") in str(error.value)
        listed = read_table(tmp_path / "work/generate/rejected.parquet", schemas.REJECTED)
        assert {row["row"]: row["reason"] for row in listed} == dict.fromkeys(map(digest, broken), "HTTP 500")
        assert not (tmp_path / "responses").exists()
        server.asked.clear()
        broken.clear()
        stage.run()
        assert set(server.asked) == {"question 3", "question 4"}
        assert len(stage.rows()) == 30


def test_g07_g16_counts_by_finish_reason_and_rejected_rows(tmp_path: Path) -> None:
    texts = [f"question {i}" for i in range(20)] + ["x" * 600]
    with FaultyServer() as server:
        stage = Stage(tmp_path, server.url, texts, max_new_tokens=6, max_failed_share=0.1)
        stage.run()
    rows, metrics = stage.rows(), stage.metrics()
    finish = Counter(row["finish_reason"] for row in rows)
    assert (metrics["finish_length"], metrics["finish_stop"]) == (finish["length"], finish["stop"])
    assert finish["length"] > 0
    assert finish["stop"] > 0
    assert metrics["rows_rejected"] == {"prompt too long": 1}
    rejected = list(read_table(tmp_path / "responses" / "rejected.parquet", schemas.REJECTED))
    assert [row["row"] for row in rejected] == [digest("x" * 600)]
    assert all(json.loads(row["sampling"])["max_tokens"] == 6 for row in rows)
    assert {row["engine"] for row in rows} == {"vllm 9.9.9"}


# -- servers that tell no ids


def no_prompt_ids(body: dict[str, Any]) -> None:
    body["prompt_token_ids"] = None


def without(*names: str) -> Callable[[dict[str, Any]], None]:
    """Ids away, and these fields of the message empty."""

    def change(body: dict[str, Any]) -> None:
        body["prompt_token_ids"] = body["choices"][0]["token_ids"] = None
        body["choices"][0]["message"].update(dict.fromkeys(names, ""))

    return change


def uncounted(body: dict[str, Any]) -> None:
    without()(body)
    body["usage"]["completion_tokens"] = None


def test_answers_without_ids_are_taken_where_none_are_required() -> None:
    changes = {
        "ids": None,
        "none": without(),
        "reasoning only": lambda body: (without("content")(body), body["choices"][0]["message"].update(reasoning="r")),
        "empty": without("content", "reasoning"),
        "half": no_prompt_ids,
        "uncounted": uncounted,
        "wrong": shorter,
    }

    def plan(text: str, _attempt: int) -> Fault:
        change = changes[text]
        return Fault() if change is None else Fault(change=lambda body: change(body) and None)

    with FaultyServer(plan) as server:
        outcomes = ask([server.url], list(changes), require_ids=False)
    assert good(outcomes["ids"])
    for text in ("none", "reasoning only"):
        answer = outcomes[text].result
        assert isinstance(answer, Answer)
        assert (answer.prompt_token_ids, answer.output_token_ids) == (None, None)
        ids = prompt_ids(outcomes[text].question.messages)
        assert (answer.prompt_tokens, answer.length) == (len(ids), len(ids) + answer.completion_tokens)
    assert refusal(outcomes["empty"]) == "empty answer"
    assert refusal(outcomes["half"]) == "ids missing"
    assert refusal(outcomes["uncounted"]) == "malformed response"
    assert refusal(outcomes["wrong"]) == "ids disagree with usage"


def test_a_run_over_a_server_without_ids_stores_usage_and_text_and_is_no_answer_for_a_run_that_needs_ids(
    tmp_path: Path,
) -> None:
    texts = [f"question {i}" for i in range(20)] + ["x" * 480]
    with FaultyServer(with_ids=False) as server:
        stage = Stage(tmp_path, server.url, texts, require_ids=False)
        stage.run()
        rows = {row["messages"][0]["content"]: row for row in stage.rows()}
        assert len(rows) == 21
        for text, row in rows.items():
            assert (row["prompt_token_ids"], row["output_token_ids"], row["content"]) == (None, None, "text")
            ids = prompt_ids([{"role": "user", "content": text}])
            assert row["prompt_tokens"] == len(ids)
            assert row["prompt_tokens"] + row["completion_tokens"] <= 511
        assert stage.metrics()["completion_tokens"] == sum(row["completion_tokens"] for row in rows.values())
        asked = server.asked.total()
        stage.run()
        assert server.asked.total() == asked
    with FaultyServer() as server:
        stage = Stage(tmp_path, server.url, texts, require_ids=True)
        stage.run()
        assert all(row["output_token_ids"] for row in stage.rows())


# -- the dataset's own answers


def test_reference_answers_need_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle3.serving.generation.LocalServers", None)
    texts = [f"question {i}" for i in range(20)]
    stage = Stage(tmp_path, "http://127.0.0.1:9/v1", texts, reference_share=1.0, max_failed_share=0.1)
    prompts = [prompt_row(i, text) | {"reference": None if i == 3 else f"answer {i}"} for i, text in enumerate(texts)]
    write_splits(tmp_path / "prompts", prompts)
    stage.run()
    rows, metrics = stage.rows(), stage.metrics()
    assert [row["prompt_id"] for row in rows] == [
        name for name in stage.expected_order() if name != digest("question 3")
    ]
    assert {row["messages"][0]["content"]: row["content"] for row in rows} == {
        f"question {i}": f"answer {i}" for i in range(20) if i != 3
    }
    assert metrics["rows_rejected"] == {"no reference answer": 1}
    assert metrics["references"] == 19
    for row in rows:
        absent = (
            "prompt_token_ids",
            "output_token_ids",
            "prompt_tokens",
            "completion_tokens",
            "reasoning",
            "stop_reason",
        )
        assert [row[name] for name in absent] == [None] * 6
        assert (row["finish_reason"], row["sampling"], row["engine"]) == ("stop", "{}", "reference")
    assert not (tmp_path / "work" / "generate").exists()


def test_a_share_of_reference_answers_is_mixed_in(tmp_path: Path) -> None:
    """Which prompts take theirs does not depend on the others; the rest is asked, also where there is no reference."""
    texts = [f"question {i}" for i in range(200)]
    prompts = [prompt_row(i, text) | {"reference": None if i < 20 else f"answer {i}"} for i, text in enumerate(texts)]
    with FaultyServer() as server:
        stage = Stage(tmp_path, server.url, texts, reference_share=0.3)
        write_splits(tmp_path / "prompts", prompts)
        stage.run()
        rows, asked = stage.rows(), set(server.asked)
    assert [row["prompt_id"] for row in rows] == stage.expected_order()
    given = {row["messages"][0]["content"] for row in rows if row["engine"] == "reference"}
    assert 30 < len(given) < 80
    assert not given & set(texts[:20])
    assert asked & set(texts) == set(texts) - given
    assert stage.metrics()["references"] == len(given)
    assert all((row["output_token_ids"] is None) == (row["engine"] == "reference") for row in rows)
    with FaultyServer() as server:
        fewer = Stage(tmp_path / "fewer", server.url, texts[:100], reference_share=0.3)
        write_splits(tmp_path / "fewer" / "prompts", prompts[:100])
        fewer.run()
        same = {row["messages"][0]["content"] for row in fewer.rows() if row["engine"] == "reference"}
    assert same == given & set(texts[:100])


def test_too_few_reference_answers_fail_the_stage(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "http://127.0.0.1:9/v1", ["one", "two"], reference_share=1.0)
    with pytest.raises(ValueError, match="2 no reference answer"):
        stage.run()
