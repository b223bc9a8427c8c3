"""A response to its exact token ids, loss mask and spans. Ids are the truth; text is never tokenised again here.

    ids   | prompt ............ | thinking ........... | answer ........ stop |
    place 0        prompt_length = thinking_start   thinking_end = answer_start   length
    mask  | false               | true                                        |

Thinking is open from the first generated token when the prompt ends in the opening marker or the output starts with it.
It ends behind the first closing marker, or not at all.
"""

import json
from collections.abc import Sequence
from typing import Any

from eagle3.digests import digest_tokens
from eagle3.verifier import VerifierIdentity

Row = dict[str, Any]


class Unusable(ValueError):
    """A response that gives no sample: `reason` is a short fixed phrase, `detail` what was found."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


def reconstruct(response: Row, verifier: VerifierIdentity, max_length: int) -> Row:
    """One row of schemas.RESPONSES to one row of schemas.TOKENS.

    Raises Unusable when the ids contradict the server's counts, leave the vocabulary, or come from another verifier.
    """
    prompt, output = response["prompt_token_ids"], response["output_token_ids"]
    _check(response, prompt, output, verifier, max_length)
    input_ids = prompt + output
    loss_mask = [False] * len(prompt) + [True] * len(output)
    thinking_end = len(prompt) + thinking_length(prompt, output, verifier.think_start_ids, verifier.think_end_ids)
    truncated = response["finish_reason"] == "length"
    in_thinking = thinking_end == len(input_ids) and not ends_with(output, verifier.think_end_ids)
    return {
        "sample_id": response["prompt_id"],
        "sample_digest": digest_tokens(input_ids, loss_mask),
        "source": response["source"],
        "category": response["category"],
        "split": response["split"],
        "input_ids": input_ids,
        "loss_mask": loss_mask,
        "prompt_length": len(prompt),
        "thinking_start": len(prompt),
        "thinking_end": thinking_end,
        "answer_start": thinking_end,
        "length": len(input_ids),
        "truncated_in": None if not truncated else "thinking" if in_thinking else "answer",
        "greedy": is_greedy(json.loads(response["sampling"])),
        "rebuilt": False,
    }


def thinking_length(prompt: Sequence[int], output: Sequence[int], start: Sequence[int], end: Sequence[int]) -> int:
    """Number of generated tokens that are thinking, markers included; 0 when none was opened."""
    if not start or not (ends_with(prompt, start) or starts_with(output, start)):
        return 0
    place = find(output, end)
    return len(output) if place is None else place + len(end)


def is_greedy(sampling: Row) -> bool:
    """Whether these sampling fields make the engine emit its first choice at every step."""
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    return sampling["temperature"] == 0 and all(sampling[name] == value for name, value in neutral.items())


def find(ids: Sequence[int], part: Sequence[int]) -> int | None:
    """First place of `part` in `ids`, or None. An empty part is nowhere."""
    if not part:
        return None
    return next((i for i in range(len(ids) - len(part) + 1) if list(ids[i : i + len(part)]) == list(part)), None)


def starts_with(ids: Sequence[int], part: Sequence[int]) -> bool:
    return bool(part) and list(ids[: len(part)]) == list(part)


def ends_with(ids: Sequence[int], part: Sequence[int]) -> bool:
    return bool(part) and list(ids[-len(part) :]) == list(part)


def _check(
    response: Row,
    prompt: Sequence[int | None],
    output: Sequence[int | None],
    verifier: VerifierIdentity,
    max_length: int,
) -> None:
    if response["verifier_digest"] != verifier.digest:
        raise Unusable("answered by another verifier", f"digest {response['verifier_digest'][:12]}")
    for ids, name, counted in (
        (prompt, "prompt", response["prompt_tokens"]),
        (output, "output", response["completion_tokens"]),
    ):
        if len(ids) != counted:
            raise Unusable("ids disagree with usage", f"{len(ids)} {name} ids, usage says {counted}")
        outside = [i for i in ids if i is None or not 0 <= i < verifier.vocab_size]
        if outside:
            raise Unusable("id outside the vocabulary", f"{name} id {outside[0]}, vocabulary {verifier.vocab_size}")
    if not prompt:
        raise Unusable("no prompt ids", "the server returned none")
    if len(prompt) + len(output) > max_length:
        raise Unusable("longer than verifier.max_model_len", f"{len(prompt) + len(output)} tokens, limit {max_length}")
