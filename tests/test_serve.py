"""`eagle3 serve`: its command line, and that nothing outlives it. A fake server stands in for vLLM here."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from eagle3.lineage import draft_digests, write_lineage
from eagle3.params import load_params
from eagle3.serving.engine import runs_on_cpu
from eagle3.serving.ports import free_port
from eagle3.serving.serve import choose_num_speculative_tokens, choose_port, printable, serve_words
from eagle3.serving.speculative import settings
from eagle3.verifier import read_identity
from tests.dvc_project import eagle3
from tests.test_lineage import LINEAGE
from tests.test_server import FAKE, gone
from tests.token_tables import write_params, write_verifier_json

ROOT = Path(__file__).parent.parent
PARAMS = load_params(ROOT / "params.yaml")


@pytest.mark.parametrize(
    ("metrics", "chosen"),
    [
        ({"best_num_speculative_tokens": 5}, 5),
        ({"best_num_speculative_tokens": 0}, settings(PARAMS.evaluate)[0].num_speculative_tokens),
        ({"speedup": 1.5}, settings(PARAMS.evaluate)[0].num_speculative_tokens),
        (None, settings(PARAMS.evaluate)[0].num_speculative_tokens),
    ],
)
def test_as_many_tokens_are_drafted_as_was_best(metrics: dict[str, Any] | None, chosen: int) -> None:
    assert choose_num_speculative_tokens(PARAMS, metrics) == chosen


def test_a_port_that_is_taken_is_told_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"^--port {port}: Address already in use; leave it out"):
            choose_port(port)
        assert choose_port(None) != port
    assert choose_port(free_port()) > 0


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_the_command_has_what_the_verifier_and_the_draft_need(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"kv_lora_rank": 16}')
    words = serve_words(PARAMS, tmp_path, Path("data/draft"), 4, 12345, ["--reasoning-parser", "qwen3"])
    assert words[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert (option(words, "--host"), option(words, "--port")) == ("127.0.0.1", "12345")
    assert option(words, "--max-model-len") == str(PARAMS.verifier.max_model_len)
    assert option(words, "--dtype") == PARAMS.verifier.dtype and option(words, "--generation-config") == "auto"
    speculative = {"method": "eagle3", "model": "data/draft", "num_speculative_tokens": 4}
    assert json.loads(option(words, "--speculative-config")) == speculative
    assert words[-2:] == ["--reasoning-parser", "qwen3"] and "--no-trust-remote-code" in words
    assert ("--compilation-config" in words) == runs_on_cpu()  # latent attention on a CPU
    engine = PARAMS.engine.model_copy(update={"tensor_parallel_size": 8})
    hub = {"trust_remote_code": True, "model": "Qwen/Qwen3-8B", "chat_template": "mine.jinja"}
    other = PARAMS.model_copy(update={"engine": engine, "verifier": PARAMS.verifier.model_copy(update=hub)})
    words = serve_words(other, tmp_path, Path("data/draft"), 4, 12345, [])
    assert option(words, "--tensor-parallel-size") == "8" and "--trust-remote-code" in words
    names = words.index("--served-model-name")
    assert words[names + 1 : names + 3] == ["Qwen/Qwen3-8B", "Qwen3-8B"]
    assert option(words, "--chat-template") == "mine.jinja"


def test_what_is_printed_is_a_command_for_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = "import os, sys, json; print(json.dumps([sys.argv[1:], os.environ['VLLM_HOST_IP']]))"
    words = [sys.executable, "-c", program, "it's", '{"a": "$HOME"}', str(tmp_path / "model dir")]
    done = subprocess.run(printable(words, PARAMS), shell=True, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [["it's", '{"a": "$HOME"}', "model dir"], "127.0.0.1"]
    assert shlex.split(printable(words, PARAMS))[0] == "env"


@pytest.fixture
def project(tmp_path: Path, tiny_verifier: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """params.yaml, data/verifier.json and a draft of that verifier that consists of its lineage; the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("data/draft").mkdir(parents=True)
    write_verifier_json(Path("data/verifier.json"), write_params(Path("params.yaml"), tiny_verifier))
    for name in ("config.json", "model.safetensors"):
        Path("data/draft", name).write_text("{}")
    verifier = read_identity(Path("data/verifier.json"))
    write_lineage(Path("data/draft"), replace(LINEAGE, draft=draft_digests(Path("data/draft")), verifier=verifier))
    return tmp_path


