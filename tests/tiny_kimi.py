"""A small verifier of Kimi's kind: DeepSeek-V3 architecture, random weights, Kimi-K2's ids, templates like Kimi's.

Its weights are random but for the output head, which is bent so that its output looks like a reasoner's. Two styles:

    k2.5          the prompt opens the thinking (template argument thinking=false: the prompt also closes it)
    k2-thinking   the prompt ends before it, and the model opens it

Sampled at temperature 1, thinking closes, goes over into a tool call without closing, stops, or runs into the budget.
"""

import json
from math import log
from pathlib import Path
from typing import Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedTokenizerFast

from tests.tiny_verifiers import TEXT

Style = Literal["k2.5", "k2-thinking"]

VOCABULARY, ORDINARY = 163_840, 163_584  # ids from ORDINARY on are control tokens
BOS, EOS, STOP = "[BOS]", "[EOS]", "<|im_end|>"
THINK, END_THINK = "<think>", "</think>"
TOOL_CALLS, END_TOOL_CALLS = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
TURN_IDS = {
    BOS: 163584,
    EOS: 163585,
    STOP: 163586,
    "<|im_user|>": 163587,
    "<|im_assistant|>": 163588,
    "<|im_system|>": 163594,
    "<|im_middle|>": 163601,
    "[UNK]": 163838,
    "[PAD]": 163839,
}
# tokens of an answer's own structure: added tokens, but not special ones, so that decoding keeps them
STRUCTURE_IDS = {
    TOOL_CALLS: 163595,
    END_TOOL_CALLS: 163596,
    "<|tool_call_begin|>": 163597,
    "<|tool_call_argument_begin|>": 163598,
    "<|tool_call_end|>": 163599,
    THINK: 163606,
    END_THINK: 163607,
}
CONTROL_IDS = TURN_IDS | STRUCTURE_IDS

# Reasoning stands only behind the last assistant message that calls no tool: a finished conversation shows none.
CONVERSATION = (
    "{% set seen = namespace(final=-1) %}"
    "{% for message in messages %}{% if message['role'] == 'assistant' and not message.get('tool_calls') %}"
    "{% set seen.final = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}"
    "{% set role = message['role'] %}{% set content = message.get('content') or '' %}"
    "{% if role == 'assistant' %}"
    "<|im_assistant|>assistant<|im_middle|><think>"
    "{% if loop.index0 > seen.final %}"
    "{{ message.get('reasoning_content') or message.get('reasoning') or '' }}{% endif %}"
    "</think>{{ content }}"
    "{% if message.get('tool_calls') %}<|tool_calls_section_begin|>"
    "{% for call in message['tool_calls'] %}<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>"
    "{% set arguments = call['function']['arguments'] %}"
    "{{ arguments if arguments is string else arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}"
    "{% elif role == 'user' %}<|im_user|>user<|im_middle|>{{ content }}"
    "{% else %}<|im_system|>{{ role }}<|im_middle|>{{ content }}{% endif %}"
    "<|im_end|>{% endfor %}"
)
ASSISTANT = "<|im_assistant|>assistant<|im_middle|>"
GENERATION: dict[Style, str] = {
    "k2.5": ASSISTANT + "<think>{% if thinking is defined and not thinking %}</think>{% endif %}",
    "k2-thinking": ASSISTANT,
}

# How often each marker comes at a place, about: one token in so many.
ONE_IN = {END_THINK: 20, TOOL_CALLS: 60, STOP: 80}
UNREADABLE_ONE_IN = 100  # tokens that no tokenizer makes of the text they stand for
# What follows each of these for certain. In the k2.5 style the prompt never ends in the first.
FOLLOWS = {
    "<|im_middle|>": THINK,
    TOOL_CALLS: "<|tool_call_begin|>",
    "<|tool_call_begin|>": "<|tool_call_argument_begin|>",
    "<|tool_call_argument_begin|>": "<|tool_call_end|>",
    "<|tool_call_end|>": END_TOOL_CALLS,
    END_TOOL_CALLS: STOP,
}
HIDDEN, RESERVED = 64, 1 + len(FOLLOWS)  # channels that no layer writes: a constant, and one for each of FOLLOWS
CONSTANT, CERTAIN, SPREAD = 1.0, 40.0, 1.0  # value in those channels; logit of what follows; of chance, in the logits


