"""Decode prompts in vLLM with and without a draft, step by step.

Each arm is an engine in a process of its own. Side by side, the two arms take every batch in turn, in alternating
order, so that a machine that slows down slows down both.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from eagle3.acceptance import ARMS, Answer, Prompt, Step
from eagle3.digests import derived_seed
from eagle3.params import EngineParams, EvaluateParams, VerifierParams
from eagle3.serving.engine import engine_arguments, in_process_environment
from eagle3.serving.process import EngineProcess
from eagle3.workstore import work_root

BATCH_TIMEOUT_S = 3600


class Decoder:
    """`with Decoder(...) as decoder:` one engine, with the draft in `draft` or with none."""

    def __init__(
        self,
        verifier: VerifierParams,
        engine: EngineParams,
        folder: Path,
        draft: Path | None,
        num_speculative_tokens: int,
    ):
        self.arm = "plain" if draft is None else "draft"
        arguments = engine_arguments(verifier, engine, folder, draft)
        if draft is not None:
            arguments["speculative_config"] = {
                "method": "eagle3",
                "model": str(draft.absolute()),
                "num_speculative_tokens": num_speculative_tokens,
            }
        self._start_timeout_s = engine.start_timeout_s
        self._process = EngineProcess(
            "eagle3.serving.decoder:decode_worker",
            (arguments,),
            in_process_environment(engine),
            work_root() / "logs" / f"evaluate-{self.arm}-{verifier.dtype}.log",
            f"evaluate ({self.arm} engine, {verifier.dtype})",
        )

    def __enter__(self) -> "Decoder":
        self._process.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._process.__exit__(*error)

    def wait_until_ready(self) -> None:
        """Raises ValueError naming the log when the engine does not come up."""
        try:
            self._process.receive(self._start_timeout_s)
        except BaseException:
            self._process.stop()
            raise

    def decode(self, prompts: list[Prompt], sampling: list[dict[str, Any]], batch: int) -> list[Answer]:
        """Decode one batch. Raises ValueError naming the log when the engine fails."""
        self._process.send(([prompt.ids for prompt in prompts], sampling), BATCH_TIMEOUT_S)
        seconds, outputs, steps = self._process.receive(BATCH_TIMEOUT_S)
        return [
            Answer(prompt, self.arm, batch, output, seconds, [Step(*fields[1:]) for fields in own])
            for prompt, output, own in zip(prompts, outputs, steps, strict=True)
        ]


def sampling_fields(own: EvaluateParams, prompt: Prompt, room: int) -> dict[str, Any]:
    """Every sampling field of one prompt, explicit; `room` is what the context leaves."""
    return {
        "temperature": own.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": derived_seed(own.seed, prompt.prompt_id),
        "max_tokens": min(own.max_new_tokens, room),
        "detokenize": False,
    }


def decode_pairs(
    prompts: list[Prompt], make: Callable[[str], Decoder], own: EvaluateParams, max_model_len: int
) -> Iterator[list[Answer]]:
    """Answers of both arms, batch by batch; the first batch is decoded once more before, to warm both arms up."""
    batches = [prompts[i : i + own.batch_size] for i in range(0, len(prompts), own.batch_size)]

    def run(decoder: Decoder, number: int) -> list[Answer]:
        fields = [sampling_fields(own, prompt, max_model_len - len(prompt.ids)) for prompt in batches[number]]
        return decoder.decode(batches[number], fields, number)

    if not own.side_by_side:
        for arm in ARMS:
            with make(arm) as decoder:
                decoder.wait_until_ready()
                run(decoder, 0)
                for number in range(len(batches)):
                    yield run(decoder, number)
        return
    with ExitStack() as stack:
        decoders = [stack.enter_context(make(arm)) for arm in ARMS]
        for decoder in decoders:
            decoder.wait_until_ready()
        for decoder in decoders:
            run(decoder, 0)
        for number in range(len(batches)):
            for decoder in decoders if number % 2 == 0 else reversed(decoders):
                yield run(decoder, number)
