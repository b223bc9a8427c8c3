"""The local server: up or a clear error, and never anything left behind. Fake servers stand in for vLLM here."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from eagle3.params import EngineParams, VerifierParams, load_params
from eagle3.serving import server as server_module
from eagle3.serving.server import LocalServer, LocalServers, server_command, server_words

ROOT = Path(__file__).parent.parent
PARAMS = load_params(ROOT / "params.yaml")
VERIFIER: VerifierParams = PARAMS.verifier
ENGINE: EngineParams = PARAMS.engine.model_copy(update={"start_timeout_s": 20})

#: A server with an engine of its own as a grandchild, as vLLM has one; its arguments: port, file for the engine's pid.
FAKE = """
import http.server, os, pathlib, signal, subprocess, sys
engine = subprocess.Popen([sys.executable, "-c", "import signal, time\\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\ntime.sleep(600)"])
pathlib.Path(sys.argv[2]).write_text(str(engine.pid))
print("KEYS", sorted(name for name in os.environ if name.endswith("API_KEY")), flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def fake(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str) -> None:
    def command(_v: VerifierParams, _e: EngineParams, _f: Path, port: int) -> list[str]:
        return [sys.executable, "-c", script, str(port), *arguments]

    monkeypatch.setattr(server_module, "server_command", command)


def gone(pid: int, within_s: float = 10) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def children() -> list[psutil.Process]:
    return list(psutil.Process().children(recursive=True))


def test_up_and_down_with_the_engine_that_ignores_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_API_KEY", "sk-secret")
    monkeypatch.setenv("VLLM_API_KEY", "sk-other")
    fake(monkeypatch, FAKE, str(tmp_path / "pid"))
    with LocalServer(VERIFIER, ENGINE, tmp_path, tmp_path / "logs" / "server.log") as server:
        engine = int((tmp_path / "pid").read_text())
        assert server.failure() is None
        assert psutil.pid_exists(engine)
    assert gone(engine)
    assert not children()
    assert "KEYS []" in (tmp_path / "logs" / "server.log").read_text()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_any_exception_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    fake(monkeypatch, FAKE, str(tmp_path / "pid"))
    with pytest.raises(error), LocalServer(VERIFIER, ENGINE, tmp_path, tmp_path / "server.log"):
        raise error
    assert gone(int((tmp_path / "pid").read_text()))
    assert not children()


def test_dying_at_the_start_names_the_log_and_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, "print('INFO fine'); raise OSError('no \\x1b[31mmodel here')")
    with (
        pytest.raises(
            ValueError, match=r"ended with exit code 1; log: .*server\.log; it says: .*OSError.*model here"
        ) as error,
        LocalServer(VERIFIER, ENGINE, tmp_path, tmp_path / "server.log"),
    ):
        pass
    assert "\x1b" not in str(error.value)
    assert not children()


def test_the_cause_is_told_rather_than_what_followed(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        "\x1b[0;36m(APIServer pid=1)\x1b[0;0m WARNING 11-29 23:11:14 [utils.py:2] errors like OSError may follow\n"
        "(EngineCore pid=2) ERROR 11-29 23:11:15 [core.py:3] Traceback (most recent call last):\n"
        "(EngineCore pid=2) ERROR 11-29 23:11:15 [core.py:3] pydantic_core.ValidationError: 1 validation error\n"
        "(EngineCore pid=2) ERROR 11-29 23:11:15 [core.py:3]   Value error, no KV cache\n"
        "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert server_words(log) == "pydantic_core.ValidationError: 1 validation error Value error, no KV cache"


def test_too_slow_a_start_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, "import time; print('loading', flush=True); time.sleep(600)")
    engine = ENGINE.model_copy(update={"start_timeout_s": 4})
    with (
        pytest.raises(ValueError, match=r"engine\.start_timeout_s = 4 s; log: .*; it says: loading"),
        LocalServer(VERIFIER, engine, tmp_path, tmp_path / "server.log"),
    ):
        pass
    assert not children()


