"""vLLM's own offline chat, as the child process that benchmarks/generate.py compares with."""

import time
from typing import Any

from vllm import LLM, SamplingParams

from eagle3.serving.process import ParentPipe


def chat(pipe: ParentPipe, arguments: dict[str, Any], work: list[Any], kwargs: dict[str, Any]) -> None:
    """Start an engine, warm it as our pre-flight does, answer everything in one call; sends (tokens, seconds).

    work: (messages, sampling fields) of each question. kwargs: for the chat template.
    """
    engine = LLM(**arguments)
    engine.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=1), use_tqdm=False)
    sampling = [SamplingParams(**fields) for _, fields in work]
    began = time.monotonic()
    outputs = engine.chat(
        [messages for messages, _ in work], sampling, use_tqdm=False, chat_template_kwargs=kwargs or None
    )
    seconds = time.monotonic() - began
    pipe.send((sum(len(output.outputs[0].token_ids) for output in outputs), seconds))
