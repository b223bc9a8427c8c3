"""Answers token by token, as the page's viewer reads them: who wrote each token, and what the draft had proposed."""

import codecs
from collections.abc import Iterable, Mapping
from typing import Any

from eagle3.acceptance import Answer
from eagle3.breakdown import segments
from eagle3.reasoning import ThinkingFinder

MOST_TOKENS = 4000  # of one answer; the rest is counted, not shown


def viewer_answers(
    answers: Iterable[Answer], pieces: Mapping[int, bytes], finder: ThinkingFinder, most: int
) -> list[dict[str, Any]]:
    """The first `most` answers of the draft arm, each as one object for JSON.

    texts: of the tokens; by: who wrote each, 0 = the verifier, k = the draft at position k; rejected: by place in the
    answer (as text), what the draft had proposed from there on; parts: [name, start, end].
    """
    found: list[dict[str, Any]] = []
    for answer in answers:
        if answer.arm == "draft" and len(found) < most:
            found.append(_viewed(answer, pieces, finder))
    return found


def _viewed(answer: Answer, pieces: Mapping[int, bytes], finder: ThinkingFinder) -> dict[str, Any]:
    ids = answer.output_ids
    by = [0] * len(ids)
    rejected: dict[str, list[str]] = {}
    for step in answer.steps:
        for number in range(min(step.accepted, len(ids) - step.position)):
            by[step.position + number] = number + 1
        refused = step.drafted[step.accepted :]
        place = step.position + step.accepted
        if refused and place < len(ids):
            rejected[str(place)] = spell(refused, pieces)
    return {
        "id": answer.prompt.prompt_id,
        "category": answer.prompt.category,
        "prompt": "".join(spell(answer.prompt.ids, pieces)),
        "tokens": len(ids),
        "length": answer.emitted / len(answer.steps) if answer.steps else 1.0,
        "ended": answer.finish_reason,
        "texts": spell(ids[:MOST_TOKENS], pieces),
        "by": by[:MOST_TOKENS],
        "rejected": {place: texts for place, texts in rejected.items() if int(place) < MOST_TOKENS},
        "parts": [list(part) for part in segments(answer, finder)],
    }


def spell(ids: Iterable[int], pieces: Mapping[int, bytes]) -> list[str]:
    """The text of each token; a character that several tokens share stands at the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [decoder.decode(pieces[token]) for token in ids]
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return texts
