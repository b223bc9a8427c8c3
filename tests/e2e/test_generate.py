"""generate with a real vLLM on a tiny verifier: ids verbatim, killed and resumed, determinism, nothing left behind,
thinking bounded."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ruamel.yaml import YAML
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from eagle3 import schemas
from eagle3.params import Params, load_params
from eagle3.prompts import write_splits
from eagle3.serving.answers import Answer, Limits, Question, sampling_fields
from eagle3.serving.client import Client, Outcome, Service, run_async
from eagle3.serving.server import LocalServer
from eagle3.tables import Row, read_parts, read_table
from eagle3.verifier import identify_verifier, write_identity
from tests.stage_runs import stored_keys

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
MAX_MODEL_LEN = 256
TEXTS = [
    f"How many apples are left of {i} if you give away {i % 7}? Think about {'a b c ' * (i % 9)}" for i in range(48)
]
TOO_LONG = "many words " * 200


def write_params(path: Path, verifier: Path, **generate: Any) -> Params:
    """params.yaml for the tiny verifier, in float32 and with a small KV cache."""
    values = YAML(typ="safe", pure=True).load((ROOT / "params.yaml").read_text())
    values["verifier"] |= {"model": str(verifier), "dtype": "float32", "max_model_len": MAX_MODEL_LEN}
    values["verifier"]["chat_template"] = None
    values["engine"] |= {"cpu_kv_cache_gib": 0.25, "max_num_seqs": 32}
    values["generate"] |= {"max_new_tokens": 40, "concurrency": 12, "max_failed_share": 0.1, **generate}
    with path.open("w") as file:
        YAML(typ="safe", pure=True).dump(values, file)
    return load_params(path)


def prompt_row(i: int, text: str) -> Row:
    split = "validation" if i % 6 == 0 else "train"
    messages = [{"role": "user", "content": text}]
    place = {"source": "s", "source_row": i + 1, "category": "c", "split": split, "reference": None}
    return {"prompt_id": f"{i:064x}", "messages": messages, **place}


def template_ids(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])


def stored(work: Path) -> int:
    """Rows that are in the work store of a running stage."""
    return len(stored_keys(work / "generate" / "responses.sqlite"))


def lay_out(folder: Path, params: Params, texts: list[str]) -> tuple[list[Row], list[str]]:
    """The stage's inputs in a folder; returns the prompts and the command that runs the stage."""
    rows = [prompt_row(i, text) for i, text in enumerate(texts)]
    write_splits(folder / "prompts", rows)
    write_identity(identify_verifier(params.verifier, params.reasoning), folder / "verifier.json")
    names = ("prompts", "verifier.json", "responses", "metrics.json", "params.yaml")
    return rows, [sys.executable, "-m", "stages.generate", *(str(folder / name) for name in names)]


def start_midway(command: list[str], work: Path) -> tuple["subprocess.Popen[str]", list[psutil.Process]]:
    """The stage, running, with a dozen answers stored; and its processes, the guard first."""
    stage = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while stored(work) < 12:
        assert stage.poll() is None, stage.stderr and stage.stderr.read()
        time.sleep(0.1)
    return stage, psutil.Process(stage.pid).children(recursive=True)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return list(psutil.wait_procs(processes, timeout=15)[1])


