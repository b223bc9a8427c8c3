"""The engine without any recording, as the child process that benchmarks/record.py compares with."""

import time
from typing import Any

from vllm import EngineArgs, LLMEngine, SamplingParams

from eagle3.serving.process import ParentPipe


def prefill(pipe: ParentPipe, arguments: dict[str, Any]) -> None:
    """Start an engine; read each list of samples that comes, as many at once as it likes, and send the seconds."""
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    pipe.send("ready")
    while True:
        samples: list[list[int]] = pipe.receive()
        began = time.monotonic()
        for number, input_ids in enumerate(samples):
            engine.add_request(str(number), {"prompt_token_ids": input_ids}, sampling)
        while engine.has_unfinished_requests():
            engine.step()
        pipe.send(time.monotonic() - began)
