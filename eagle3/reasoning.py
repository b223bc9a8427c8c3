"""How a verifier marks its thinking, and where in the ids the thinking is.

    prompt <think> | thinking </think> | answer stop    opened by the prompt (Kimi-K2.5, QwQ, DeepSeek-R1)
    prompt | <think> thinking </think> | answer stop    opened by the model (Kimi-K2-Thinking, Qwen3)
    prompt <think> | thinking | tool calls stop         ended by a tool-call section, without a closing marker
    prompt <think> | thinking stop                      ended by the end of the turn
    prompt <think> | thinking                           cut by the token budget

Markers are known by their text. One that is a single token is found by its id. One that the tokenizer splits into
ordinary tokens is found in the bytes of the single tokens, whatever way they were split this time. What a user typed
never opens thinking: an opening marker counts at the very end of the prompt or the very start of the output only.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle3.params import ReasoningParams

Ids = npt.NDArray[np.int32]

THINK = "<think>", "</think>"
TOOL_CALLS = "<|tool_calls_section_begin|>"
DEEPSEEK_TOOL_CALLS = "<\uff5ctool\u2581calls\u2581begin\uff5c>"


@dataclass(frozen=True)
class Texts:
    """A way of marking, as text. parser: the name that vLLM's --reasoning-parser has for it."""

    start: str
    end: str
    also_ended_by: tuple[str, ...]
    parser: str | None


PRESETS = {
    "kimi-k2.5": Texts(*THINK, (TOOL_CALLS,), "kimi_k2"),
    "kimi-k2-thinking": Texts(*THINK, (TOOL_CALLS,), "kimi_k2"),
    "deepseek-r1": Texts(*THINK, (DEEPSEEK_TOOL_CALLS,), "deepseek_r1"),
    "qwen3": Texts(*THINK, ("<tool_call>",), "qwen3"),
}
AUTO = Texts(*THINK, (TOOL_CALLS, DEEPSEEK_TOOL_CALLS, "<tool_call>"), None)


@dataclass(frozen=True)
class Marker:
    """One marker. ids: its text encoded alone; one id = a token of its own."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Markers:
    """The markers of one verifier. start and end are both there or both null (it does not think)."""

    start: Marker | None
    end: Marker | None
    also_ended_by: tuple[Marker, ...]


NO_MARKERS = Markers(None, None, ())


@dataclass(frozen=True)
class Thinking:
    """Where the thinking is: places in prompt + output, markers included, [start, end); equal = there is none."""

    start: int
    end: int
    opened_by: str | None  # prompt | model
    ended_by: str | None  # marker | tool_call | end_of_turn | budget
    stray: int  # opening or closing markers in the output that neither opened nor closed it


def find_markers(params: ReasoningParams, tokenizer: Any) -> Markers:
    """The ids of the markers that params.yaml names. Raises ValueError when a preset does not fit the tokenizer."""
    texts = _texts(params)
    if texts is None:
        return NO_MARKERS
    vocabulary = tokenizer.get_vocab()
    if params.format != "custom":
        absent = [text for text in (texts.start, texts.end) if text not in vocabulary]
        if absent and params.format == "auto":
            template = str(tokenizer.chat_template or "")
            if texts.start not in template or texts.end not in template:
                return NO_MARKERS  # else they are ordinary tokens that the template teaches
        elif absent:
            raise ValueError(
                f"reasoning.format is {params.format}, but the verifier's tokenizer has no token "
                f"{' or '.join(absent)}; use another format, or custom with reasoning.start and reasoning.end"
            )
    if params.format == "custom":
        also = texts.also_ended_by
    else:
        also = tuple(text for text in texts.also_ended_by if text in vocabulary)
    return Markers(
        _marker(texts.start, tokenizer), _marker(texts.end, tokenizer), tuple(_marker(text, tokenizer) for text in also)
    )


def parser_name(params: ReasoningParams) -> str | None:
    """vLLM's name for the parser of this format, if there is one."""
    preset = PRESETS.get(params.format)
    return None if preset is None else preset.parser


def _texts(params: ReasoningParams) -> Texts | None:
    given = [
        name
        for name, value in (("start", params.start), ("end", params.end), ("also_ended_by", params.also_ended_by))
        if value
    ]
    if params.format != "custom":
        if given:
            raise ValueError(f"reasoning.{given[0]} is set, but reasoning.format is {params.format}; make it custom")
        return AUTO if params.format == "auto" else PRESETS.get(params.format)
    if not params.start or not params.end:
        raise ValueError("reasoning.format is custom: reasoning.start and reasoning.end are needed, as text")
    return Texts(params.start, params.end, tuple(params.also_ended_by), None)


def _marker(text: str, tokenizer: Any) -> Marker:
    token = tokenizer.get_vocab().get(text)
    return Marker(text, (token,) if token is not None else tuple(tokenizer.encode(text, add_special_tokens=False)))