def test_killed_midway_and_resumed_with_ids_as_the_template_says(tiny_verifier: Path, tmp_path: Path) -> None:
    params = write_params(tmp_path / "params.yaml", tiny_verifier)
    rows, command = lay_out(tmp_path, params, [*TEXTS, TOO_LONG])
    work = Path(os.environ["EAGLE3_WORK_DIR"])

    first, family = start_midway(command, work)
    ports = {c.laddr.port for p in family for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert len(family) >= 3  # guard, server, engine
    assert ports
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert not alive(family)
    for port in ports:
        with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
            probe.connect(("127.0.0.1", port))
    done = stored(work)
    assert done < len(TEXTS)

    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert not psutil.Process().children(recursive=True)
    answers = list(read_parts(tmp_path / "responses", schemas.RESPONSES))
    order = [row["prompt_id"] for held in (False, True) for row in rows if (row["split"] == "validation") is held]
    assert [answer["prompt_id"] for answer in answers] == [name for name in order if name != rows[-1]["prompt_id"]]
    rejected = list(read_table(tmp_path / "responses" / "rejected.parquet", schemas.REJECTED))
    assert [(row["row"], row["reason"]) for row in rejected] == [(rows[-1]["prompt_id"], "prompt too long")]
    metrics = YAML(typ="safe", pure=True).load((tmp_path / "metrics.json").read_text())
    assert metrics["reused"] >= done
    assert metrics["requests_sent"] == len(TEXTS) - done
    tokenizer = AutoTokenizer.from_pretrained(tiny_verifier)
    for answer in answers:
        assert answer["prompt_token_ids"] == template_ids(tokenizer, answer["messages"])
        assert len(answer["prompt_token_ids"]) + len(answer["output_token_ids"]) <= MAX_MODEL_LEN - 1
        assert (answer["finish_reason"] == "stop") == (answer["output_token_ids"][-1] == tokenizer.eos_token_id)

    third = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert third.returncode == 0
    assert "starting vLLM" not in third.stderr  # nothing missing, nothing started


@pytest.mark.exhaustive
def test_the_server_is_killed_and_the_next_run_asks_only_for_the_rest(tiny_verifier: Path, tmp_path: Path) -> None:
    """With a thinking budget too, which the server must know of: every answer that is not over by then is closed there.

    An opening marker at the end of the prompt counts as one token in vLLM 0.32 (_init_state_entry of its
    thinking_budget_state.py), so thinking gets as many tokens more as the marker has beyond the first.
    """
    params = write_params(tmp_path / "params.yaml", tiny_verifier, thinking_token_budget=8)
    settings = YAML(typ="safe", pure=True).load((tmp_path / "params.yaml").read_text())
    settings["reasoning"] = {"format": "custom", "start": "assistant\n", "end": " so:", "also_ended_by": []}
    with (tmp_path / "params.yaml").open("w") as file:
        YAML(typ="safe", pure=True).dump(settings, file)
    params = load_params(tmp_path / "params.yaml")
    _, command = lay_out(tmp_path, params, TEXTS)
    work = Path(os.environ["EAGLE3_WORK_DIR"])
    first, family = start_midway(command, work)
    for process in family[1:]:  # the first one is the guard
        process.kill()
    _, told = first.communicate()
    assert first.returncode == 1
    assert "error:" in told and "generate.log" in told and "Traceback" not in told, told
    assert not alive(family)
    done = stored(work)
    assert done < len(TEXTS)

    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    metrics = YAML(typ="safe", pure=True).load((tmp_path / "metrics.json").read_text())
    assert (metrics["reused"], metrics["requests_sent"]) == (done, len(TEXTS) - done)
    tokenizer = AutoTokenizer.from_pretrained(tiny_verifier)
    closing = tokenizer.encode(" so:", add_special_tokens=False)
    answers = list(read_parts(tmp_path / "responses", schemas.RESPONSES))
    assert len(answers) == len(TEXTS)
    place = 8 + len(tokenizer.encode("assistant\n", add_special_tokens=False)) - 1
    outputs = [answer["output_token_ids"] for answer in answers]
    assert sum(len(ids) > place for ids in outputs) > 40
    for ids in outputs:
        assert len(ids) <= place or ids[place : place + len(closing)] == closing, ids


@pytest.fixture(scope="module")
def server(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    folder = tmp_path_factory.mktemp("server")
    params = write_params(folder / "params.yaml", tiny_verifier)
    with LocalServer(params.verifier, params.engine, tiny_verifier, folder / "server.log") as running:
        yield running


def ask(server: LocalServer, folder: Path, verifier: Path, texts: list[str], **generate: Any) -> dict[str, Outcome]:
    params = write_params(folder / "params.yaml", verifier, **generate)
    identity = identify_verifier(params.verifier, params.reasoning)
    limits = Limits(identity.vocab_size, MAX_MODEL_LEN - 1, params.generate.min_room_tokens, frozenset((2,)), True)
    service = Service(
        (params.verifier.model,), params.generate, limits, identity.markers, "see the log", "ask for less"
    )
    outcomes: list[Outcome] = []

    async def main() -> None:
        async with Client([server.url], service) as client:
            assert await client.preflight() == "vllm 0.32.0"
            asked = [
                Question(text, [{"role": "user", "content": text}], sampling_fields(params.generate, text))
                for text in texts
            ]
            await client.answer_all(iter(asked), outcomes.append, server.failure, len(texts))
            assert await client.tokens_so_far() > 0

    run_async(main)
    assert len(outcomes) == len(texts)
    return {outcome.question.row_id: outcome for outcome in outcomes}


def ids(outcomes: dict[str, Outcome]) -> dict[str, list[int]]:
    found = {}
    for text, outcome in outcomes.items():
        assert isinstance(outcome.result, Answer), outcome.result
        found[text] = outcome.result.output_token_ids
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_do_not_depend_on_order_or_concurrency(
    server: LocalServer, tiny_verifier: Path, tmp_path: Path, temperature: float
) -> None:
    texts = TEXTS[:24]
    alone = ids(ask(server, tmp_path, tiny_verifier, texts, concurrency=1, max_new_tokens=16, temperature=temperature))
    crowd = ids(
        ask(server, tmp_path, tiny_verifier, texts[::-1], concurrency=24, max_new_tokens=16, temperature=temperature)
    )
    assert alone == crowd


def test_g14_prompts_at_the_limit(server: LocalServer, tiny_verifier: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_verifier)
    lengths = {}
    for count in range(150, 260):
        text = "z" * count
        lengths[text] = len(template_ids(tokenizer, [{"role": "user", "content": text}]))
    limit = MAX_MODEL_LEN - 1
    texts = [text for text, length in lengths.items() if limit - 18 <= length <= limit + 3 or length == limit - 60]
    outcomes = ask(server, tmp_path, tiny_verifier, texts, concurrency=8, max_new_tokens=8192)
    for text, outcome in outcomes.items():
        room = limit - lengths[text]
        if room < 16:
            assert not isinstance(outcome.result, Answer)
            assert outcome.result.reason == "prompt too long"
        else:
            assert isinstance(outcome.result, Answer)
            assert outcome.result.length <= limit
            assert outcome.sampling["max_tokens"] == room


def test_a_folder_that_is_no_model_names_the_log(tiny_verifier: Path, tmp_path: Path) -> None:
    params = write_params(tmp_path / "params.yaml", tiny_verifier)
    (tmp_path / "empty").mkdir()
    with (
        pytest.raises(
            ValueError, match=r"the vLLM server ended with exit code 1; log: .*server\.log; it says: .*empty"
        ),
        LocalServer(params.verifier, params.engine, tmp_path / "empty", tmp_path / "server.log"),
    ):
        pass
    assert not [p for p in psutil.Process().children(recursive=True) if "empty" in " ".join(p.cmdline())]
