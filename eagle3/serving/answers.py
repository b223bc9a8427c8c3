"""One request and its answer: the sampling fields, the key in the work store, the checks, the stored unit.

Ids are the truth; reasoning and content are kept as the server parsed them. Nothing here speaks HTTP.
"""

import json
from dataclasses import dataclass
from typing import Any

from eagle3.digests import canonical_json, derived_seed, digest
from eagle3.params import GenerateParams
from eagle3.reasoning import Markers
from eagle3.schemas import SCHEMA_VERSION, sample_name
from eagle3.tables import Row

FINISH_REASONS = ("stop", "length")


@dataclass(frozen=True)
class Limits:
    """What bounds every row of a run."""

    vocab_size: int
    max_tokens: int  # of prompt and answer together; no stored row is longer
    min_room_tokens: int  # a prompt that leaves less for the answer is rejected
    stop_token_ids: frozenset[int]
    require_ids: bool  # an answer without token ids is none


@dataclass(frozen=True)
class Question:
    """What is asked for one answer."""

    row_id: str  # the prompt's id, numbered where a prompt has several answers
    messages: list[dict[str, str]]
    sampling: dict[str, Any]  # with max_tokens as wanted; the client shrinks it to the room left

    @property
    def most_tokens(self) -> int:
        """Upper bound of the tokens of the messages without the template: one per byte, and some for each turn."""
        return sum(len(message["content"].encode()) + 16 for message in self.messages)


@dataclass(frozen=True)
class Answer:
    """What came back, checked. Both lists of ids are null where the server tells none and none are required."""

    prompt_token_ids: list[int] | None
    output_token_ids: list[int] | None
    prompt_tokens: int  # as the server counted them
    completion_tokens: int
    reasoning: str | None
    content: str | None
    finish_reason: str
    stop_reason: str | None

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def thinks(self, markers: Markers) -> bool:
        """Whether the server told any reasoning, or the output holds a think marker."""
        found = [marker for marker in (markers.start, markers.end) if marker is not None]
        single = {marker.ids[0] for marker in found if len(marker.ids) == 1}
        text = self.content or ""
        return (
            bool(self.reasoning)
            or not single.isdisjoint(self.output_token_ids or ())
            or any(marker.text in text for marker in found)
        )


@dataclass(frozen=True)
class Refusal:
    """Why there is no answer. `lasting`: asking the same again would end the same way."""

    reason: str
    detail: str
    lasting: bool = False
    pause_s: float = 0.0  # the server asked to be left alone for so long


class BadAnswerError(Exception):
    """A response that must not be stored. `again`: another try may be better."""

    def __init__(self, reason: str, detail: str = "", again: bool = True):
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail, self.again = reason, detail, again


def sampling_fields(params: GenerateParams, prompt_id: str, sample: int = 0) -> dict[str, Any]:
    """Every sampling field of a request, none left to the server's defaults.

    The seed, and what is drawn from lists, depend on the prompt, the number of the sample and generate.seed alone.
    """
    names = (prompt_id, sample) if sample else (prompt_id,)

    def drawn(key: str) -> Any:
        value = getattr(params, key)
        return value[derived_seed(params.seed, *names, key) % len(value)] if isinstance(value, list) else value

    budget = drawn("thinking_token_budget")
    return {
        "max_tokens": drawn("max_new_tokens"),
        "min_tokens": 0,
        "temperature": drawn("temperature"),
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "seed": derived_seed(params.seed, *names),
        "n": 1,
        "stop": [],
        "ignore_eos": False,
        "skip_special_tokens": False,  # the text then shows what the ids say
        **({} if budget is None else {"thinking_token_budget": budget}),
    }


def make_question(prompt: Row, params: GenerateParams, sample: int = 0) -> Question:
    """The request for the answer number `sample` to a row of schemas.PROMPTS."""
    messages = [{"role": message["role"], "content": message["content"]} for message in prompt["messages"]]
    name = prompt["prompt_id"]
    return Question(sample_name(name, sample), messages, sampling_fields(params, name, sample))


def unit_key(question: Question, params: GenerateParams, verifier_digest: str, engine: str, max_model_len: int) -> str:
    """Key of the answer in the work store: everything that determines it."""
    asked = [question.messages, params.chat_template_kwargs, question.sampling, max_model_len]
    without_ids = [] if params.require_ids else ["ids may be missing"]
    return digest([SCHEMA_VERSION, "generate", verifier_digest, engine, *asked, *without_ids])


def refusal_key(key: str, min_room_tokens: int) -> str:
    """Key of a lasting refusal in the work store."""
    return digest([key, "refused", min_room_tokens])


def failure_key(key: str) -> str:
    """Key of what a run has to say about an answer that it did not get; no later run reads it."""
    return digest([key, "failed"])


