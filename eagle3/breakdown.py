"""Where a draft wins and loses: acceptance by what a step or a token belongs to, with counts and intervals.

A *step* is one verifier forward that judged a draft; its number is the acceptance length, tokens emitted per forward.
A *judged token* is a drafted one that the verifier reached, because it had accepted all before it in the same draft;
its number is the acceptance rate, accepted / judged, counted under what the verifier itself wrote there.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from eagle3.acceptance import Answer, Row
from eagle3.intervals import ratio_interval
from eagle3.reasoning import ThinkingFinder

STEP, TOKEN = "step", "token"
#: Lower edges of the buckets of positions in the output and of prompt lengths, in tokens.
EDGES = 0, 32, 128, 512, 2048, 8192, 32768
FENCE = re.compile(r"^\s*```", re.MULTILINE)


@dataclass
class Sums:
    """Of one group, by prompt: what was gained (tokens emitted or accepted) in how many (steps or judged tokens)."""

    gained: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    counted: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, prompt: str, gained: int) -> None:
        """Count one step or token."""
        self.gained[prompt] += gained
        self.counted[prompt] += 1

    def row(self) -> Row:
        """value = gained / counted, with its interval where there are prompts enough for one."""
        names = list(self.counted)
        gained = np.array([self.gained[name] for name in names], float)
        counted = np.array([self.counted[name] for name in names], float)
        interval = ratio_interval(gained, counted)
        return {
            "value": float(gained.sum() / counted.sum()),
            "low": None if interval is None else interval.low,
            "high": None if interval is None else interval.high,
            "counted": int(counted.sum()),
            "prompts": len(names),
        }


class Words:
    """Classes of tokens by their text. pieces: the bytes of single ids; special: ids that stand for no text."""

    def __init__(self, pieces: Mapping[int, bytes], special: frozenset[int]):
        self._pieces, self._special = pieces, special

    def classes(self, ids: Sequence[int]) -> list[str]:
        """special | code (inside a fenced block) | number | punctuation | space | word start | word part | other."""
        found, line, fenced = [], "", False
        for place, token in enumerate(ids):
            text = self._pieces[token].decode(errors="replace")
            opens = _fences(line + text) - _fences(line)
            found.append("special" if token in self._special else "code" if fenced else _class(text, place == 0))
            fenced ^= bool(opens % 2)
            line = (line + text).rpartition("\n")[2] if "\n" in text else line + text
        return found


def _fences(text: str) -> int:
    return len(FENCE.findall(text))


def _class(text: str, first: bool) -> str:
    bare = text.strip()
    if not bare:
        return "space"
    if any(letter.isdigit() for letter in bare):
        return "number"
    if bare[0].isalpha():
        return "word start" if first or text[0].isspace() or bare[0].isupper() else "word part"
    return "punctuation" if bare.isascii() else "other"


def bucket(value: int) -> str:
    """The bucket of EDGES that holds a number of tokens, such as 32-127."""
    place = max(i for i, edge in enumerate(EDGES) if edge <= value)
    return f"{EDGES[place]}+" if place + 1 == len(EDGES) else f"{EDGES[place]}-{EDGES[place + 1] - 1}"


def segments(answer: Answer, finder: ThinkingFinder) -> list[tuple[str, int, int]]:
    """The parts of an output as (name, start, end), in order: thinking, answer, tool call."""
    prompt, output = (np.asarray(ids, np.int32) for ids in (answer.prompt.ids, answer.output_ids))
    thinking = finder.find(prompt, output, answer.finish_reason == "length")
    start, end = thinking.start - len(prompt), thinking.end - len(prompt)
    last = "tool call" if thinking.ended_by == "tool_call" else "answer"
    named = [("answer", 0, start), ("thinking", start, end), (last, end, len(output))]
    return [part for part in named if part[2] > part[1]]


@dataclass
class Breakdown:
    """Groups of steps and of judged tokens, filled answer by answer. Memory: a number per group and prompt.

    in_vocabulary: whether the draft can propose a token of the verifier, by id.
    """

    finder: ThinkingFinder
    words: Words
    in_vocabulary: Sequence[bool]
    _groups: dict[tuple[str, str, str], Sums] = field(default_factory=lambda: defaultdict(Sums))

    def add(self, answer: Answer) -> None:
        """Count the steps of one answer that was decoded with the draft."""
        name, ids = answer.prompt.prompt_id, answer.output_ids
        segment = [name for name, start, end in segments(answer, self.finder) for _ in range(start, end)]
        classes = self.words.classes(ids)
        fixed = [
            ("category", answer.prompt.category),
            ("source", answer.prompt.source),
            ("prompt tokens", bucket(len(answer.prompt.ids))),
        ]
        for step in answer.steps:
            place = min(step.position, len(ids) - 1)
            for dimension, group in [*fixed, ("segment", segment[place]), ("output position", bucket(step.position))]:
                self._groups[STEP, dimension, group].add(name, step.emitted)
            for number in range(min(step.accepted + 1, len(step.drafted))):
                at = step.position + number
                if at >= len(ids):
                    break  # the answer ended inside the draft
                known = "in the draft vocabulary" if self.in_vocabulary[ids[at]] else "outside it"
                for dimension, group in (
                    ("token class", classes[at]),
                    ("draft vocabulary", known),
                    ("draft position", str(number + 1)),
                ):
                    self._groups[TOKEN, dimension, group].add(name, int(number < step.accepted))

    def rows(self) -> Iterator[Row]:
        """One row of schemas.BREAKDOWN per group; groups of one dimension stand together, in a sensible order."""
        dimensions = list(dict.fromkeys((kind, dimension) for kind, dimension, _ in self._groups))
        for kind, dimension in dimensions:
            groups = [group for k, d, group in self._groups if (k, d) == (kind, dimension)]
            for group in sorted(groups, key=_order):
                sums = self._groups[kind, dimension, group]
                yield {"counts": kind, "dimension": dimension, "group": group, **sums.row()}


def _order(group: str) -> tuple[int, str]:
    number = re.match(r"\d+", group)
    return (int(number[0]) if number else 0, group)


def nested(rows: Iterable[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """The rows as metrics: dimension -> group -> numbers."""
    found: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for row in rows:
        name = "acceptance_length" if row["counts"] == STEP else "acceptance_rate"
        ends = {} if row["low"] is None else {f"{name}_low": row["low"], f"{name}_high": row["high"]}
        found["by_" + row["dimension"].replace(" ", "_")][row["group"]] = {
            name: row["value"],
            **ends,
            "num_drafts" if row["counts"] == STEP else "num_judged": row["counted"],
            "num_prompts": row["prompts"],
        }
    return dict(found)
