"""An engine that records hidden states, as its driver sees it: submit samples, learn which are written.

The engine runs in a child process (process.py) with the plug-in of connector.py; this side imports no vllm. States
never pass through here: the plug-in writes them to their places, and a FIFO says when.
"""

import hashlib
import json
import os
import select
import shutil
import struct
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3.params import EngineParams, VerifierParams
from eagle3.serving.engine import engine_arguments, in_process_environment
from eagle3.serving.process import EngineProcess
from eagle3.verifier import VerifierIdentity

ENGINE = "eagle3.serving.connector:run_engine"
ADVICE = "finished shards are kept, run again to go on"
MIB = 1 << 20


def digest_ids(input_ids: Sequence[int]) -> str:
    """SHA-256 (hex) of token ids as little-endian int32."""
    return hashlib.sha256(struct.pack(f"<{len(input_ids)}i", *input_ids)).hexdigest()


@dataclass(frozen=True)
class Placement:
    """Where one sample's states belong; travels with the request as its kv_transfer_params.

    starts: for each tensor of states (shards.state_kinds) the byte offset in the file of the sample's first row.
    judged_rows: rows at which the engine is to tell the token that it would choose itself; none = it need not.
    """

    ordinal: int
    path: str
    starts: dict[str, int]
    length: int
    ids_digest: str
    judged_rows: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """A sample is done: written, or not for the reason in `problem`. choices: the engine's own at the judged rows."""

    ordinal: int
    problem: str | None
    choices: tuple[int, ...]


def recording_arguments(
    verifier: VerifierParams, engine: EngineParams, identity: VerifierIdentity, folder: Path, transfer: dict[str, Any]
) -> dict[str, Any]:
    """Engine arguments that turn vLLM into a recorder of the identity's auxiliary layers and of the last one.

    transfer: what the plug-in is told. One token of room is added, because vLLM generates at least one.
    """
    layers = [*identity.aux_layer_ids, identity.num_layers]
    return engine_arguments(verifier, engine, folder) | {
        "max_model_len": verifier.max_model_len + 1,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "disable_log_stats": True,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        },
        "kv_transfer_config": {
            "kv_connector": "HiddenStatesConnector",
            "kv_connector_module_path": "eagle3.serving.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": transfer,
        },
    }


class StateRecorder:
    """A context manager around the recording engine. Every error is a ValueError that names the log.

    dtype: in which states are stored. max_pending_mib: states copied out of the engine and not yet written.
    stall_timeout_s: longest time without news.
    """

    def __init__(
        self,
        verifier: VerifierParams,
        engine: EngineParams,
        identity: VerifierIdentity,
        folder: Path,
        log_path: Path,
        *,
        dtype: str,
        max_pending_mib: float,
        stall_timeout_s: float,
    ):
        self.outstanding = 0
        self._start_timeout_s, self._stall_timeout_s = engine.start_timeout_s, stall_timeout_s
        self._scratch = Path(tempfile.mkdtemp(prefix="eagle3-recorder-"))
        fifo = self._scratch / "completions"
        transfer = {"completions": str(fifo), "dtype": dtype, "max_pending_bytes": int(max_pending_mib * MIB)}
        arguments = recording_arguments(verifier, engine, identity, folder, transfer)
        environment = in_process_environment(engine)
        if verifier.max_model_len + 1 > identity.max_position_embeddings:
            environment["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # the extra token is generated but never read
        os.mkfifo(fifo)
        self._completions = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)  # also a writer: no end of file between engines
        self._unread = b""
        self._choices: dict[int, tuple[int, ...]] = {}  # of samples that are not done yet
        self._process = EngineProcess(ENGINE, (arguments,), environment, log_path, "recording engine", ADVICE)

    def __enter__(self) -> "StateRecorder":
        try:
            self._process.__enter__()
            self._process.receive(self._start_timeout_s)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stop()
        os.close(self._completions)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def submit(self, samples: Sequence[tuple[list[int], Placement]]) -> None:
        """Hand over samples: (input_ids, where their states belong)."""
        told = [(input_ids, asdict(placement)) for input_ids, placement in samples]
        self._process.send(told, self._stall_timeout_s)
        self.outstanding += len(samples)

    def completions(self) -> list[Completion]:
        """Wait for news: the samples finished since the last call, at least one of them."""
        deadline = time.monotonic() + self._stall_timeout_s
        while True:
            wait_s = max(0, deadline - time.monotonic())
            ready, _, _ = select.select([self._completions, self._process.fileno()], [], [], wait_s)
            if self._completions in ready:
                found = self._read()
                self.outstanding -= len(found)
                if found:
                    return found
            elif ready:
                self._process.receive(0)  # the engine says nothing while it records, unless it fails
            elif time.monotonic() >= deadline:
                raise self._process.stalled(self._stall_timeout_s)

    def _read(self) -> list[Completion]:
        *lines, self._unread = (self._unread + os.read(self._completions, 1 << 16)).split(b"\n")
        found = []
        for told in map(json.loads, lines):
            if "choices" in told:  # comes before the same sample's completion
                self._choices[told["ordinal"]] = tuple(told["choices"])
            else:
                found.append(Completion(told["ordinal"], told["problem"], self._choices.pop(told["ordinal"], ())))
        return found
