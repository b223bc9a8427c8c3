"""Stands in for the recording engine: states by a rule, no model. Imports no vllm, and torch only for fp8.

The rule: token t is always followed by `following(t)`; the last state of a row is the one-hot vector of the next
token, so that a head of one-hot rows gives exactly that. Auxiliary states are numbers that tell token and layer.
EAGLE3_FAKE holds faults as JSON, e.g. {"die_after": 5}; every request is a line in EAGLE3_FAKE_REQUESTS.
"""

import hashlib
import json
import os
import time
from typing import Any

import numpy as np

from eagle3.serving.process import ParentPipe

VOCABULARY = HIDDEN = 64


def following(token: int) -> int:
    """The token after this one, always."""
    return (token * 5 + 3) % VOCABULARY


def states_of(input_ids: list[int], layers: int) -> tuple[np.ndarray, np.ndarray]:
    """aux float32 [T, A, H] and last float32 [T, H]."""
    last = np.eye(VOCABULARY, dtype=np.float32)[[following(token) for token in input_ids]]
    aux = np.arange(HIDDEN, dtype=np.float32) + np.array(input_ids, dtype=np.float32)[:, None, None]
    return aux + np.arange(layers, dtype=np.float32)[None, :, None] * 100, last


def run_engine(pipe: ParentPipe, arguments: dict[str, Any]) -> None:
    """As connector.run_engine."""
    faults = json.loads(os.environ.get("EAGLE3_FAKE", "{}"))
    transfer = arguments["kv_transfer_config"]["kv_connector_extra_config"]
    config = arguments["speculative_config"]["draft_model_config"]["hf_config"]
    layers = len(config["eagle_aux_hidden_state_layer_ids"]) - 1
    if "refuse" in faults:
        raise ValueError(faults["refuse"])
    pipe.send({"cache_tokens": 1000})
    done = 0
    with open(transfer["completions"], "wb", buffering=0) as completions:  # noqa: PTH123
        while (message := pipe.receive()) is not None:
            for input_ids, placement in message[::-1] if "reversed" in faults else message:
                problem = "the engine read other ids" if done == faults.get("wrong_ids") else None
                done += 1
                _misbehave(faults, done)
                assert hashlib.sha256(np.array(input_ids, dtype="<i4").tobytes()).hexdigest() == placement["ids_digest"]
                if placement["judged_rows"] and "no_choices" not in faults:
                    choices = [following(input_ids[row]) for row in placement["judged_rows"]]
                    line = json.dumps({"ordinal": placement["ordinal"], "choices": choices})
                    completions.write(line.encode() + b"\n")
                if problem is None:
                    states = _spoil(faults, done, *states_of(input_ids, layers))
                    _write(placement, transfer["dtype"], *states, faults.get("halves_s", 0))
                with open(os.environ["EAGLE3_FAKE_REQUESTS"], "a") as log:  # noqa: PTH123
                    log.write(f"{placement['ids_digest']}\n")
                line = json.dumps({"ordinal": placement["ordinal"], "problem": problem})
                completions.write(line[:5].encode())  # lines may arrive in pieces
                completions.write(line[5:].encode() + b"\n")


def _misbehave(faults: dict[str, Any], done: int) -> None:
    time.sleep(faults.get("seconds_each", 0))
    if done == faults.get("die_after"):
        print("SomethingError: the engine met its end", flush=True)
        os._exit(3)
    if done == faults.get("hang_after"):
        time.sleep(600)
    if done == faults.get("raise_after"):
        raise OSError(28, "No space left on device")


def _spoil(faults: dict[str, Any], done: int, aux: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    match faults.get("spoil") if done == faults.get("spoil_at") else None:
        case "one NaN":
            aux[3, 1, 5] = np.nan
        case "one infinity":
            last[3, 5] = np.inf
        case "all NaN":
            aux[:], last[:] = np.nan, np.nan
        case "zeros":
            aux[:], last[:] = 0, 0
        case "constant row":
            aux[3, 1] = 7
        case "another sample":
            last = np.roll(last, 7, axis=1)
    if faults.get("shift_from", 1 << 30) <= done:
        last = np.roll(last, 1, axis=0)
    return aux, last


def _write(placement: dict[str, Any], dtype: str, aux: np.ndarray, last: np.ndarray, pause_s: float) -> None:
    """pause_s: what lies between two tensors."""
    file = os.open(placement["path"], os.O_WRONLY)
    for name, data in _stored(dtype, aux, last).items():
        os.pwrite(file, data, placement["starts"][name])
        time.sleep(pause_s)
    os.close(file)


def _stored(dtype: str, aux: np.ndarray, last: np.ndarray) -> dict[str, Any]:
    if dtype == "float32":
        return {"aux_hidden_states": aux.tobytes(), "last_hidden_states": last.tobytes()}
    import torch  # noqa: PLC0415 - takes seconds

    from eagle3.shards import DTYPES, encode_states, tensor_bytes  # noqa: PLC0415

    states = torch.cat([torch.from_numpy(aux), torch.from_numpy(last).unsqueeze(1)], dim=1)
    return {name: tensor_bytes(part) for name, part in encode_states(states, DTYPES[dtype]).items()}
