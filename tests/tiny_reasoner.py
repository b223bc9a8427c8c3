"""A small verifier that really reasons: a Llama trained in about a minute to reverse a list of letters.

It opens thinking (or goes on in thinking that the prompt has opened), lists the letters, closes thinking, and answers:

    Reverse KDAF   ->   <think>
                        K,D,A,F
                        </think>

                        FADK<|im_end|>

Its thinking takes two tokens a letter and its answer one, so a low token budget cuts long rows in the thinking, shorter
ones in the answer, and leaves the shortest whole.
"""

import fcntl
import random
import re
import shutil
import string
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eagle3.digests import digest, digest_file

END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
THINK, END_THINK = "<think>", "</think>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if open_thinking %}<think>\n{% endif %}{% endif %}"
)
WORDS = "Reverse\nsystem\nuser\nassistant\nthink"  # become tokens of their own
FEWEST, MOST = 3, 12  # letters of a prompt

STEPS, BATCH = 400, 16
LEARNING_RATE, WARMUP, DECAY_FROM = 2e-3, 30, 0.6
LAST_LOSSES, CONVERGED = 20, 0.05


@dataclass(frozen=True)
class Reply:
    """An output of the reasoner, taken apart."""

    opened: bool  # the output itself begins with the opening marker
    thinking: str  # what stands inside the markers, so far as it goes
    thinking_end: int | None  # characters of the output up to and with the closing marker; None = never closed
    answer: str | None  # what stands behind the thinking, without the stop; None = never closed
    stopped: bool

    @property
    def right(self) -> bool:
        """Whether the output is whole, follows the grammar, and answers what its own thinking says."""
        listed = re.fullmatch(r"[A-Z](,[A-Z])*\n", self.thinking) is not None
        letters = self.thinking.strip("\n").replace(",", "")
        return self.stopped and listed and self.answer == "\n\n" + letters[::-1]


def parse_reasoner(text: str) -> Reply:
    """Take an output apart, decoded with its special tokens. The markers of both kinds of tokenizer read the same."""
    opened = text.startswith(THINK + "\n")
    inside, closing, answer = text.removeprefix(THINK + "\n").partition(END_THINK)
    return Reply(
        opened=opened,
        thinking=inside,
        thinking_end=text.index(END_THINK) + len(END_THINK) if closing else None,
        answer=answer.removesuffix(STOP) if closing else None,
        stopped=text.endswith(STOP),
    )


def reasoner_prompts(count: int, seed: int) -> list[str]:
    """Distinct questions of 3 to 12 distinct letters."""
    choice = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        found[_question(choice)] = None
    return list(found)


def right_output(prompt: str, *, opened_by_prompt: bool = False) -> str:
    """What the reasoner must write for one of `reasoner_prompts`, special tokens included."""
    letters = prompt.removeprefix("Reverse ")
    opening = "" if opened_by_prompt else THINK + "\n"
    return f"{opening}{','.join(letters)}\n{END_THINK}\n\n{letters[::-1]}{STOP}"


def build_tiny_reasoner(folder: Path, *, single_markers: bool = True, seed: int = 0) -> Path:
    """Train the reasoner and write it to `folder`. Takes about a minute of one core.

    single_markers: the think markers are tokens of their own; else each is three ordinary tokens.
    """
    tokenizer = build_reasoner_tokenizer(single_markers)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other on a busy machine take minutes
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = LlamaForCausalLM(_config(tokenizer))
            _train(model, tokenizer, random.Random(seed))
    finally:
        torch.set_num_threads(threads)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def trained_reasoner(config: pytest.Config, target: Path, *, single_markers: bool) -> Path:
    """`build_tiny_reasoner` to `target`; out of pytest's cache when this very file has been through it before."""
    key = digest([digest_file(Path(__file__)), torch.__version__, transformers.__version__, single_markers])[:16]
    assert config.cache is not None
    room = config.cache.mkdir("tiny_reasoner")
    with (room / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker or run may be training it right now
        if not (room / key).exists():
            shutil.rmtree(room / f"{key}.tmp", ignore_errors=True)
            build_tiny_reasoner(room / f"{key}.tmp", single_markers=single_markers).rename(room / key)
    return Path(shutil.copytree(room / key, target))  # a test may change its own copy


def build_reasoner_tokenizer(single_markers: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level, with tokens for the few words of the template and one for each letter of a question."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=352,
        special_tokens=[END, START, STOP],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS, END_THINK], trainer)
    if single_markers:
        tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in (THINK, END_THINK)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=STOP, pad_token=END, chat_template=TEMPLATE)


def _question(choice: random.Random) -> str:
    return "Reverse " + "".join(choice.sample(string.ascii_uppercase, choice.randint(FEWEST, MOST)))


def _config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=384,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=7,  # the fewest with three distinct auxiliary layers
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.08,  # with the usual 0.02 looking letters up takes four times as many steps to learn
    )


def _train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, choice: random.Random) -> None:
    """Next-token loss on the outputs."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    losses: list[float] = []
    for step in range(STEPS):
        ids, labels = _batch(tokenizer, [_question(choice) for _ in range(BATCH)])
        rate = LEARNING_RATE * min(1.0, (step + 1) / WARMUP, (1 - step / STEPS) / (1 - DECAY_FROM))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    last = sum(losses[-LAST_LOSSES:]) / LAST_LOSSES
    assert last < CONVERGED, f"the reasoner has not learned its task: loss {last:.3f} after {STEPS} steps"


def _batch(tokenizer: PreTrainedTokenizerFast, questions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels [B, T], padded behind; labels only where the reasoner writes."""
    conversations = [[{"role": "user", "content": question}] for question in questions]
    prompts = tokenizer.apply_chat_template(conversations, add_generation_prompt=True, tokenize=False)
    wholes = [prompt + right_output(question) for prompt, question in zip(prompts, questions, strict=True)]
    padded = tokenizer(wholes, padding=True, padding_side="right", return_tensors="pt")
    labels = padded["input_ids"].masked_fill(padded["attention_mask"] == 0, -100)
    for row, prompt in enumerate(prompts):
        labels[row, : len(tokenizer.encode(prompt))] = -100
    return padded["input_ids"], labels
