"""Verifiers that think, served by a real vLLM: prompts as the template says, markers where the styles put them."""

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from eagle3.digests import digest
from eagle3.prompts import write_splits
from eagle3.schemas import RESPONSES, TOKENS
from eagle3.serving.server import LocalServer
from eagle3.tables import Row, read_parts
from stages.generate import generate
from stages.reconstruct_tokens import reconstruct_tokens
from tests.tiny_kimi import CONTROL_IDS, END_THINK, STOP, THINK, TOOL_CALLS
from tests.tiny_reasoner import parse_reasoner, reasoner_prompts, right_output
from tests.token_tables import write_params, write_verifier_json

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
    parser = {"reasoning_parser": "kimi_k2"} if "kimi" in request.param else {}
    params = write_params(room / "params.yaml", folder, verifier__aux_layer_ids=None, engine__extra_args=parser)
    with LocalServer(params.verifier, params.engine, folder, room / "server.log") as server:
        yield Served(folder, server.url, AutoTokenizer.from_pretrained(folder))


def of(*verifiers: Any) -> pytest.MarkDecorator:
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


@of("tiny_kimi", pytest.param("tiny_kimi_thinking", marks=pytest.mark.exhaustive))
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


# -- through the stages


@dataclass(frozen=True)
class Run:
    """What generate and reconstruct-tokens made of a few questions."""

    responses: list[Row]
    samples: dict[str, Row]
    metrics: Row


def through_the_stages(served: Served, folder: Path, texts: list[str], **generate_params: object) -> Run:
    """The stages generate, with the server as its endpoint, and reconstruct-tokens."""
    changes = {f"generate__{name}": value for name, value in generate_params.items()}
    params = write_params(
        folder / "params.yaml",
        served.folder,
        verifier__aux_layer_ids=None,
        generate__endpoints=[served.url],
        generate__max_failed_share=0.2,  # some answers of random weights are a stop token alone
        reconstruct_tokens__max_rejected_share=0.5,
        reasoning__format="custom",
        reasoning__start=THINK,
        reasoning__end=END_THINK,
        reasoning__also_ended_by=[TOOL_CALLS],
        **changes,
    )
    write_verifier_json(folder / "verifier.json", params)
    write_splits(folder / "prompts", (prompt_row(text) for text in texts))
    paths = [folder / name for name in ("prompts", "verifier.json", "responses", "generate.json", "params.yaml")]
    generate(*paths)
    reconstruct_tokens(paths[2], paths[1], folder / "tokens", folder / "tokens.json", paths[4])
    samples = {row["sample_id"]: row for row in read_parts(folder / "tokens", TOKENS)}
    metrics = json.loads((folder / "tokens.json").read_text())
    return Run(list(read_parts(folder / "responses", RESPONSES)), samples, metrics)


def prompt_row(text: str) -> Row:
    """A row of schemas.PROMPTS."""
    row: Row = {"prompt_id": digest(text), "source": "s", "source_row": 1, "category": "c", "split": "train"}
    return row | {"messages": [{"role": "user", "content": text}], "reference": None}


def check_ids(served: Served, run: Run) -> None:
    """Every sample holds the engine's ids, byte by byte, behind the template's."""
    assert len(run.samples) >= 0.9 * len(run.responses)
    for response in run.responses:
        sample = run.samples.get(response["prompt_id"])
        if sample is None:
            continue  # fewer than two tokens
        kwargs = json.loads(response["chat_template_kwargs"])
        own = served.tokenizer.apply_chat_template(response["messages"], add_generation_prompt=True, **kwargs)
        assert sample["input_ids"] == own["input_ids"] + response["output_token_ids"]
        assert sample["prompt_length"] == len(own["input_ids"])
        assert not sample["rebuilt"]


@of("tiny_reasoner", pytest.param("tiny_reasoner_split", marks=pytest.mark.exhaustive))
@pytest.mark.parametrize("open_thinking", [False, True])
def test_spans_of_the_reasoner_follow_its_grammar(served: Served, open_thinking: bool, tmp_path: Path) -> None:
    """Every span, also of rows that a low budget cut, whether a marker is one token or several."""
    run = through_the_stages(
        served,
        tmp_path,
        reasoner_prompts(60, seed=5),
        max_new_tokens=24,
        chat_template_kwargs={"open_thinking": open_thinking},
    )
    check_ids(served, run)
    for sample in run.samples.values():
        output = served.tokenizer.decode(sample["input_ids"][sample["prompt_length"] :])
        thinking = served.tokenizer.decode(sample["input_ids"][sample["thinking_start"] : sample["thinking_end"]])
        reply = parse_reasoner(output)
        assert thinking.rstrip("\n") == output[: reply.thinking_end].rstrip("\n")  # blanks may share the marker's token
        assert sample["thinking_opened_by"] == ("prompt" if open_thinking else "model")
        assert sample["thinking_ended_by"] == ("budget" if reply.thinking_end is None else "marker")
        cut = None if reply.stopped else "thinking" if reply.thinking_end is None else "answer"
        assert sample["truncated_in"] == cut
    counted = run.metrics["sources"]["s"]
    assert min(counted["truncated_in_thinking"], counted["truncated_in_answer"]) >= 1


@of("tiny_kimi", pytest.param("tiny_kimi_thinking", marks=pytest.mark.exhaustive))
def test_spans_of_kimi_are_where_its_markers_are(
    served: Served, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """And the chat template applied to the finished conversation loses all thinking; our text route keeps it."""
    run = through_the_stages(served, tmp_path, TEXTS, max_new_tokens=32, temperature=1.0)
    check_ids(served, run)
    names = {END_THINK: "marker", TOOL_CALLS: "tool_call", STOP: "end_of_turn", "budget": "budget"}
    opened_by = "prompt" if request.node.callspec.params["served"] == "tiny_kimi" else "model"
    for sample in run.samples.values():
        output = sample["input_ids"][sample["prompt_length"] :]
        assert sample["thinking_opened_by"] == opened_by
        assert sample["thinking_ended_by"] == names[ending(output)]
        thinking = sample["input_ids"][sample["thinking_start"] : sample["thinking_end"]]
        closed = sample["thinking_ended_by"] == "marker"
        assert thinking == output[: len(thinking)]
        assert (thinking[-1:] == [CONTROL_IDS[END_THINK]]) == closed
        assert TOOL_CALLS not in served.tokenizer.decode(thinking)
    audit = run.metrics["audit"]
    assert audit["with_thinking"] > 30
    assert audit["naive_thinking_lost"] >= 0.9 * audit["with_thinking"]  # all that the server's parser told apart
    assert audit["kinds"]["reasoning_missing"] == 0
