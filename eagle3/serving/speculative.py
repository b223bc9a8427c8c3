"""Decode prompts in vLLM with and without a draft, step by step.

Each arm is an engine in a process of its own. Side by side, the two arms take every batch in turn, in alternating
order, so that a machine that slows down slows down both. The plain engine stays while drafts of other numbers of
speculative tokens, which need engines of their own, come and go beside it.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from eagle3.acceptance import Answer, Decoded, Forward, Prompt, Setting, Step, Turn
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


def turns(prompts: list[Prompt], own: EvaluateParams) -> Iterator[Turn]:
    """Every batch of every setting, by both arms in an order that alternates.

    One engine after the other (own.side_by_side false), the plain arm decodes once for each batch size, under the
    first number of tokens.
    """
    asked, first = settings(own), listed(own.num_speculative_tokens)[0]
    rounds = [(setting, ["plain", "draft"]) for setting in asked]
    if not own.side_by_side:
        rounds = [(Setting(first, size), ["plain"]) for size in listed(own.batch_size)]
        rounds += [(setting, ["draft"]) for setting in asked]
    for setting, arms in rounds:
        for number, start in enumerate(range(0, len(prompts), setting.batch_size)):
            order = arms if number % 2 == 0 else arms[::-1]
            yield Turn(setting, order, number, prompts[start : start + setting.batch_size])


class Decoders:
    """`with Decoders(make) as decoders:` the engines that a turn needs; one that no longer is needed makes room."""

    def __init__(self, make: Callable[[int], Decoder]):
        """make: a decoder with so many speculative tokens; 0 = plain."""
        self._make = make
        self._running: dict[int, Decoder] = {}

    def __enter__(self) -> "Decoders":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop(set(self._running))

    def ready(self, wanted: list[int]) -> list[Decoder]:
        """Those of so many speculative tokens, in this order, and no others."""
        self._stop(set(self._running) - set(wanted))
        new = [tokens for tokens in wanted if tokens not in self._running]
        for tokens in new:
            self._running[tokens] = self._make(tokens).__enter__()
        for tokens in new:
            self._running[tokens].wait_until_ready()
        return [self._running[tokens] for tokens in wanted]

    def _stop(self, these: set[int]) -> None:
        for tokens in these:
            self._running.pop(tokens).__exit__(None, None, None)


def decode_turns(
    todo: Iterable[Turn], make: Callable[[int], Decoder], own: EvaluateParams, max_model_len: int
) -> Iterator[tuple[Turn, list[Decoded]]]:
    """Each turn with what its arms made of it, in its order.

    make: a decoder with so many speculative tokens; 0 = plain.
    Before it counts, each arm decodes the first batch of a setting that it meets once more, to warm up.
    """

    def run(decoder: Decoder, turn: Turn) -> Decoded:
        fields = [sampling_fields(own, prompt, max_model_len - len(prompt.ids)) for prompt in turn.prompts]
        return decoder.decode(turn.prompts, fields, turn.setting, turn.number)

    warm = None
    with Decoders(make) as decoders:
        for turn in todo:
            tokens = turn.setting.num_speculative_tokens
            arms = decoders.ready([0 if arm == "plain" else tokens for arm in turn.arms])
            round_ = turn.setting, set(turn.arms)
            if warm != round_:
                for decoder in arms:
                    run(decoder, turn)
                warm = round_
            yield turn, [run(decoder, turn) for decoder in arms]