def test_print_starts_nothing(project: Path) -> None:
    done = eagle3("serve", "--print", "--num-speculative-tokens", "2", "--", "--api-key", "x")
    assert done.exit_code == 0, done.output
    words = shlex.split(done.stdout)
    assert words[0] == "env" and words[-2:] == ["--api-key", "x"]
    assert json.loads(option(words, "--speculative-config"))["num_speculative_tokens"] == 2
    assert not (project / "work").exists() and not (project / ".work").exists()


def test_x08_a_draft_of_another_verifier_is_not_served(project: Path) -> None:
    told = json.loads(Path("data/verifier.json").read_text())
    Path("data/verifier.json").write_text(json.dumps(told | {"digest": "e" * 64}))
    done = eagle3("serve", "--print")
    assert done.exit_code == 1 and "was trained for verifier" in done.stderr


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda: Path("data/draft/lineage.json").unlink(), "`eagle3 import` for a checkpoint from elsewhere"),
        (lambda: Path("data/draft/model.safetensors").write_text("[]"), "differs from its lineage"),
        (lambda: Path("data/verifier.json").unlink(), "`dvc repro verifier` makes it"),
    ],
)
def test_what_is_missing_is_told_before_anything_starts(project: Path, change: Any, told: str) -> None:
    change()
    done = eagle3("serve")
    assert done.exit_code == 1
    assert told in done.stderr.splitlines()[-1]


def start(folder: Path, script: str, *arguments: str) -> "subprocess.Popen[str]":
    """`serve` in a process of its own with a fake server in place of vLLM; SIGINT is ignored where it starts."""
    port = free_port()
    program = (
        "import sys; from pathlib import Path; from eagle3.console import guarded;"
        "from eagle3.params import load_params;"
        "from eagle3.serving.serve import serve;"
        "guarded(serve)(load_params(Path(sys.argv[1])), Path(), sys.argv[3:], int(sys.argv[2]))"
    )
    words = [sys.executable, "-c", script, str(port), *arguments, "--served-model-name", "fake"]
    return subprocess.Popen(
        [sys.executable, "-c", program, str(ROOT / "params.yaml"), str(port), *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # noqa: PLW1509 - as a shell's background job
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_it(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, FAKE, str(tmp_path / "pid"))
    assert process.stdout is not None
    said = process.stdout.readline()
    assert said.startswith("http://127.0.0.1:") and said.endswith("/v1 serves fake; Ctrl-C ends it\n")
    engine = int((tmp_path / "pid").read_text())
    own = psutil.Process(process.pid).children(recursive=True)
    assert engine in [child.pid for child in own]
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == (-9 if number == signal.SIGKILL else 0)
    assert "Traceback" not in told
    assert all(gone(child.pid) for child in own)


def test_ctrl_c_while_it_starts(tmp_path: Path) -> None:
    process = start(tmp_path, "import time; time.sleep(600)")
    assert process.stderr is not None
    assert process.stderr.readline().startswith("starting vLLM")
    own = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert all(gone(child.pid) for child in own)


def test_a_server_that_ends_by_itself_is_an_error_that_names_its_log(tmp_path: Path) -> None:
    for script in (
        "raise ValueError('no room for the KV cache')",
        FAKE.replace(
            "http.server.HTTPServer",
            "import threading, os as o; threading.Timer(4, o._exit, [7]).start()\nhttp.server.HTTPServer",
        ),
    ):
        process = start(tmp_path, script, str(tmp_path / "pid"))
        _, told = process.communicate(timeout=120)
        assert process.returncode == 1
        last = told.splitlines()[-1]
        assert last.startswith("error: the vLLM server ended with exit code ") and "/logs/serve-" in last
