"""What runs inside vLLM while hidden states are recorded: a KV connector that writes them into shards, and its loop.

With the speculative method `extract_hidden_states` (vLLM 0.32) the engine keeps the residual streams of the chosen
layers of every token in a paged cache of their own. When a request ends, its blocks stay with the connector until
it reports the request as sent; here the rows are copied out, the blocks are given back, and a few threads write the
rows to the byte offsets that the request brought along. A line in a FIFO then tells the driver (recorder.py).

Everything is matched by the ids that the engine itself read, never by order. What is copied but not yet written is
bounded: beyond the limit, blocks are simply kept, and a full cache makes the engine wait.
"""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.config import KVTransferConfig, VllmConfig, get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec, KVCacheConfig

from eagle3.serving.process import ParentPipe
from eagle3.serving.recorder import Placement, digest_ids
from eagle3.shards import DTYPES, encode_states, sample_bytes, tensor_bytes

WRITERS = 2
IDLE_STEP_S = 0.001


@dataclass(frozen=True)
class FinishedRequest:
    """A request whose states lie in these blocks of the cache. problem: why they must not be written, if so."""

    request_id: str
    placement: Placement
    blocks: list[int]
    problem: str | None


@dataclass
class RecordingMetadata(KVConnectorMetadata):
    """From scheduler to worker, once per step."""

    finished: list[FinishedRequest] = field(default_factory=list)


class HiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM makes one for the scheduler and one per worker; only the worker of tensor-parallel rank 0 writes."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._group = hidden_state_group(kv_cache_config)
        self._block_size = kv_cache_config.kv_cache_groups[self._group].kv_cache_spec.block_size
        self._finished: list[FinishedRequest] = []
        self._writer: StateWriter | None = None

    def get_finished_count(self) -> int:
        """One worker reports each request; without this vLLM waits for all ranks and never frees a block."""
        return 1

    # Scheduler side

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Nothing is ever loaded."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert num_external_tokens == 0

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of a finished request until its states are copied (True); the next step tells the worker."""
        if not request.kv_transfer_params:
            return False, None
        placement = Placement(**request.kv_transfer_params)
        problem = request_problem(request.prompt_token_ids, request.num_computed_tokens, placement)
        self._finished.append(FinishedRequest(request.request_id, placement, block_ids[self._group], problem))
        return True, None

    def build_connector_meta(self, scheduler_output: Any) -> RecordingMetadata:
        finished, self._finished = self._finished, []
        return RecordingMetadata(finished)

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find the paged cache of hidden states, [blocks, A + 1, block size, H]."""
        (layer,) = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        if kv_caches[layer].shape[2] != self._block_size:
            raise ValueError(f"blocks of hidden states hold {kv_caches[layer].shape[2]} tokens, not {self._block_size}")
        if get_tensor_model_parallel_rank() == 0:
            settings = self._kv_transfer_config.kv_connector_extra_config
            dtype = DTYPES[settings["dtype"]]
            self._writer = StateWriter(kv_caches[layer], dtype, settings["completions"], settings["max_pending_bytes"])

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Start what can be copied; report the requests whose blocks are free again. Called in every step."""
        if self._writer is None:
            return None, None
        if self.has_connector_metadata():
            self._writer.accept(self._get_connector_metadata().finished)
        return self._writer.advance() or None, None

    def shutdown(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


def hidden_state_group(config: KVCacheConfig) -> int:
    """Number of the KV cache group whose blocks hold the states: their own, or the only one. ValueError if neither."""
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    found = [number for number, spec in enumerate(specs) if isinstance(spec, HiddenStateCacheSpec)]
    if not found and len(specs) == 1:
        return 0
    if len(found) != 1:
        kinds = ", ".join(type(spec).__name__ for spec in specs)
        raise ValueError(f"this verifier's hidden states have no KV cache group of their own (groups: {kinds})")
    return found[0]


def request_problem(input_ids: Sequence[int] | None, computed: int, placement: Placement) -> str | None:
    """Why the states of a request must not be written: other ids than the sample's, or fewer states; None if neither.

    input_ids: what the engine read; computed: tokens whose states it has.
    """
    ids = input_ids or []
    if digest_ids(ids) != placement.ids_digest:
        return f"the engine read {len(ids)} ids that are not the sample's {placement.length}"
    if computed < placement.length:
        return f"the engine computed {computed} of {placement.length} tokens"
    return None


@dataclass
class _Copy:
    """Rows on their way out of the cache, as they are stored (shards.state_kinds).

    ready: recorded on the copy stream; None where the copy is complete.
    """

    request: FinishedRequest
    states: dict[str, torch.Tensor]
    ready: torch.cuda.Event | None

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.states.values())


class StateWriter:
    """Copies rows out of the cache and writes them as `dtype`; at most `max_pending_bytes` lie between the two."""

    def __init__(self, cache: torch.Tensor, dtype: torch.dtype, completions: str, max_pending_bytes: int):
        self._cache, self._dtype, self._max_pending = cache, dtype, max_pending_bytes
        self._waiting: deque[FinishedRequest] = deque()
        self._copying: list[_Copy] = []
        self._pending = 0
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._threads = ThreadPoolExecutor(WRITERS, thread_name_prefix="write-states")
        self._completions = os.open(completions, os.O_WRONLY)
        self._stream = torch.cuda.Stream(cache.device) if cache.is_cuda else None

    def accept(self, finished: list[FinishedRequest]) -> None:
        """Take over finished requests, blocks included."""
        self._waiting.extend(finished)

    def advance(self) -> set[str]:
        """Copy and submit what the limit allows; the ids of requests whose blocks are no longer needed.

        Raises whatever a writing thread met (a full disk, say): that ends the engine, and the driver reports it.
        """
        if self._error is not None:
            raise self._error
        freed = set()
        while self._waiting and self._has_room(self._waiting[0]):
            request = self._waiting.popleft()
            if request.problem is None:
                self._copying.append(self._start(request))
            else:
                freed.add(request.request_id)
                self._report(request)
        for copy in [copy for copy in self._copying if copy.ready is None or copy.ready.query()]:
            self._copying.remove(copy)
            freed.add(copy.request.request_id)
        return freed

    def close(self) -> None:
        """Wait for the writing threads."""
        self._threads.shutdown(wait=True)

    def _has_room(self, request: FinishedRequest) -> bool:
        _, layers, _, hidden = self._cache.shape
        needed = sample_bytes(request.placement.length, layers - 1, hidden, self._dtype)
        with self._lock:
            return self._pending == 0 or self._pending + needed <= self._max_pending

    def _start(self, request: FinishedRequest) -> _Copy:
        copy = self._copy_out(request)
        with self._lock:
            self._pending += copy.bytes
        self._threads.submit(self._write, copy)
        return copy

    def _copy_out(self, request: FinishedRequest) -> _Copy:
        if self._stream is None:
            return _Copy(request, self._states(request), None)
        self._stream.wait_stream(torch.cuda.current_stream(self._cache.device))
        with torch.cuda.stream(self._stream):
            states = {name: _to_pinned(tensor) for name, tensor in self._states(request).items()}
            ready = torch.cuda.Event()
            ready.record(self._stream)
        return _Copy(request, states, ready)

    def _states(self, request: FinishedRequest) -> dict[str, torch.Tensor]:
        """The request's states as they are stored, on the cache's device."""
        blocks, length = torch.tensor(request.blocks, device=self._cache.device), request.placement.length
        rows = self._cache.transpose(1, 2)  # [blocks, block size, A + 1, H]; a view
        assert length <= len(blocks) * rows.shape[1]
        if self._dtype != self._cache.dtype:
            return encode_states(rows.index_select(0, blocks).flatten(0, 1)[:length], self._dtype)
        parts = {"aux_hidden_states": rows[:, :, :-1], "last_hidden_states": rows[:, :, -1]}  # each value copied once
        return {name: part.index_select(0, blocks).flatten(0, 1)[:length] for name, part in parts.items()}

    def _write(self, copy: _Copy) -> None:
        try:
            if copy.ready is not None:
                copy.ready.synchronize()
            placement = copy.request.placement
            file = os.open(placement.path, os.O_WRONLY)
            try:
                for name, tensor in copy.states.items():
                    _write_at(file, tensor_bytes(tensor), placement.starts[name])
            finally:
                os.close(file)
            self._report(copy.request)
        except BaseException as error:
            self._error = error
        with self._lock:
            self._pending -= copy.bytes

    def _report(self, request: FinishedRequest) -> None:
        """Tell the driver, in one atomic write of a line (it stays far below PIPE_BUF)."""
        line = json.dumps({"ordinal": request.placement.ordinal, "problem": request.problem}) + "\n"
        os.write(self._completions, line.encode())


def _to_pinned(rows: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(rows, device="cpu", pin_memory=True).copy_(rows, non_blocking=True)


def _write_at(file: int, data: memoryview, start: int) -> None:
    data = data.cast("B")
    while data:
        written = os.pwrite(file, data, start)
        data, start = data[written:], start + written


def run_engine(pipe: ParentPipe, arguments: dict[str, Any]) -> None:
    """The recording engine, for EngineProcess: takes lists of (input_ids, kv_transfer_params), None to end.

    arguments: of vllm.EngineArgs. Sends {"cache_tokens": n} once the engine is ready; the rest goes to the FIFO.
    """
    transfer = KVTransferConfig(**arguments["kv_transfer_config"])
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments | {"kv_transfer_config": transfer}))
    cache = engine.vllm_config.cache_config
    if cache.enable_prefix_caching:
        raise ValueError("prefix caching is on; recorded states would miss the tokens that were not computed again")
    pipe.send({"cache_tokens": (cache.num_gpu_blocks or 0) * cache.block_size})
    completions = os.open(transfer.kv_connector_extra_config["completions"], os.O_WRONLY)
    judged: dict[str, tuple[int, ...]] = {}
    wait_s = 0.0
    while True:
        if pipe.waits(wait_s):
            message = pipe.receive()
            if message is None:
                return
            for input_ids, transfer_params in message:
                _add_request(engine, input_ids, transfer_params)
                if transfer_params["judged_rows"]:
                    judged[str(transfer_params["ordinal"])] = transfer_params["judged_rows"]
        started = time.monotonic()
        outputs = engine.step()  # also when nothing runs: finished requests are handed over and blocks freed in steps
        for output in outputs:
            if output.finished and output.request_id in judged:
                line = {"ordinal": int(output.request_id), "choices": _choices(output, judged.pop(output.request_id))}
                os.write(completions, (json.dumps(line) + "\n").encode())  # its states follow in a later step
        wait_s = 2 * IDLE_STEP_S if time.monotonic() - started < IDLE_STEP_S else 0.0


def _add_request(engine: LLMEngine, input_ids: list[int], transfer_params: dict[str, Any]) -> None:
    sampling = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        prompt_logprobs=1 if transfer_params["judged_rows"] else None,
        extra_args={"kv_transfer_params": transfer_params},
    )
    engine.add_request(str(transfer_params["ordinal"]), {"prompt_token_ids": input_ids}, sampling)


def _choices(output: RequestOutput, rows: Sequence[int]) -> list[int]:
    """The engine's most likely token behind each of these rows of a prompt."""
    told = output.prompt_logprobs
    assert told is not None
    likely = [told[row + 1] or {} for row in rows]  # the entry of a token holds what was expected in its place
    return [max(entry, key=lambda token: entry[token].logprob) for entry in likely]