def read_answer(body: Any, limits: Limits) -> Answer:
    """Check the JSON of a chat completion. Raises BadAnswerError for one that must not become a row."""
    if not isinstance(body, dict) or not isinstance(body.get("choices"), list):
        raise BadAnswerError("malformed response", "no list of choices")
    if len(body["choices"]) != 1 or not isinstance(body["choices"][0], dict):
        raise BadAnswerError("malformed response", f"{len(body['choices'])} choices instead of one")
    choice = body["choices"][0]
    usage, message = body.get("usage"), choice.get("message")
    if not isinstance(usage, dict) or not isinstance(message, dict):
        raise BadAnswerError("malformed response", "no usage or no message")
    counts = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    given = body.get("prompt_token_ids"), choice.get("token_ids")
    prompt_ids = output_ids = None
    if limits.require_ids or given != (None, None):
        prompt_ids = _ids(given[0], "prompt_token_ids", counts[0], limits)
        output_ids = _ids(given[1], "token_ids", counts[1], limits)
    if not all(counts):
        raise BadAnswerError("empty answer", "the server counted no tokens")
    finish = choice.get("finish_reason")
    if finish not in FINISH_REASONS:
        raise BadAnswerError("unusual finish reason", repr(finish)[:80])
    stop = choice.get("stop_reason")
    reasoning = _clean(message.get("reasoning")) or _clean(message.get("reasoning_content"))
    content = _clean(message.get("content"))
    if limits.stop_token_ids.issuperset(output_ids) if output_ids else not (reasoning or content):
        raise BadAnswerError("empty answer", "nothing but a stop token", again=False)
    return Answer(
        prompt_token_ids=prompt_ids,
        output_token_ids=output_ids,
        prompt_tokens=counts[0],
        completion_tokens=counts[1],
        reasoning=reasoning,
        content=content,
        finish_reason=finish,
        stop_reason=None if stop is None else _clean(str(stop)),
    )


def _count(usage: dict[str, Any], name: str) -> int:
    count = usage.get(name)
    if type(count) is not int or count < 0:
        raise BadAnswerError("malformed response", f"usage: {name} is {str(count)[:40]}")
    return count


def _ids(value: Any, name: str, counted: int, limits: Limits) -> list[int]:
    if not isinstance(value, list):
        raise BadAnswerError("ids missing", f"{name} is {type(value).__name__}")
    if len(value) != counted:
        raise BadAnswerError("ids disagree with usage", f"{len(value)} {name}, usage counts {counted}")
    for token in value:
        if type(token) is not int or not 0 <= token < limits.vocab_size:
            raise BadAnswerError("ids out of range", f"{name} holds {str(token)[:40]}; vocabulary {limits.vocab_size}")
    return value


def _clean(text: Any) -> str | None:
    """Text as Parquet can hold it: a lone surrogate becomes a question mark. Other types count as absent."""
    return text.encode("utf-8", "replace").decode() if isinstance(text, str) else None


def pack_answer(answer: Answer, sampling: dict[str, Any], latency_s: float, attempts: int) -> bytes:
    """The unit of the work store: what a row of schemas.RESPONSES holds beyond its prompt and its run."""
    unit = {
        "prompt_token_ids": answer.prompt_token_ids,
        "output_token_ids": answer.output_token_ids,
        "reasoning": answer.reasoning,
        "content": answer.content,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "latency_s": latency_s,
        "attempts": attempts,
        "sampling": canonical_json(sampling),
    }
    return canonical_json(unit).encode()


def pack_reference(text: str) -> bytes:
    """The same for a human answer: text alone, no ids, no counts, and nobody was asked."""
    unit = {
        "prompt_token_ids": None,
        "output_token_ids": None,
        "reasoning": None,
        "content": text,
        "finish_reason": "stop",
        "stop_reason": None,
        "prompt_tokens": None,
        "completion_tokens": None,
        "latency_s": 0.0,
        "attempts": 0,
        "sampling": canonical_json({}),
    }
    return canonical_json(unit).encode()


def pack_refusal(refusal: Refusal) -> bytes:
    """The unit of a lasting refusal."""
    return canonical_json([refusal.reason, refusal.detail]).encode()


def unpack_refusal(unit: bytes) -> Refusal:
    """Back from pack_refusal."""
    reason, detail = json.loads(unit)
    return Refusal(reason, detail, lasting=True)


def response_row(
    prompt: Row, sample: int, unit: bytes, kwargs: dict[str, Any], verifier_digest: str, engine: str
) -> Row:
    """A row of schemas.RESPONSES. kwargs: of the chat template."""
    kept = {name: prompt[name] for name in ("prompt_id", "source", "category", "split", "messages", "reference")}
    answered: Row = json.loads(unit)
    own = {"chat_template_kwargs": canonical_json(kwargs), "verifier_digest": verifier_digest, "engine": engine}
    return kept | {"sample": sample} | answered | own
