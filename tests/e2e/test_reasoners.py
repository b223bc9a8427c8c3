"""Verifiers that think, served by a real vLLM: prompts as the template says, markers where the styles put them."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from eagle3.serving.server import LocalServer
from tests.tiny_kimi import CONTROL_IDS, END_THINK, STOP, THINK, TOOL_CALLS
from tests.tiny_reasoner import parse_reasoner, reasoner_prompts, right_output
from tests.token_tables import write_params

pytestmark = pytest.mark.slow

TEXTS = [f"How many apples are left of {i} if you give away {i % 7}?" for i in range(48)]


@dataclass(frozen=True)
class Served:
    """A verifier behind a server of its own."""

    folder: Path
    url: str
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True)
class Answer:
    """One answer of the server, as ids and as the tokenizer decodes them."""

    prompt: list[int]
    output: list[int]
    text: str
    finish_reason: str


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The verifier that the test names. The tests of one share its server, which ends before the next one starts."""
    folder = request.getfixturevalue(request.param)
    room = tmp_path_factory.mktemp("served")
    params = write_params(room / "params.yaml", folder, verifier__aux_layer_ids=None)
    with LocalServer(params.verifier, params.engine, folder, room / "server.log") as server:
        yield Served(folder, server.url, AutoTokenizer.from_pretrained(folder))


def of(*verifiers: str) -> pytest.MarkDecorator:
    """Run a test on these verifiers, by the names of their fixtures."""
    return pytest.mark.parametrize("served", verifiers, indirect=True)


def ask(served: Served, texts: list[str], *, temperature: float, budget: int, **template: bool) -> list[Answer]:
    """One request a text, sixteen at a time. template: arguments for the chat template.

    Every prompt must come back as the ids that the template gives here.
    """

    def one(number: int) -> Answer:
        messages = [{"role": "user", "content": texts[number]}]
        body = {
            "model": str(served.folder),
            "messages": messages,
            "max_tokens": budget,
            "temperature": temperature,
            "seed": number,
            "return_token_ids": True,
            "skip_special_tokens": False,
            "chat_template_kwargs": template,
        }
        response = client.post(f"{served.url}/chat/completions", json=body)
        assert response.status_code == 200, response.text
        found = response.json()
        choice = found["choices"][0]
        own = served.tokenizer.apply_chat_template(messages, add_generation_prompt=True, **template)
        assert found["prompt_token_ids"] == own["input_ids"]
        output = choice["token_ids"]
        return Answer(own["input_ids"], output, served.tokenizer.decode(output), choice["finish_reason"])

    with httpx.Client(timeout=300, trust_env=False) as client, ThreadPoolExecutor(16) as pool:
        return list(pool.map(one, range(len(texts))))


@of("tiny_reasoner")
@pytest.mark.parametrize("open_thinking", [False, True])
def test_the_reasoner_thinks_and_answers(served: Served, open_thinking: bool) -> None:
    questions = reasoner_prompts(40, seed=3)
    answers = ask(served, questions, temperature=0.0, budget=64, open_thinking=open_thinking)
    think, end = served.tokenizer.encode(THINK + END_THINK)
    newline = served.tokenizer.encode("\n")
    right = 0
    for question, answer in zip(questions, answers, strict=True):
        if open_thinking:
            assert answer.prompt[-2:] == [think, *newline]
        else:
            assert think not in answer.prompt
        reply = parse_reasoner(answer.text)
        wanted = right_output(question, opened_by_prompt=open_thinking)
        as_told = answer.finish_reason == "stop" and answer.text == wanted and reply.right
        inside = served.tokenizer.encode(answer.text[: reply.thinking_end])
        right += as_told and answer.output[: len(inside)] == inside and inside[-1] == end
    assert right >= 36


@of("tiny_reasoner")
def test_a_low_budget_cuts_the_reasoner_in_both_parts(served: Served) -> None:
    answers = ask(served, reasoner_prompts(40, seed=4), temperature=0.0, budget=24)
    (end,) = served.tokenizer.encode(END_THINK)
    where = Counter((answer.finish_reason, end in answer.output) for answer in answers)
    assert min(where["stop", True], where["length", True], where["length", False]) >= 4
    assert all(len(answer.output) == 24 for answer in answers if answer.finish_reason == "length")


@of("tiny_kimi")
def test_thinking_of_kimi_can_be_switched_off(served: Served) -> None:
    answers = ask(served, TEXTS[:4], temperature=1.0, budget=8, thinking=False)
    assert all(answer.prompt[-2:] == [CONTROL_IDS[THINK], CONTROL_IDS[END_THINK]] for answer in answers)


@of("tiny_kimi")
def test_vllm_and_transformers_run_the_same_kimi(served: Served) -> None:
    answers = ask(served, TEXTS[:8], temperature=0.0, budget=24)
    model = AutoModelForCausalLM.from_pretrained(served.folder)
    torch.set_num_threads(1)
    same = compared = 0
    for answer in answers:
        ids = torch.tensor([answer.prompt + answer.output])
        with torch.inference_mode():
            choices = model(ids).logits[0, len(answer.prompt) - 1 : -1].argmax(-1)
        same += int((choices == ids[0, len(answer.prompt) :]).sum())
        compared += len(answer.output)
    assert same >= 0.98 * compared


def ending(output: list[int]) -> str:
    """How the thinking of a tiny Kimi ends: the first of the markers that can end it, or none."""
    ends = {CONTROL_IDS[name]: name for name in (END_THINK, TOOL_CALLS, STOP)}
    return next((ends[token] for token in output if token in ends), "budget")


@of("tiny_kimi", "tiny_kimi_thinking")
def test_thinking_of_kimi_ends_in_every_way(served: Served, request: pytest.FixtureRequest) -> None:
    style = request.node.callspec.params["served"]
    answers = ask(served, TEXTS, temperature=1.0, budget=32)
    opening = CONTROL_IDS["<|im_assistant|>"], *served.tokenizer.encode("assistant"), CONTROL_IDS["<|im_middle|>"]
    for answer in answers:
        assert answer.prompt[0] == CONTROL_IDS["<|im_user|>"]
        assert CONTROL_IDS[END_THINK] not in answer.prompt
        if style == "tiny_kimi":
            assert answer.prompt[-len(opening) - 1 :] == [*opening, CONTROL_IDS[THINK]]
            assert CONTROL_IDS[THINK] not in answer.output
        else:
            assert answer.prompt[-len(opening) :] == [*opening]
            assert answer.output[0] == CONTROL_IDS[THINK]
            assert CONTROL_IDS[THINK] not in answer.output[1:]
        assert (answer.finish_reason == "stop") == (answer.output[-1] == CONTROL_IDS[STOP])
    ways = Counter(ending(answer.output) for answer in answers)
    assert set(ways) == {END_THINK, TOOL_CALLS, STOP, "budget"}, ways
    assert len({tuple(answer.output) for answer in answers}) > 40
