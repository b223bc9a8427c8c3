"""A run of generate: which answers are missing, how they are asked for, and the rows of the current prompt list.

Answers live in the work store, one unit per prompt. The out is assembled from the prompts of today and those units.
Memory does not grow with the number of prompts, but for one byte each: prompts and answers stream through.
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

from eagle3.console import Progress, say, visible
from eagle3.params import EngineParams, GenerateParams, ReasoningParams, VerifierParams
from eagle3.reasoning import Pieces, ThinkingFinder, parser_name
from eagle3.serving.answers import (
    Answer,
    Limits,
    Question,
    Refusal,
    failure_key,
    make_question,
    pack_answer,
    pack_refusal,
    refusal_key,
    response_row,
    unit_key,
    unpack_refusal,
)
from eagle3.serving.client import HELLO, TOO_LONG, Client, Outcome, Service, run_async
from eagle3.serving.engine import vllm_package
from eagle3.serving.references import read_prompts, reference_row, takes_reference
from eagle3.serving.server import LocalServers
from eagle3.serving.thinking import ParserCheck, budget_remedy, parser_remedy, thinking_arguments
from eagle3.tables import Account, Row
from eagle3.verifier import VerifierIdentity, load_tokenizer, locate_verifier, prompt_ids
from eagle3.workstore import RowStore, work_root

FAILURES_SHOWN = 5


class Quantiles:
    """Quantiles of positive numbers in bounded memory: counts in steps of 2 %, so a quantile is right to 1 %."""

    STEP = math.log(1.02)

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, value: float) -> None:
        """Count one number; anything below a millionth counts as that."""
        self._counts[round(math.log(max(value, 1e-6)) / self.STEP)] += 1

    def quantile(self, share: float) -> float:
        """The number that `share` of all numbers do not exceed; 0 where there are none."""
        left = (self._counts.total() - 1) * share
        for step in sorted(self._counts):
            left -= self._counts[step]
            if left < 0:
                return math.exp(step * self.STEP)
        return 0.0


@dataclass
class Generation:
    """One run over the prompts in `folder`."""

    folder: Path  # with train.parquet and validation.parquet
    verifier: VerifierParams
    engine_params: EngineParams
    reasoning: ReasoningParams
    params: GenerateParams
    identity: VerifierIdentity
    store: RowStore
    engine: str = ""  # name and version of what answers
    open: bytearray = field(default_factory=bytearray)  # 1 for each wanted answer that is to be asked for
    counts: Counter[str] = field(default_factory=Counter)
    latencies: Quantiles = field(default_factory=Quantiles)
    failures: int = 0  # answers that this run asked for in vain; why is in the store
    seconds: float = 0.0  # from the first request to the last answer
    output_tokens: int = 0  # written in that time

    def wanted(self) -> Iterator[tuple[Row, int]]:
        """The prompts to ask, in order, and the number of the answer."""
        for prompt in read_prompts(self.folder):
            if not takes_reference(prompt, self.params):
                for sample in range(self.params.samples_per_prompt):
                    yield prompt, sample

    def find_engine(self) -> None:
        """Learn what will answer: the installed vLLM, or what the endpoints say. Raises ValueError for a mismatch."""
        if self.params.endpoints:
            self.engine = run_async(self._ask_engine)
            return
        self.engine = " ".join(vllm_package())
        if self.engine != self.identity.engine:
            raise ValueError(
                f"the verifier was identified with {self.identity.engine}, but {self.engine} is installed; "
                "run: dvc repro verifier"
            )

    async def _ask_engine(self) -> str:
        async with Client(self.params.endpoints, self._service()) as client:
            engine = await client.preflight()
            self._compare_template(client.hello_ids)
            return engine

    def _tokenizer(self) -> Any:
        """The verifier's tokenizer; None where only the endpoints have the model."""
        try:
            return load_tokenizer(self.verifier)
        except ValueError:
            return None

    def _compare_template(self, served: list[int]) -> None:
        """Warn when an endpoint turns a prompt into other ids than the verifier whose digest is in every key.

        served: empty where the endpoint tells no ids.
        """
        tokenizer = self._tokenizer()
        if tokenizer is None:
            return
        if served and prompt_ids(tokenizer, HELLO, self.params.chat_template_kwargs) != served:
            say(
                "warning: the endpoints turn a prompt into other ids than verifier.model with its chat template: "
                "another revision or template is served there, and data/verifier.json does not describe it"
            )

    def _parser_check(self) -> ParserCheck | None:
        """What compares the server's parser with the ids; None where there is none, or markers that cannot be read."""
        local, own = not self.params.endpoints, self.engine_params.extra_args
        if local and parser_name(self.reasoning) is None and "reasoning_parser" not in own:
            return None  # our own server has no parser: the thinking stands inside the content
        tokenizer, markers = self._tokenizer(), self.identity.markers
        whole = all(len(marker.ids) == 1 for marker in (markers.start, markers.end) if marker is not None)
        if tokenizer is None and not whole:
            return None
        pieces: Mapping[int, bytes] = Pieces(tokenizer) if tokenizer is not None else defaultdict(bytes)
        return ParserCheck(ThinkingFinder(markers, pieces), parser_remedy(self.reasoning, local))

    def key(self, question: Question) -> str:
        """Key of a question's answer in the store."""
        return unit_key(question, self.params, self.identity.digest, self.engine, self.verifier.max_model_len)

    def missing(self) -> Iterator[Question]:
        """Questions to ask, in order: those that look_up found open."""
        for prompt, sample in compress(self.wanted(), self.open):
            yield make_question(prompt, self.params, sample)

    def look_up(self) -> None:
        """Find the questions with neither an answer nor a lasting refusal in the store."""
        for prompt, sample in self.wanted():
            key = self.key(make_question(prompt, self.params, sample))
            self.open.append(self.store.get(key) is None and self._stored_refusal(key) is None)

    def _stored_refusal(self, key: str) -> Refusal | None:
        unit = self.store.get(refusal_key(key, self.params.min_room_tokens))
        return None if unit is None else unpack_refusal(unit)

    def ask_missing(self) -> None:
        """Fill the store. Starts a server of our own when there are no endpoints; nothing is started for nothing."""
        self.look_up()
        total, missing = len(self.open), sum(self.open)
        self.counts["reused"] = total - missing
        if not missing:
            say(f"generate: nothing to ask, all {total:,} answers are settled in the work store")
            return
        with self._endpoints() as (urls, alive):
            try:
                run_async(lambda: self._ask(urls, alive, total, missing))
            finally:
                self.store.flush()

    @contextmanager
    def _endpoints(self) -> Iterator[tuple[list[str], Callable[[], ValueError | None]]]:
        with ExitStack() as stack:
            if self.params.endpoints:
                yield self.params.endpoints, lambda: None
            else:
                folder = locate_verifier(self.verifier)
                servers = LocalServers(self.verifier, self._local_engine(), folder, self._logs())
                stack.enter_context(servers)
                yield servers.urls, servers.failure

    def _local_engine(self) -> EngineParams:
        """engine of params.yaml with what makes the server tell and bound thinking, unless extra_args say it."""
        bounded = self.params.thinking_token_budget is not None
        own = thinking_arguments(self.reasoning, self.identity.markers, bounded)
        return self.engine_params.model_copy(update={"extra_args": own | self.engine_params.extra_args})

    def _logs(self) -> list[Path]:
        """The log of each server of ours."""
        count = self.params.servers
        names = ["generate.log"] if count == 1 else [f"generate-{number}.log" for number in range(1, count + 1)]
        return [work_root() / "logs" / name for name in names]

    def _service(self) -> Service:
        params, identity = self.params, self.identity
        return Service(
            model_names=tuple(dict.fromkeys([self.verifier.model, identity.name])),
            params=params,
            limits=Limits(
                vocab_size=identity.vocab_size,
                max_tokens=self.verifier.max_model_len - 1,
                min_room_tokens=params.min_room_tokens,
                stop_token_ids=frozenset(identity.stop_token_ids),
                require_ids=params.require_ids,
            ),
            markers=identity.markers,
            log_hint="see the servers' logs" if params.endpoints else f"log: {', '.join(map(str, self._logs()))}",
            budget_hint=budget_remedy(identity.markers, local=not params.endpoints),
        )

    async def _ask(self, urls: list[str], alive: Callable[[], ValueError | None], total: int, missing: int) -> None:
        async with Client(urls, self._service()) as client:
            await client.preflight()
            check = self._parser_check()
            began = time.monotonic()
            with Progress("generate", total, "answers", done=total - missing) as progress:

                def keep(outcome: Outcome) -> None:
                    self._keep(outcome)
                    warning = check.look(outcome.result) if check and isinstance(outcome.result, Answer) else None
                    if warning:
                        say(warning)
                    rate = client.tally.output_tokens / max(time.monotonic() - began, 1e-9)
                    progress.advance(1, f"{rate:,.0f} tokens/s")

                def pulse() -> ValueError | None:
                    self.store.flush()  # a power cut costs half a second of answers, a kill none
                    return alive()

                try:
                    await client.answer_all(self.missing(), keep, pulse, missing)
                finally:
                    self.seconds = time.monotonic() - began
                    self.counts["requests_sent"] = client.tally.requests_sent
                    self.output_tokens = client.tally.output_tokens

    def _keep(self, outcome: Outcome) -> None:
        question, result = outcome.question, outcome.result
        key = self.key(question)
        if isinstance(result, Answer):
            self.store.put(key, pack_answer(result, outcome.sampling, outcome.latency_s, outcome.attempts))
            return
        self.failures += 1
        lasting = result.reason == TOO_LONG
        name = refusal_key(key, self.params.min_room_tokens) if lasting else failure_key(key)
        self.store.put(name, pack_refusal(result))
        if self.failures <= FAILURES_SHOWN:
            say(f"generate: no answer for {visible(question.row_id)}: {result.reason}: {visible(result.detail)}")

    def rows(self, account: Account) -> Iterator[Row]:
        """Rows of schemas.RESPONSES for the prompts of today; the others go to the account."""
        for prompt in read_prompts(self.folder):
            if takes_reference(prompt, self.params):
                account.rows_in += 1
                account.rows_out += 1
                self.counts["references"] += 1
                yield reference_row(prompt, self.params, self.identity)
                continue
            for sample in range(self.params.samples_per_prompt):
                account.rows_in += 1
                row = self._row(prompt, sample, account)
                if row is not None:
                    account.rows_out += 1
                    self._measure(row)
                    yield row

    def _row(self, prompt: Row, sample: int, account: Account) -> Row | None:
        """The stored answer to one question; None, and an entry in the account, where there is none."""
        question = make_question(prompt, self.params, sample)
        key = self.key(question)
        unit = self.store.get(key)
        if unit is None:
            refusal = self._stored_refusal(key) or self._failure(key)
            account.reject(question.row_id, refusal.reason, refusal.detail)
            return None
        return response_row(prompt, sample, unit, self.params.chat_template_kwargs, self.identity.digest, self.engine)

    def _failure(self, key: str) -> Refusal:
        unit = self.store.get(failure_key(key))
        gone = Refusal("no answer", "its unit in the work store is damaged; run again")
        return gone if unit is None else unpack_refusal(unit)

    def _measure(self, row: Row) -> None:
        text = Answer(None, row["output_token_ids"], 0, 0, row["reasoning"], row["content"], "", None)
        self.latencies.add(row["latency_s"])
        self.counts.update(
            {
                f"finish_{row['finish_reason']}": 1,
                "prompt_tokens": row["prompt_tokens"],
                "completion_tokens": row["completion_tokens"],
                "with_reasoning": int(text.thinks(self.identity.markers)),
                "retried": int(row["attempts"] > 1),
            }
        )

    def metrics(self) -> dict[str, Any]:
        """Sums over the rows, and what this run had to do for them."""
        names = ["finish_stop", "finish_length", "prompt_tokens", "completion_tokens", "with_reasoning", "retried"]
        names += ["references"] if self.params.reference_share else []
        found: dict[str, Any] = {name: self.counts[name] for name in [*names, "requests_sent", "reused"]}
        found["tokens_per_second"] = round(self.output_tokens / self.seconds, 2) if self.seconds else 0.0
        for percent in (50, 90, 99):
            found[f"latency_s_p{percent}"] = round(self.latencies.quantile(percent / 100), 3)
        return found