def build_tiny_kimi(folder: Path, style: Style = "k2.5", *, seed: int = 0) -> Path:
    """Write the verifier to `folder`: 7 layers of 2 heads, the first dense, the others 2 of 4 experts; float32."""
    tokenizer, readable = build_kimi_tokenizer(style)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = DeepseekV3ForCausalLM(_config())
        _reserve_channels(model)
        _bend_head(model, readable)
    model.generation_config.eos_token_id = CONTROL_IDS[STOP]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def build_kimi_tokenizer(style: Style) -> tuple[PreTrainedTokenizerFast, list[int]]:
    """The tokenizer, and its ids that stand for readable text.

    Byte-level. Some hundred tokens are learned from a little English; the vocabulary is filled up with made-up words
    that no merge leads to, so their text is tokenised to other ids.
    """
    small = Tokenizer(models.BPE())
    small.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    small.train_from_iterator(TEXT * 4, trainer)
    learned = json.loads(small.to_str())["model"]
    vocabulary: dict[str, int] = dict(learned["vocab"])
    readable = [number for word, number in vocabulary.items() if word.lstrip("Ġ").isascii() and word != "Ġ"]
    for number in range(len(vocabulary), ORDINARY):
        vocabulary[_made_up(number)] = number
    assert len(vocabulary) == ORDINARY
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(pair) for pair in learned["merges"]]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {number: name for name, number in CONTROL_IDS.items()}
    for number in range(ORDINARY, VOCABULARY):
        name = names.get(number, f"<|reserved_token_{number}|>")
        if name in STRUCTURE_IDS:
            tokenizer.add_tokens([AddedToken(name, normalized=False)])
        else:
            tokenizer.add_special_tokens([AddedToken(name, normalized=False)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=STOP,
        pad_token="[PAD]",
        unk_token="[UNK]",
        chat_template=CONVERSATION + "{% if add_generation_prompt %}" + GENERATION[style] + "{% endif %}",
    )
    return wrapped, readable


def _made_up(number: int) -> str:
    """A word of five letters with a blank before it, another for each number below 26 ** 4; none is an English one."""
    letters = ""
    for _ in range(4):
        number, place = divmod(number, 26)
        letters = chr(ord("a") + place) + letters
    return f"Ġq{letters}"


def _config() -> DeepseekV3Config:
    return DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=7,  # the fewest with three distinct auxiliary layers
        num_attention_heads=2,
        num_key_value_heads=2,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        topk_method="noaux_tc",  # this and the next are for vLLM: transformers knows no other way
        scoring_func="sigmoid",
        q_lora_rank=32,
        kv_lora_rank=512,  # with qk_rope_head_dim, what vLLM's CPU kernel is written for
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        max_position_embeddings=512,
        # stretched positions as Kimi has them; vLLM 0.32's CPU kernel for plain ones is wrong for MLA
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 50000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        rms_norm_eps=1e-6,
        num_mtp_layers=0,
        tie_word_embeddings=False,
        bos_token_id=CONTROL_IDS[BOS],
        eos_token_id=CONTROL_IDS[STOP],
        pad_token_id=CONTROL_IDS["[PAD]"],
        initializer_range=0.1,
    )


def _reserve_channels(model: DeepseekV3ForCausalLM) -> None:
    """Channel 0 of every state is a constant; channel i > 0 says that this token is the i-th key of FOLLOWS."""
    embed = model.model.embed_tokens.weight
    embed[:, RESERVED:] = torch.randn(VOCABULARY, HIDDEN - RESERVED)
    embed[:, :RESERVED] = 0
    embed[:, 0] = CONSTANT
    for channel, name in enumerate(FOLLOWS, start=1):
        embed[CONTROL_IDS[name], channel] = CONSTANT
    for name, weight in model.named_parameters():
        if name.endswith("o_proj.weight"):
            weight[:RESERVED] = 0
        elif "down_proj" in name:
            weight[..., :RESERVED, :] = 0  # [H, I], or [experts, H, I]


def _bend_head(model: DeepseekV3ForCausalLM, readable: list[int]) -> None:
    """Chance decides among the readable tokens, ONE_IN says how often a marker comes, FOLLOWS what must come."""
    sample = torch.randint(ORDINARY, (4, 64))
    constant = model.model(input_ids=sample).last_hidden_state[..., 0].mean()  # behind the final norm
    head = model.lm_head.weight
    head[:, RESERVED:] = torch.randn(VOCABULARY, HIDDEN - RESERVED) * SPREAD / (HIDDEN - RESERVED) ** 0.5
    logits = torch.full((VOCABULARY,), -CERTAIN)
    logits[:ORDINARY] = -log((ORDINARY - len(readable)) * UNREADABLE_ONE_IN) - SPREAD**2 / 2
    logits[readable] = -log(len(readable)) - SPREAD**2 / 2  # so that all of them together have a weight of about 1
    for name, one_in in ONE_IN.items():
        head[CONTROL_IDS[name]] = 0
        logits[CONTROL_IDS[name]] = -log(one_in)
    head[:, :RESERVED] = 0
    head[:, 0] = logits / constant
    for channel, follower in enumerate(FOLLOWS.values(), start=1):
        head[CONTROL_IDS[follower], channel] = 2 * CERTAIN / constant
