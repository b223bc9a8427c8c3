"""Decode prompts in vLLM with and without a draft, step by step.

Each arm is an engine in a process of its own. Side by side, the two arms take every batch in turn, in alternating
order, so that a machine that slows down slows down both. The plain engine stays while drafts of other numbers of
speculative tokens, which need engines of their own, come and go beside it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eagle3.acceptance import Answer, Decoded, Forward, Prompt, Setting, Step
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
        """num_speculative_tokens: without a draft it means nothing."""
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

    def decode(self, prompts: list[Prompt], sampling: list[dict[str, Any]], setting: Setting, batch: int) -> Decoded:
        """Decode one batch. Raises ValueError naming the log when the engine fails."""
        self._process.send(([prompt.ids for prompt in prompts], sampling), BATCH_TIMEOUT_S)
        told = self._process.receive(BATCH_TIMEOUT_S)
        answers = [
            Answer(prompt, setting, self.arm, batch, ids, ended, told["seconds"], [Step(*fields[1:]) for fields in own])
            for prompt, (ids, ended), own in zip(prompts, told["outputs"], told["steps"], strict=True)
        ]
        return Decoded(setting, self.arm, answers, [Forward(*f) for f in told["forwards"]], told["counters"])


def sampling_of(own: EvaluateParams) -> dict[str, Any]:
    """Every sampling field that all prompts share, explicit."""
    return {
        "temperature": own.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


def sampling_fields(own: EvaluateParams, prompt: Prompt, room: int) -> dict[str, Any]:
    """Every sampling field of one prompt; `room` is what the context leaves."""
    return sampling_of(own) | {
        "seed": derived_seed(own.seed, prompt.prompt_id),
        "max_tokens": min(own.max_new_tokens, room),
        "detokenize": False,
    }


def settings(own: EvaluateParams) -> list[Setting]:
    """Everything that is asked for; the first one is what is reported."""
    return [Setting(tokens, size) for tokens in listed(own.num_speculative_tokens) for size in listed(own.batch_size)]


def listed(value: int | list[int]) -> list[int]:
    """A setting that may be a number or a list of them, each once, in order."""
    return list(dict.fromkeys(value)) if isinstance(value, list) else [value]


def decode_settings(
    prompts: list[Prompt], make: Callable[[int], Decoder], own: EvaluateParams, max_model_len: int
) -> Iterator[Decoded]:
    """What both arms make of every batch in every setting. make: a decoder with so many speculative tokens; 0 = plain.

    Before it counts, each arm decodes the first batch of a setting once more, to warm up. One engine after the other
    (own.side_by_side false), the plain arm decodes once for each batch size, under the first number of tokens.
    """
    asked = settings(own)
    numbers, sizes = listed(own.num_speculative_tokens), listed(own.batch_size)

    def run(decoder: Decoder, setting: Setting, number: int) -> Decoded:
        batch = prompts[number * setting.batch_size : (number + 1) * setting.batch_size]
        fields = [sampling_fields(own, prompt, max_model_len - len(prompt.ids)) for prompt in batch]
        return decoder.decode(batch, fields, setting, number)

    def alone(tokens: int, these: list[Setting]) -> Iterator[Decoded]:
        with make(tokens) as decoder:
            decoder.wait_until_ready()
            for setting in these:
                run(decoder, setting, 0)
                for number in range(-(-len(prompts) // setting.batch_size)):
                    yield run(decoder, setting, number)

    if not own.side_by_side:
        yield from alone(0, [Setting(numbers[0], size) for size in sizes])
        for tokens in numbers:
            yield from alone(tokens, [setting for setting in asked if setting.num_speculative_tokens == tokens])
        return
    with make(0) as plain:
        for tokens in numbers:
            with make(tokens) as draft:
                arms = plain, draft
                for decoder in arms if tokens == numbers[0] else (draft,):
                    decoder.wait_until_ready()
                for setting in (setting for setting in asked if setting.num_speculative_tokens == tokens):
                    for decoder in arms:
                        run(decoder, setting, 0)
                    for number in range(-(-len(prompts) // setting.batch_size)):
                        for decoder in arms if number % 2 == 0 else reversed(arms):
                            yield run(decoder, setting, number)


def answers_to_decode(prompts: list[Prompt], own: EvaluateParams) -> int:
    """How many answers `decode_settings` yields in all, for a progress bar."""
    asked = len(settings(own))
    plain = asked if own.side_by_side else len(listed(own.batch_size))
    return len(prompts) * (asked + plain)
