"""The text route: token ids for rows that have none (other servers, imported conversations, human answers).

    prompt ids, as the chat endpoint makes them from the messages and the row's own chat_template_kwargs
    + [think start, unless the prompt ends with it] + enc(reasoning) + [think end]      where there is reasoning
    + enc(content) + [stop id, if the row stopped by itself]

What may differ from the ids that the verifier wrote, and nobody can know from text: how it split its words into
tokens, white space that a parser stripped (text is used as it is, nothing stripped and nothing added), and control
tokens inside an answer (typed text never becomes one, see TextEncoder). Where the server counted its tokens, a row of
another length is rejected; audit.py measures the rest on rows that have both.
"""

import inspect
import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from jinja2 import TemplateError
from tokenizers import Tokenizer

from eagle3.reasoning import Ids, Marker, Markers, ThinkingFinder
from eagle3.tokens import Row, Unusable
from eagle3.verifier import VerifierIdentity, flat_ids, prompt_ids

#: A piece of an output: text to be encoded, or a marker.
Piece = str | Marker

PROBE = "zxqv"  # an answer that no template writes itself
#: What a chat template raises on messages that it does not take, or where there is no template.
REFUSALS = (TemplateError, TypeError, ValueError)


class TextEncoder:
    """Encodes ordinary text, as it stands inside a conversation.

    A control token's name that somebody typed becomes ordinary tokens, never the control token, whether the tokenizer
    calls that one special or merely added it (transformers' split_special_tokens covers only the former). Nothing is
    put in front: no BOS, and no blank as SentencePiece has it before a text. Not covered: a Unigram model that has a
    control token's name among its ordinary pieces.
    """

    def __init__(self, tokenizer: Any):
        self._plain = _without_added_tokens(tokenizer.backend_tokenizer) if tokenizer.is_fast else None
        self._tokenizer = tokenizer
        # Kimi's tokenizer is no fast one and has a switch of its own; given any other argument it ignores that
        has_switch = "allow_special_tokens" in inspect.signature(tokenizer.encode).parameters
        self._slow = (
            {"allow_special_tokens": False}
            if has_switch
            else {"add_special_tokens": False, "split_special_tokens": True}
        )

    def __call__(self, text: str) -> list[int]:
        if not text:
            return []
        if self._plain is not None:
            return list(self._plain.encode(text, add_special_tokens=False).ids)
        return flat_ids(self._tokenizer.encode(text, **self._slow))


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    state = json.loads(tokenizer.to_str())
    bare: dict[str, Any] = {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    inner = {key: _without_prefix(state[key]) for key in ("normalizer", "pre_tokenizer")}
    return Tokenizer.from_str(json.dumps(state | bare | inner))


def _without_prefix(step: Any) -> Any:
    """A normaliser or pre-tokeniser, in tokenizers' JSON, that puts nothing in front of a text."""
    if step is None:
        return None
    for key in ("normalizers", "pretokenizers"):
        if key in step:
            kept = [_without_prefix(inner) for inner in step[key] if inner["type"] != "Prepend"]
            return {**step, key: kept}
    if step["type"] == "Prepend":
        return None
    off = {"add_prefix_space": False, "prepend_scheme": "never"}
    return {key: off.get(key, value) for key, value in step.items()}


def turn_end(tokenizer: Any, stop_token_ids: Sequence[int]) -> int:
    """The stop id of an assistant turn: the one that the chat template itself writes after it, else the tokenizer's
    EOS. Raises ValueError where neither is among the verifier's stop ids."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": PROBE}]
    try:
        behind = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(PROBE)
        written = flat_ids(tokenizer.encode(behind[2], add_special_tokens=False)) if behind[1] else []
    except REFUSALS:
        written = []
    found = next((token for token in (*written, tokenizer.eos_token_id) if token in stop_token_ids), None)
    if found is None:
        raise ValueError("the verifier has no stop token: neither its chat template nor its tokenizer tells one")
    return int(found)


def output_pieces(row: Row, markers: Markers, opened: bool, closed: bool) -> list[Piece]:
    """The text of a row of schemas.RESPONSES as the verifier would have written it, without the stop token.

    opened, closed: the prompt ends in the opening marker, or has closed it again (thinking is switched off).
    """
    start, end = markers.start, markers.end
    reasoning, content = row["reasoning"] or "", row["content"] or ""
    if start is None or end is None:
        return [reasoning, content]
    cut = row["finish_reason"] == "length"
    opening: list[Piece] = [] if opened else [start]
    if reasoning:
        if closed:
            return [reasoning, content]  # a parser that overlooked the prompt took the answer for thinking
        return [*opening, reasoning] if cut and not content else [*opening, reasoning, end, content]
    blank, written, inline = content.partition(start.text)
    if written and not blank.strip():  # no parser took it out
        thought, closing, answer = inline.partition(end.text)
        return [*([] if opened else [blank, start]), thought, *([end, answer] if closing else [])]
    thought, closing, answer = content.partition(end.text)
    if opened and closing:
        return [thought, end, answer]
    # opened and never closed: cut while thinking, where nobody adds a closing marker, or an answer without thinking
    return [end, content] if opened and not cut else [content]


class Rebuilder:
    """Gives rows their ids from their text."""

    def __init__(self, tokenizer: Any, identity: VerifierIdentity, finder: ThinkingFinder):
        self.tokenizer, self.identity, self.finder = tokenizer, identity, finder
        self.encode = TextEncoder(tokenizer)

    @cached_property
    def stop_id(self) -> int:
        """The id that ends an answer where the server named none."""
        return turn_end(self.tokenizer, self.identity.stop_token_ids)

    def rebuild(self, row: Row) -> Row:
        """The row with prompt_token_ids and output_token_ids made from its messages and text.

        Raises Unusable for a row without text, or one whose messages the chat template refuses.
        """
        prompt = self.prompt(row)
        return {**row, "prompt_token_ids": prompt, "output_token_ids": self.output(row, prompt)}

    def prompt(self, row: Row) -> Ids:
        """The ids of the conversation up to the answer."""
        try:
            ids = prompt_ids(self.tokenizer, row["messages"], json.loads(row["chat_template_kwargs"]))
        except REFUSALS as error:
            raise Unusable("refused by the chat template", str(error)) from None
        return np.array(ids, dtype=np.int32)

    def output(self, row: Row, prompt: Ids) -> Ids:
        """The ids of the answer to `prompt`, thinking and stop token included."""
        if not row["reasoning"] and not row["content"]:
            raise Unusable("neither ids nor text", "nothing to rebuild the answer from")
        pieces = output_pieces(row, self.identity.markers, self.finder.opened_in(prompt), self.finder.closed_in(prompt))
        return np.array(self._encoded(pieces) + self._stop(row), dtype=np.int32)

    def _encoded(self, pieces: Sequence[Piece]) -> list[int]:
        """A marker that is no token of its own is text, and merges with what stands beside it as any other text."""
        ids: list[int] = []
        text = ""
        for piece in pieces:
            if isinstance(piece, Marker) and len(piece.ids) == 1:
                ids += [*self.encode(text), *piece.ids]
                text = ""
            else:
                text += piece.text if isinstance(piece, Marker) else piece
        return ids + self.encode(text)

    def _stop(self, row: Row) -> list[int]:
        """The stop id, the one that the server named if it did; none for a row that was cut or met a stop string."""
        if row["finish_reason"] != "stop":
            return []
        named = row["stop_reason"]
        if named is None:
            return [self.stop_id]
        return [token for token in self.identity.stop_token_ids if str(token) == named]