def test_death_while_running_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, FAKE, str(tmp_path / "pid"))
    with LocalServer(VERIFIER, ENGINE, tmp_path, tmp_path / "server.log") as server:
        child = psutil.Process(server.pid).children()[0]
        child.kill()
        assert gone(server.pid)
        error = server.failure()
        assert error is not None
        assert "exit code 137" in str(error)
    assert gone(int((tmp_path / "pid").read_text()))


def test_several_servers_on_devices_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle3.serving.devices.usable_cores", lambda: sorted(os.sched_getaffinity(0)) * 2)
    fake(monkeypatch, "import os; print('PLACE', os.environ['VLLM_CPU_OMP_THREADS_BIND'], flush=True)\n" + FAKE, "pid")
    monkeypatch.chdir(tmp_path)
    logs = [tmp_path / "logs" / f"{number}.log" for number in (1, 2)]
    with LocalServers(VERIFIER, ENGINE, tmp_path, logs) as servers:
        assert len(set(servers.urls)) == 2
        assert all("PLACE" in log.read_text() for log in logs)
        assert servers.failure() is None
        one, two = (process.pid for process in children() if "guard" in " ".join(process.cmdline()))
        psutil.Process(one).children()[0].kill()
        assert gone(one)
        assert servers.failure() is None  # the other one still answers
        psutil.Process(two).children()[0].kill()
        assert gone(two)
        assert "exit code 137" in str(servers.failure())
    assert not children()


def test_servers_of_which_one_does_not_start_are_all_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle3.serving.devices.usable_cores", lambda: sorted(os.sched_getaffinity(0)) * 2)
    fake(monkeypatch, "import os, sys\nif 'b.log' in os.readlink('/proc/self/fd/1'): sys.exit(9)\n" + FAKE, "pid")
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(ValueError, match=r"ended with exit code 9; log: .*b\.log"),
        LocalServers(VERIFIER, ENGINE, tmp_path, [tmp_path / "a.log", tmp_path / "b.log"]),
    ):
        pass
    assert not children()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_whole_group_dies_with_a_killed_stage(tmp_path: Path, number: int) -> None:
    script = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        import pytest
        from eagle3.serving.server import LocalServer
        from eagle3.stage import run_stage
        from tests.test_server import ENGINE, FAKE, VERIFIER, fake

        def stage() -> None:
            fake(pytest.MonkeyPatch(), FAKE, {str(tmp_path / "pid")!r})
            with LocalServer(VERIFIER, ENGINE, Path("."), Path({str(tmp_path / "server.log")!r})) as server:
                print(server.pid, flush=True)
                time.sleep(600)

        run_stage(stage)
    """)
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, env=os.environ, text=True)
    assert process.stdout is not None
    guard = int(process.stdout.readline())
    server = psutil.Process(guard).children()[0].pid
    engine = int((tmp_path / "pid").read_text())
    process.send_signal(number)
    process.wait(30)
    assert all(map(gone, (guard, server, engine)))


def test_the_command_says_everything_and_listens_on_loopback_only() -> None:
    verifier = VERIFIER.model_copy(update={"chat_template": "my.jinja", "model": "owner/name"})
    extra = {"kv_cache_dtype": "auto", "hf_overrides": {"a": 1}, "enable_prefix_caching": False}
    engine = ENGINE.model_copy(update={"extra_args": extra})
    command = server_command(verifier, engine, Path("/folder"), 1234)
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    pairs = dict(zip(command[3:], [*command[4:], ""], strict=True))
    assert pairs["--host"] == "127.0.0.1"
    assert pairs["--port"] == "1234"
    assert pairs["--model"] == "/folder"
    assert pairs["--served-model-name"] == "owner/name"
    assert pairs["--chat-template"] == "my.jinja"
    assert pairs["--generation-config"] == "vllm"
    assert pairs["--hf-overrides"] == '{"a": 1}'
    assert {"--no-trust-remote-code", "--no-enable-prefix-caching", "--enforce-eager"} <= set(command)