class ThinkingFinder:
    """Finds the thinking in rows of ids.

    pieces: the bytes of single ids, such as `Pieces`; read only where a marker of several tokens is looked for, and for
    what stands between a marker and the edge of the prompt or output.
    """

    def __init__(self, markers: Markers, pieces: Mapping[int, bytes]):
        self.markers, self.pieces = markers, pieces

    def find(self, prompt: Ids, output: Ids, truncated: bool) -> Thinking:
        """The thinking of one row. truncated: the token budget ended the output."""
        start, end = self.markers.start, self.markers.end
        if start is None or end is None:
            return Thinking(len(prompt), len(prompt), None, None, 0)
        written = Spelled(output, self.pieces)
        starts, ends = written.places(start), written.places(end)
        begin = len(prompt)
        if self.opened_in(prompt):
            opened_by, at = "prompt", 0
        elif starts and self._blank(output[: starts[0][0]]):
            opened_by, at = "model", starts[0][1]
            starts = starts[1:]
        else:
            return Thinking(begin, begin, None, None, len(starts) + len(ends))
        closing = next((place for place in ends if place[0] >= at), None)
        other = min((place[0] for marker in self.markers.also_ended_by for place in written.places(marker)
                     if place[0] >= at), default=None)  # fmt: skip
        if other is not None and (closing is None or other < closing[0]):
            return Thinking(begin, begin + other, opened_by, "tool_call", len(starts) + len(ends))
        if closing is not None:
            return Thinking(begin, begin + closing[1], opened_by, "marker", len(starts) + len(ends) - 1)
        return Thinking(
            begin, begin + len(output), opened_by, "budget" if truncated else "end_of_turn", len(starts) + len(ends)
        )

    def opened_in(self, prompt: Ids) -> bool:
        """Whether the prompt ends in the opening marker and blanks."""
        return self.markers.start is not None and self._ends_in(prompt, self.markers.start)

    def closed_in(self, prompt: Ids) -> bool:
        """Whether the prompt ends in the closing marker and blanks: thinking is switched off."""
        return self.markers.end is not None and self._ends_in(prompt, self.markers.end)

    def _ends_in(self, prompt: Ids, marker: Marker) -> bool:
        tail = prompt[-(len(marker.text) + TAIL) :]
        places = Spelled(tail, self.pieces).places(marker)
        return bool(places) and self._blank(tail[places[-1][1] :])

    def _blank(self, ids: Ids) -> bool:
        return len(ids) <= TAIL and not Spelled(ids, self.pieces).text.decode(errors="replace").strip()


class Spelled:
    """A row of ids and, once a marker of several tokens is looked for, its text in UTF-8."""

    def __init__(self, ids: Ids, pieces: Mapping[int, bytes]):
        self.ids, self._pieces = ids, pieces

    def places(self, marker: Marker) -> list[tuple[int, int]]:
        """Where the marker stands: [first, one behind the last) of the tokens that hold it."""
        if len(marker.ids) == 1:
            return [(place, place + 1) for place in np.flatnonzero(self.ids == marker.ids[0]).tolist()]
        wanted = marker.text.encode()
        places, found = [], self.text.find(wanted)
        while found >= 0:
            behind = found + len(wanted)
            first, last = np.searchsorted(self._edges, [found, behind - 1], side="right")
            places.append((int(first), int(last) + 1))
            found = self.text.find(wanted, behind)
        return places

    @cached_property
    def text(self) -> bytes:
        return b"".join(self._parts)

    @cached_property
    def _parts(self) -> list[bytes]:
        return list(map(self._pieces.__getitem__, self.ids.tolist()))

    @cached_property
    def _edges(self) -> npt.NDArray[np.int64]:
        """Where each token's bytes end."""
        return np.cumsum(np.fromiter(map(len, self._parts), np.int64, len(self._parts)))


TAIL = 8  # blanks that may stand between an opening marker and the edge, in tokens

#: The letters that byte-level vocabularies write bytes with: printable Latin-1 as it is, the others from U+0100 on.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTE_LETTERS = {chr(byte): byte for byte in PRINTABLE} | {
    chr(0x100 + place): byte for place, byte in enumerate(sorted(set(range(256)).difference(PRINTABLE)))
}
BLANK = "\u2581"  # how SentencePiece writes a blank
BYTE_NAME = re.compile(r"<0x([0-9A-F]{2})>")  # how SentencePiece writes a byte


class Pieces(dict[int, bytes]):
    """The bytes of single ids, also of those that are a part of a character only. Filled as it is read."""

    def __init__(self, tokenizer: Any):
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> bytes:
        self[token] = piece = self._spell(token)
        return piece

    def _spell(self, token: int) -> bytes:
        text = str(self._tokenizer.decode([token], skip_special_tokens=False))
        name = str(self._tokenizer.convert_ids_to_tokens(token))
        bare = name.lstrip(BLANK)
        if len(bare) < len(name):  # decoded alone, a piece loses the blank that a whole text begins with
            text = " " * (len(name) - len(bare)) + text.lstrip(" ")
        if "\ufffd" not in text:
            return text.encode()
        byte = BYTE_NAME.fullmatch(name)
        if byte:
            return bytes.fromhex(byte[1])
        return bytes(BYTE_LETTERS[c] for c in name) if BYTE_LETTERS.keys() >= set(name) else text.encode()
