"""A vLLM server of our own on loopback: started, waited for, watched, and ended together with its engine."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

from eagle3.console import say, visible
from eagle3.params import EngineParams, VerifierParams
from eagle3.serving.devices import WHOLE_MACHINE, Share, device_shares
from eagle3.serving.engine import engine_arguments, engine_environment
from eagle3.serving.ports import HOST, free_port, free_ports
from eagle3.serving.process import last_words, signal_group, start_child

GRACE_S = 15
NEWS_EVERY_S = 15
POLL_S = 0.5
LOG_TAIL_BYTES = 1 << 18
LOG_PREFIX = re.compile(
    r"^(\x1b\[[0-9;]*m)*(\(\w+ pid=\d+\))?(\x1b\[[0-9;]*m)*\s*([A-Z]+ [\d-]+ [\d:]+ \[[^\]]*\]\s?)?"
)
EXCEPTION = re.compile(r"^[\w.]*(Error|Exception|Interrupt|Exit)(:|$)")
KEYS = ("VLLM_API_KEY", "EAGLE3_API_KEY")  # variables that the server must not see: ours asks for no key


class LocalServer:
    """`with LocalServer(verifier, engine, folder, log_path) as server:` an OpenAI-compatible server at `server.url`.

    folder: the verifier's Hugging Face directory. All output of the server goes to `log_path`.
    Entering raises ValueError, naming the log and its last words, when the server ends or is not up in time. Leaving
    ends the server, its engine and everything else in its process group.
    """

    def __init__(
        self,
        verifier: VerifierParams,
        engine: EngineParams,
        folder: Path,
        log_path: Path,
        *,
        port: int | None = None,
        share: Share = WHOLE_MACHINE,
        command: list[str] | None = None,
    ):
        """port: None = any that is free. command: in place of `server_command`, for the same port."""
        self.log_path = log_path
        self._start_timeout_s = engine.start_timeout_s
        self._port = port or free_port()
        self._command = command or server_command(verifier, engine, folder, self._port)
        self._share = share
        with share.confined():
            self._environment = engine_environment(engine) | share.environment
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Base of the API, ending in /v1."""
        return f"http://{HOST}:{self._port}/v1"

    @property
    def pid(self) -> int:
        """Process id of the server, which is its process group too."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> "LocalServer":
        try:
            self.start()
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def failure(self) -> ValueError | None:
        """The error to raise if the server has ended, else None."""
        assert self._process is not None
        code = self._process.poll()
        return None if code is None else self._error(f"ended with exit code {code}")

    def end(self) -> None:
        """Ask it to end, and wait for nothing."""
        if self._process is not None:
            signal_group(self._process.pid, signal.SIGTERM)

    def stop(self) -> None:
        """Terminate the process group, and kill what is left of it after a grace time."""
        process, self._process = self._process, None
        if process is None:
            return
        signal_group(process.pid, signal.SIGTERM)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            signal_group(process.pid, signal.SIGKILL)
            process.wait()

    def start(self) -> None:
        """Start it, without waiting for it."""
        inherited = {name: value for name, value in os.environ.items() if name not in KEYS}
        guarded = ["eagle3.serving.guard", str(os.getpid()), *self._command]
        say(f"starting vLLM for the verifier (usually 20 to 90 s on a CPU); log: {self.log_path}")
        with self._share.confined():
            self._process = start_child(guarded, inherited | self._environment, self.log_path)

    def wait(self) -> None:
        """Wait until it answers. Raises ValueError when it ends, or is not up in time."""
        began = told = time.monotonic()
        while not self._healthy():
            error = self.failure()
            if error is not None:
                raise error
            now = time.monotonic()
            if now - began > self._start_timeout_s:
                raise self._error(f"was not up after engine.start_timeout_s = {self._start_timeout_s} s")
            if now - told >= NEWS_EVERY_S:
                told = now
                say(f"vLLM is starting, {now - began:.0f} s")
            time.sleep(POLL_S)
        say(f"vLLM is up after {time.monotonic() - began:.0f} s")

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _error(self, what: str) -> ValueError:
        said = server_words(self.log_path)
        return ValueError(f"the vLLM server {what}; log: {self.log_path}" + (f"; it says: {said}" if said else ""))


class LocalServers:
    """`with LocalServers(verifier, engine, folder, logs) as servers:` one for each log, on devices of its own.

    They start side by side. Raises ValueError as LocalServer, or where there are fewer devices.
    """

    def __init__(self, verifier: VerifierParams, engine: EngineParams, folder: Path, logs: Sequence[Path]):
        shares = device_shares(len(logs), engine.tensor_parallel_size, "generate.servers")
        self._servers = [
            LocalServer(verifier, engine, folder, log, port=port, share=share)
            for log, port, share in zip(logs, free_ports(len(logs)), shares, strict=True)
        ]

    def __enter__(self) -> "LocalServers":
        try:
            for server in self._servers:
                server.start()
            for server in self._servers:
                server.wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.end()
        with ExitStack() as stack:  # every one is stopped, whatever happens meanwhile
            for server in self._servers:
                stack.callback(server.stop)

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self._servers]

    def failure(self) -> ValueError | None:
        """The error to raise if all of them have ended; the client leaves out those that do."""
        failures = [server.failure() for server in self._servers]
        return failures[0] if all(failures) else None


def server_command(
    verifier: VerifierParams,
    engine: EngineParams,
    folder: Path,
    port: int,
    draft: Path | None = None,
    further: Mapping[str, Any] = MappingProxyType({}),
) -> list[str]:
    """Command line of the server, with this draft or none. The served name is verifier.model, unless `further`
    arguments, by their Python names, say another."""
    arguments: dict[str, Any] = engine_arguments(verifier, engine, folder, draft) | {
        "host": HOST,
        "port": port,
        "served_model_name": verifier.model,
        "chat_template": verifier.chat_template,
        "disable_uvicorn_access_log": True,
        **further,
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in arguments.items():
        command += _option(name.replace("_", "-"), value)
    return command


def server_words(log_path: Path) -> str:
    """What a vLLM log says went wrong: the last exception that is a cause, and the line behind it. Escaped."""
    with log_path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        lines = [LOG_PREFIX.sub("", line).strip() for line in file.read().decode(errors="replace").splitlines()]
    causes = [i for i, line in enumerate(lines) if EXCEPTION.match(line) and "root cause" not in line]
    if not causes:
        return last_words(log_path)
    said = [line for line in lines[causes[-1] : causes[-1] + 2] if line and not line.startswith(("Traceback", "File "))]
    return " ".join(visible(line, 400) for line in said)


def _option(name: str, value: Any) -> list[str]:
    """One setting as vLLM's command line takes it: flags with a --no- form, JSON for maps, several words for lists."""
    match value:
        case None:
            return []
        case bool():
            return [f"--{name}" if value else f"--no-{name}"]
        case dict():
            return [f"--{name}", json.dumps(value)]
        case list():
            return [f"--{name}", *map(str, value)]
        case _:
            return [f"--{name}", str(value)]
