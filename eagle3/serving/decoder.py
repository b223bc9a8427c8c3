"""The child side of speculative.py: one engine that decodes batches and records each of its steps."""

import time
from typing import Any

from vllm import EngineArgs, SamplingParams, TokensPrompt
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.outputs import ModelRunnerOutput

from eagle3.serving.process import ParentPipe

#: One step of one request: (request id, output tokens before, drafted ids, accepted, emitted).
Step = tuple[str, int, list[int], int, int]


class StepScheduler(Scheduler):
    """vLLM's scheduler, which also notes what each forward drafted, accepted and emitted."""

    steps: list[Step] = []  # noqa: RUF012 - one engine per process; the loop below reads it here

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        drafts = {
            name: (self.requests[name], self.requests[name].num_output_tokens, list(ids))
            for name, ids in scheduler_output.scheduled_spec_decode_tokens.items()
            if name in self.requests
        }
        sampled = {
            name: len(model_runner_output.sampled_token_ids[model_runner_output.req_id_to_index[name]])
            for name in drafts
        }
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        for name, (request, before, drafted) in drafts.items():
            if sampled[name]:
                emitted = request.num_output_tokens - before
                self.steps.append((name, before, drafted, sampled[name] - 1, emitted))
        return outputs


def decode_worker(pipe: ParentPipe, arguments: dict[str, Any]) -> None:
    """Start the engine, say "ready", then answer batches: (list of prompt ids, sampling fields) ->
    (seconds, list of output ids, list of steps per prompt)."""
    engine = LLMEngine.from_engine_args(
        EngineArgs(**arguments, scheduler_cls=StepScheduler, async_scheduling=False, enable_prefix_caching=False)
    )
    pipe.send("ready")
    while (batch := pipe.receive()) is not None:
        pipe.send(decode(engine, *batch))


def decode(
    engine: LLMEngine, prompts: list[list[int]], sampling: list[dict[str, Any]]
) -> tuple[float, list[list[int]], list[list[Step]]]:
    """Decode the prompts together until all are done."""
    StepScheduler.steps.clear()
    outputs: dict[str, list[int]] = {}
    start = time.perf_counter()
    names = {}
    for number, (ids, fields) in enumerate(zip(prompts, sampling, strict=True)):
        names[engine.add_request(str(number), TokensPrompt(prompt_token_ids=ids), SamplingParams(**fields))] = number
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = list(output.outputs[0].token_ids)
    seconds = time.perf_counter() - start
    steps: list[list[Step]] = [[] for _ in prompts]
    for step in StepScheduler.steps:
        steps[names[step[0]]].append(step)
    return seconds, [outputs[str(number)] for number in range(len(prompts))], steps
