"""A response to its exact token ids, loss mask and spans. Ids are the truth; where a row has none, rebuild.py has made
them from its text before, and the row is marked.

    ids   | prompt ............ | thinking ........... | answer ........ stop |
    place 0        prompt_length = thinking_start   thinking_end = answer_start   length
    mask  | false               | true                                        |

Where the thinking is, reasoning.py finds out.
"""

import json
from typing import Any

import numpy as np

from eagle3.digests import digest_tokens
from eagle3.reasoning import Ids, ThinkingFinder
from eagle3.schemas import sample_name
from eagle3.verifier import VerifierIdentity

Row = dict[str, Any]


class Unusable(ValueError):
    """A response that gives no sample: `reason` is a short fixed phrase, `detail` what was found."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


def reconstruct(
    response: Row, verifier: VerifierIdentity, finder: ThinkingFinder, max_length: int, *, rebuilt: bool = False
) -> Row:
    """One row of schemas.RESPONSES, ids as arrays, to one row of schemas.TOKENS.

    rebuilt: the ids come from the row's text. Such a row need not have the server's counts, and is never greedy: text
    does not tell whether its tokens are the ones that the verifier chose.
    Raises Unusable when the ids contradict the server's counts, leave the vocabulary, or come from another verifier.
    """
    if response["verifier_digest"] != verifier.digest:
        raise Unusable("answered by another verifier", f"digest {response['verifier_digest'][:12]}")
    prompt, output = _checked(response, "prompt", verifier, rebuilt), _checked(response, "output", verifier, rebuilt)
    if not len(prompt):
        raise Unusable("no prompt ids", "the server returned none")
    length = len(prompt) + len(output)
    if length > max_length:
        raise Unusable("longer than verifier.max_model_len", f"{length} tokens, limit {max_length}")
    truncated = response["finish_reason"] == "length"
    thinking = finder.find(prompt, output, truncated)
    input_ids, loss_mask = np.concatenate([prompt, output]), np.arange(length) >= len(prompt)
    return {
        "sample_id": sample_name(response["prompt_id"], response["sample"]),
        "sample_digest": digest_tokens(input_ids, loss_mask),
        "source": response["source"],
        "category": response["category"],
        "split": response["split"],
        "input_ids": input_ids,
        "loss_mask": loss_mask,
        "prompt_length": len(prompt),
        "thinking_start": thinking.start,
        "thinking_end": thinking.end,
        "thinking_opened_by": thinking.opened_by,
        "thinking_ended_by": thinking.ended_by,
        "answer_start": thinking.end,
        "length": length,
        "truncated_in": None if not truncated else "thinking" if thinking.ended_by == "budget" else "answer",
        "greedy": not rebuilt and is_greedy(json.loads(response["sampling"])),
        "rebuilt": rebuilt,
        "stray_markers": thinking.stray,
    }


def is_greedy(sampling: Row) -> bool:
    """Whether these sampling fields make the engine emit its first choice at every step; where one is missing, no."""
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    return all(sampling.get(name) == value for name, value in {"temperature": 0, **neutral}.items())


COUNTED = {"prompt": "prompt_tokens", "output": "completion_tokens"}


def _checked(response: Row, name: str, verifier: VerifierIdentity, rebuilt: bool) -> Ids:
    """The ids as they are. Raises Unusable for a wrong number of them or one that is none."""
    ids, counted = response[f"{name}_token_ids"], response[COUNTED[name]]
    if ids is None:
        raise Unusable("no ids", f"the server returned no {name} ids")
    if isinstance(ids, list):  # as the tables give a list with a null in it
        absent = next((place for place, value in enumerate(ids) if value is None), None)
        if absent is not None:
            raise Unusable("id outside the vocabulary", f"{name} id {absent} is null")
    checked: Ids = np.asarray(ids, dtype=np.int32)
    if len(checked) != counted and not (rebuilt and counted is None):
        reason = "rebuilt ids disagree with usage" if rebuilt else "ids disagree with usage"
        raise Unusable(reason, f"{len(checked)} {name} ids, usage says {counted}")
    outside = checked[(checked < 0) | (checked >= verifier.vocab_size)]
    if len(outside):
        raise Unusable("id outside the vocabulary", f"{name} id {outside[0]}, vocabulary {verifier.vocab_size}")
    return checked
