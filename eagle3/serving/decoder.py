"""The child side of speculative.py: one engine that decodes batches and records each of its steps."""

import time
from typing import Any

from vllm import EngineArgs, SamplingParams, TokensPrompt
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.reader import Counter, Vector
from vllm.v1.outputs import ModelRunnerOutput

from eagle3.serving.process import ParentPipe

#: One step of one request: (request id, output tokens before, drafted ids, accepted, emitted).
Step = tuple[str, int, list[int], int, int]
#: One engine step: (seconds, requests in it, tokens in it).
Forward = tuple[float, int, int]
COUNTERS = "vllm:spec_decode_num_"


class StepScheduler(Scheduler):
    """vLLM's scheduler, which also notes what each forward drafted, accepted and emitted."""

    steps: list[Step] = []  # noqa: RUF012 - one engine per process; the loop below reads them here
    scheduled: list[tuple[int, int]] = []  # noqa: RUF012 - requests and tokens of each engine step

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
        tokens = scheduler_output.num_scheduled_tokens
        self.scheduled.append((len(tokens), sum(tokens.values())))
        return outputs


def decode_worker(pipe: ParentPipe, arguments: dict[str, Any]) -> None:
    """Start the engine, say "ready", then answer batches, (prompt ids, sampling fields), with what `decode` says."""
    engine = LLMEngine.from_engine_args(
        EngineArgs(**arguments, scheduler_cls=StepScheduler, async_scheduling=False, enable_prefix_caching=False)
    )
    pipe.send("ready")
    while (batch := pipe.receive()) is not None:
        pipe.send(decode(engine, *batch))


def decode(engine: LLMEngine, prompts: list[list[int]], sampling: list[dict[str, Any]]) -> dict[str, Any]:
    """Decode the prompts together until all are done.

    seconds of the whole; outputs: (ids, finish reason) of each prompt; steps: of each prompt; forwards: every engine
    step; counters: by how much vLLM's own counters of speculative decoding rose.
    """
    StepScheduler.steps.clear()
    StepScheduler.scheduled.clear()
    before = spec_counters(engine)
    outputs: dict[str, tuple[list[int], str]] = {}
    forwards: list[Forward] = []
    start = last = time.perf_counter()
    names = {}
    for number, (ids, fields) in enumerate(zip(prompts, sampling, strict=True)):
        names[engine.add_request(str(number), TokensPrompt(prompt_token_ids=ids), SamplingParams(**fields))] = number
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = list(output.outputs[0].token_ids), str(output.outputs[0].finish_reason)
        now = time.perf_counter()
        for requests, tokens in StepScheduler.scheduled:
            forwards.append((now - last, requests, tokens))
        StepScheduler.scheduled.clear()
        last = now
    seconds = time.perf_counter() - start
    steps: list[list[Step]] = [[] for _ in prompts]
    for step in StepScheduler.steps:
        steps[names[step[0]]].append(step)
    rose = {name: count - before.get(name, 0) for name, count in spec_counters(engine).items()}
    return {
        "seconds": seconds,
        "outputs": [outputs[str(number)] for number in range(len(prompts))],
        "steps": steps,
        "forwards": forwards,
        "counters": rose,
    }


def spec_counters(engine: LLMEngine) -> dict[str, int]:
    """vLLM's counters of speculative decoding since the engine started, by name; none without a draft."""
    found = {}
    for metric in engine.get_metrics():
        if metric.name.startswith(COUNTERS):
            if isinstance(metric, Counter):
                found[metric.name.removeprefix(COUNTERS)] = metric.value
            elif isinstance(metric, Vector):
                name = metric.name.removeprefix(COUNTERS)
                found |= {f"{name}_{place + 1}": value for place, value in enumerate(metric.values)}
    return found
