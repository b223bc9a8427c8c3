"""The stage generate and a fake server, each in a process of its own to be killed and looked into."""

import json
import multiprocessing
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from eagle3 import schemas
from eagle3.digests import canonical_json, digest
from eagle3.params import load_params
from eagle3.prompts import write_splits
from eagle3.reasoning import NO_MARKERS
from eagle3.serving.answers import make_question, unit_key
from eagle3.tables import Row, read_parts, read_table
from eagle3.verifier import VerifierIdentity
from stages.generate import generate
from tests.faulty_server import MODEL, VOCAB

ROOT = Path(__file__).parent.parent
ENGINE = "vllm 9.9.9"  # as the fake server calls itself
IDENTITY = VerifierIdentity(MODEL, "d" * 64, "L", 8, 8, VOCAB, 512, 1e-6, (2, 4, 5), (2,), "float32", "x", NO_MARKERS)


def settings(**changes: Any) -> dict[str, Any]:
    """What params.yaml has other than ours for the fake server: dotted settings."""
    own = {"max_new_tokens": 32, "retries": 2, **changes}
    return {"verifier.model": MODEL, "verifier.max_model_len": 512} | {f"generate.{k}": v for k, v in own.items()}


def prompt_row(i: int, text: str) -> Row:
    """A row of schemas.PROMPTS; every fifth is for validation."""
    common = {"source": "s", "source_row": i, "category": "c", "split": "validation" if i % 5 == 0 else "train"}
    return {
        "prompt_id": digest(text),
        "messages": [{"role": "user", "content": text}],
        "reference": None,
        **common,
    }


class Stage:
    """The stage generate with endpoints over prompts in a folder: called, or as a process to kill."""

    def __init__(self, folder: Path, url: str, texts: list[str], **changes: Any):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.texts = folder, texts
        lines = (ROOT / "params.yaml").read_text().splitlines()
        for name, value in settings(endpoints=[url], **changes).items():
            section, key = name.split(".")
            start = lines.index(f"{section}:")
            at = next(i for i, line in enumerate(lines) if i > start and line.startswith(f"  {key}:"))
            lines[at] = f"  {key}: {json.dumps(value)}"
        (folder / "params.yaml").write_text("\n".join(lines) + "\n")
        write_splits(folder / "prompts", (prompt_row(i, text) for i, text in enumerate(texts)))
        (folder / "verifier.json").write_text(canonical_json(asdict(IDENTITY)))

    def paths(self) -> list[Path]:
        names = ("prompts", "verifier.json", "responses", "metrics.json", "params.yaml")
        return [self.folder / name for name in names]

    def start(self, before: str = "") -> "subprocess.Popen[str]":
        """The stage as a command, after some lines of Python."""
        script = f"import sys\n{before}\nfrom eagle3.stage import run_stage\nfrom stages.generate import generate\n"
        command = [sys.executable, "-c", script + "run_stage(generate)", *map(str, self.paths())]
        return subprocess.Popen(command, cwd=ROOT, env=os.environ, stderr=subprocess.PIPE, text=True)

    def fork(self) -> ForkProcess:
        """The stage as a copy of this process, which has everything imported already."""
        process = multiprocessing.get_context("fork").Process(target=self.run)
        process.start()
        return process

    def run(self) -> None:
        generate(*self.paths())

    def rows(self) -> list[Row]:
        return list(read_parts(self.folder / "responses", schemas.RESPONSES))

    def lasting_rows(self) -> list[Row]:
        """The rows without what differs from run to run."""
        return [{key: row[key] for key in row if key not in ("latency_s", "attempts")} for row in self.rows()]

    def rejected(self) -> dict[str, str]:
        """Prompt id -> reason, of the rows without an answer."""
        path = self.folder / "responses" / "rejected.parquet"
        return {row["row"]: row["reason"] for row in read_table(path, schemas.REJECTED)}

    def metrics(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "metrics.json").read_text())
        return found

    def expected_order(self) -> list[str]:
        split = [[digest(t) for i, t in enumerate(self.texts) if (i % 5 == 0) is held] for held in (False, True)]
        return split[0] + split[1]

    def kept(self, work: Path) -> set[str]:
        """The texts whose answers are in the work store."""
        params = load_params(self.folder / "params.yaml")
        there = stored_keys(work / "generate" / "responses.sqlite")
        questions = ((make_question(prompt_row(0, text), params.generate), text) for text in self.texts)
        return {
            text
            for question, text in questions
            if unit_key(question, params.generate, IDENTITY.digest, ENGINE, params.verifier.max_model_len) in there
        }


def stored_keys(path: Path) -> set[str]:
    """The keys in a store that a process may have open, or had when it was killed: of a copy."""
    with tempfile.TemporaryDirectory() as folder:
        for name in (path.name, f"{path.name}-wal"):
            if path.with_name(name).exists():
                shutil.copyfile(path.with_name(name), Path(folder) / name)
        try:
            store = sqlite3.connect(Path(folder) / path.name)
            try:
                return {key for (key,) in store.execute("SELECT key FROM units")}
            finally:
                store.close()
        except sqlite3.Error:
            return set()


class ServerProcess:
    """`with ServerProcess(folder, mode) as server:` the fake server as a process; `restart` uses the same port."""

    def __init__(self, folder: Path, mode: str = "plain", delay_s: float = 0.0):
        self.log, self._mode, self._delay_s, self._port = folder / "server.log", mode, delay_s, 0
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "ServerProcess":
        words = ["tests.faulty_server", str(self._port), str(self.log), str(self._delay_s), self._mode]
        self.process = subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self._port = int(self.process.stdout.readline())
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def restart(self) -> None:
        self.__enter__()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    def events(self) -> list[tuple[str, str]]:
        """(asked | answered, text) of every request so far."""
        if not self.log.exists():
            return []
        lines = self.log.read_text().splitlines()
        return [(event, text) for event, _, text in (line.partition(" ") for line in lines)]

    def texts(self, event: str, since: int = 0) -> list[str]:
        return [text for kind, text in self.events()[since:] if kind == event]


def wait_until(condition: Callable[[], bool], within_s: float = 300) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)
