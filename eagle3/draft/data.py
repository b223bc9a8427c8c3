"""Hidden-state shards to packed batches, and the one place where positions are shifted.

For a sample of T tokens x_0 .. x_{T-1}, row i stands for position i and is read like this:

    step  embedding      state            target: verifier logits at  predicts     counts if these were generated
    0     x_{i+1}        fc(aux_i)        i+1                         x_{i+2}      x_{i+1} and x_{i+2}
    k     x_{i+1+k}      h_{k-1,i}        i+1+k                       x_{i+2+k}    x_{i+1} and x_{i+2+k}

Serving drafts first from the first generated token, so a row whose x_{i+1} is a prompt token never occurs; its step-0
key does. Hence *context rows* 0 .. last counted row (keys of step 0) and *query rows* first to last counted row.

Letters: K steps, T tokens of a sample, N context rows, R query rows, U target rows of a batch, A auxiliary layers, H
hidden size.
"""

import hashlib
import json
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from eagle3.digests import digest_tokens
from eagle3.draft.attention import Document
from eagle3.schemas import STATES
from eagle3.shards import Sample, Shard, open_shard
from eagle3.tables import INDEX, read_table
from eagle3.verifier import VerifierIdentity

WINDOW = 512  # samples that are packed together; random order within and between windows
AHEAD = 2  # optimiser steps whose batches are read in advance
OPEN_SHARDS = 64


@dataclass(frozen=True, slots=True)
class SampleRef:
    """Where a sample lies. There is one for every sample of a corpus, so it is kept small."""

    sample_id: str
    sample_digest: str
    split: str
    shard: str
    position: int
    length: int
    loss_tokens: int


@dataclass(frozen=True)
class Corpus:
    """The samples of data/hidden_states by split; `skipped` of them teach nothing (fewer than 2 generated tokens)."""

    folder: Path
    train: list[SampleRef]
    validation: list[SampleRef]
    skipped: list[SampleRef]
    fingerprint: str  # digest of what the contents follow from: samples in order, each with its shard's digest


@dataclass(frozen=True)
class Batch:
    """Packed samples, as tensors of one device.

    aux_hidden_states [N, A*H]; context_ids int64 [N]: x_{i+1}; context_positions int64 [N]: i; documents: their context
    and query rows; rows int64 [R]: the query rows among the context rows; step_ids int64 [K, R]: x_{i+1+k};
    target_states [U, H]: last_hidden_states at the target positions; target_ids int64 [U]: the tokens that came next;
    source int64 [K, U]: the query row that predicts target u at step k; counted bool [K, U].
    """

    sample_ids: tuple[str, ...]
    tokens: int
    aux_hidden_states: torch.Tensor
    context_ids: torch.Tensor
    context_positions: torch.Tensor
    documents: tuple[Document, ...]
    rows: torch.Tensor
    step_ids: torch.Tensor
    target_states: torch.Tensor
    target_ids: torch.Tensor
    source: torch.Tensor
    counted: torch.Tensor

    def to(self, device: torch.device) -> "Batch":
        """The same batch on a device."""
        return replace(
            self,
            aux_hidden_states=self.aux_hidden_states.to(device),
            context_ids=self.context_ids.to(device),
            context_positions=self.context_positions.to(device),
            rows=self.rows.to(device),
            step_ids=self.step_ids.to(device),
            target_states=self.target_states.to(device),
            target_ids=self.target_ids.to(device),
            source=self.source.to(device),
            counted=self.counted.to(device),
        )


def read_corpus(folder: Path, verifier: VerifierIdentity) -> Corpus:
    """Read the index and check every shard against the verifier. Raises ValueError that names row or shard."""
    samples: list[SampleRef] = []
    shards: set[str] = set()
    seen: dict[str, str] = {}
    contents = hashlib.sha256()
    for row in read_table(folder / INDEX, STATES):
        split, shard = sys.intern(row["split"]), sys.intern(row["shard"])  # few values, each many times
        ref = SampleRef(
            row["sample_id"], row["sample_digest"], split, shard, row["position"], row["length"], row["loss_tokens"]
        )
        if Path(ref.shard).name != ref.shard or ref.split not in ("train", "validation"):
            raise ValueError(
                f"{folder / INDEX}: sample {ref.sample_id} has shard {ref.shard!r} and split {ref.split!r}"
            )
        if seen.setdefault(ref.sample_id, ref.split) != ref.split:
            raise ValueError(f"{folder / INDEX}: sample {ref.sample_id} is in the train and the validation split")
        contents.update(f"{ref.sample_id} {ref.split} {row['shard_sha256']} {ref.position}\n".encode())
        shards.add(ref.shard)
        samples.append(ref)
    for name in sorted(shards):
        _check_shard(folder / name, verifier)
    useful = [ref for ref in samples if _teaches(ref)]
    if not any(ref.split == "train" for ref in useful):
        raise ValueError(f"{folder / INDEX}: no train sample with at least 2 generated tokens; nothing to train on")
    return Corpus(
        folder=folder,
        train=[ref for ref in useful if ref.split == "train"],
        validation=[ref for ref in useful if ref.split == "validation"],
        skipped=[ref for ref in samples if not _teaches(ref)],
        fingerprint=contents.hexdigest(),
    )


def _teaches(ref: SampleRef) -> bool:
    return ref.loss_tokens >= 2 and ref.length >= 3


def _check_shard(path: Path, verifier: VerifierIdentity) -> None:
    metadata = open_shard(path).metadata
    if metadata["key"] != path.stem:
        raise ValueError(f"{path}: it holds the shard {metadata['key']}: renamed or swapped; {_remedy(path)}")
    found = {key: metadata[key] for key in ("verifier_digest", "hidden_size", "prenorm")}
    expected = {"verifier_digest": verifier.digest, "hidden_size": str(verifier.hidden_size), "prenorm": "true"}
    found["aux_layer_ids"] = str(json.loads(metadata["aux_layer_ids"]))
    expected["aux_layer_ids"] = str(list(verifier.aux_layer_ids))
    for key, value in expected.items():
        if found[key] != value:
            raise ValueError(
                f"{path}: {key} is {found[key]}, but data/verifier.json says {value}: states of another verifier; "
                "run `dvc repro extract`"
            )


def count_generated(folder: Path, refs: Sequence[SampleRef], vocab_size: int) -> torch.Tensor:
    """How often each token was generated in these samples: int64 [V]. Raises ValueError for ids outside V."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for ref in refs:
        sample = _load(folder, ref)
        generated = sample.input_ids[sample.loss_mask].long()
        if len(generated) and not 0 <= int(generated.min()) <= int(generated.max()) < vocab_size:
            raise ValueError(
                f"{folder / ref.shard}: sample {ref.sample_id} has ids outside the vocabulary of {vocab_size}"
            )
        counts += torch.bincount(generated, minlength=vocab_size)
    return counts


def plan_epoch(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Which samples each batch holds, in order: a function of the arguments alone.

    Samples are shuffled, packed window by window (longest first into the fullest batch with room), and the batches are
    shuffled. A sample longer than batch_tokens is a batch of its own.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    batches = [
        batch
        for at in range(0, len(order), WINDOW)
        for batch in _pack(sorted(order[at : at + WINDOW], key=lambda index: -lengths[index]), lengths, batch_tokens)
    ]
    return [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]


def _pack(indices: list[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    batches: list[list[int]] = []
    room: list[int] = []
    for index in indices:
        fitting = [number for number, left in enumerate(room) if left >= lengths[index]]
        if fitting:
            fullest = min(fitting, key=lambda number: room[number])
            batches[fullest].append(index)
            room[fullest] -= lengths[index]
        else:
            batches.append([index])
            room.append(capacity - lengths[index])
    return batches


def build_batch(samples: Sequence[tuple[str, Sample]], steps: int) -> Batch:
    """Pack samples (id, states) for K = `steps`. Samples without a counted row are left out; N, R and U may be 0."""
    contexts: list[torch.Tensor] = []
    parts: dict[str, list[torch.Tensor]] = {
        name: [] for name in ("ids", "positions", "rows", "step_ids", "states", "target_ids", "source", "counted")
    }
    documents: list[Document] = []
    start = queries = 0
    for _, sample in samples:
        table = shift(sample.loss_mask, steps)
        if table is None:
            continue
        ids, context, rows = sample.input_ids.long(), table.last + 1, torch.arange(table.first, table.last + 1)
        ahead = (rows + 1 + torch.arange(steps)[:, None]).clamp_(max=len(ids) - 1)
        contexts.append(sample.aux_hidden_states[:context])
        parts["ids"].append(ids[1 : context + 1])
        parts["positions"].append(torch.arange(context))
        parts["rows"].append(rows + start)
        parts["step_ids"].append(ids[ahead])
        parts["states"].append(sample.last_hidden_states[table.targets])
        parts["target_ids"].append(ids[table.targets + 1])
        parts["source"].append(torch.where(table.counted, table.source - table.first + queries, queries))
        parts["counted"].append(table.counted)
        documents.append(Document(start, start + table.first, start + context))
        start, queries = start + context, queries + len(rows)
    width = samples[0][1].aux_hidden_states
    return Batch(
        sample_ids=tuple(name for name, _ in samples),
        tokens=sum(len(sample.input_ids) for _, sample in samples),
        aux_hidden_states=torch.cat(contexts) if contexts else width[:0],
        context_ids=_join(parts["ids"], (0,)),
        context_positions=_join(parts["positions"], (0,)),
        documents=tuple(documents),
        rows=_join(parts["rows"], (0,)),
        step_ids=_join(parts["step_ids"], (steps, 0)),
        target_states=torch.cat(parts["states"]) if contexts else samples[0][1].last_hidden_states[:0],
        target_ids=_join(parts["target_ids"], (0,)),
        source=_join(parts["source"], (steps, 0)),
        counted=_join(parts["counted"], (steps, 0)).bool(),
    )


def empty_batch(aux_layers: int, hidden_size: int, steps: int) -> Batch:
    """A batch of no samples: what a process works on while others still have some."""
    nothing = torch.empty(0, dtype=torch.int64)
    table = nothing.expand(steps, 0)
    aux, states = torch.empty(0, aux_layers * hidden_size), torch.empty(0, hidden_size)
    return Batch((), 0, aux, nothing, nothing, (), nothing, table, states, nothing, table, table.bool())


@dataclass(frozen=True)
class ShiftTable:
    """One sample: query rows first .. last; targets [U] positions; source [K, U] rows; counted [K, U]."""

    first: int
    last: int
    targets: torch.Tensor
    source: torch.Tensor
    counted: torch.Tensor


def shift(loss_mask: torch.Tensor, steps: int) -> ShiftTable | None:
    """The table of the module's docstring for one sample's mask [T]; None when no row counts at any step.

    Position t is the target of row i = t - 1 - k at step k; it predicts x_{t+1} and counts if x_{t+1} and x_{i+1} were
    generated.
    """
    positions = torch.arange(len(loss_mask) - 1)
    source = positions - 1 - torch.arange(steps)[:, None]
    drafted_from = torch.where(source >= 0, loss_mask[(source + 1).clamp(min=0)], False)
    counted = loss_mask[positions + 1] & drafted_from
    targets = counted.any(0).nonzero()[:, 0]
    if not len(targets):
        return None
    counted, source = counted[:, targets], source[:, targets]
    used = source[counted]
    return ShiftTable(int(used.min()), int(used.max()), targets, source, counted)


class BatchStream:
    """Batches of successive optimiser steps, read by a background thread; a context manager.

    groups: for each optimiser step the samples of each of its batches. `wait_s`: seconds that the trainer waited.
    """

    def __init__(self, folder: Path, groups: Iterator[list[list[SampleRef]]], steps: int):
        self._folder, self._groups, self._steps = folder, groups, steps
        self._queue: queue.Queue[list[Batch] | Exception | None] = queue.Queue(maxsize=AHEAD)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="batches", daemon=True)
        self.wait_s = 0.0

    def __enter__(self) -> "BatchStream":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        while self._thread.is_alive():
            _drain(self._queue)
            self._thread.join(timeout=0.05)

    def __iter__(self) -> Iterator[list[Batch]]:
        while True:
            started = time.monotonic()
            item = self._queue.get()
            self.wait_s += time.monotonic() - started
            if item is None:
                return
            if isinstance(item, Exception):
                raise item
            yield item

    def _fill(self) -> None:
        try:
            for group in self._asked_for():
                self._put([load_batch(self._folder, refs, self._steps) for refs in group])
                if self._stopped.is_set():
                    return
            self._put(None)
        except Exception as error:
            self._put(error)

    def _asked_for(self) -> Iterator[list[list[SampleRef]]]:
        """The groups; the disk is asked for the samples of AHEAD more of them before one is given out."""
        asked: deque[list[list[SampleRef]]] = deque()
        for group in self._groups:
            for ref in chain.from_iterable(group):
                _opened(self._folder / ref.shard).prefetch(ref.position)
            asked.append(group)
            if len(asked) > AHEAD:
                yield asked.popleft()
        yield from asked

    def _put(self, item: list[Batch] | Exception | None) -> None:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                continue


def load_batch(folder: Path, refs: Sequence[SampleRef], steps: int) -> Batch:
    """Read and pack samples. Raises ValueError that names shard and sample for states that are not finite."""
    samples = []
    for ref in refs:
        sample = _load(folder, ref)
        if not (_finite(sample.aux_hidden_states) and _finite(sample.last_hidden_states)):
            raise ValueError(
                f"{folder / ref.shard}: sample {ref.sample_id} has states that are not finite; "
                f"{_remedy(folder / ref.shard)}"
            )
        samples.append((ref.sample_id, sample))
    return build_batch(samples, steps)


def _load(folder: Path, ref: SampleRef) -> Sample:
    shard = _opened(folder / ref.shard)
    if ref.position < len(shard):
        sample = shard.sample(ref.position)
        found = digest_tokens(sample.input_ids, sample.loss_mask)
        if (len(sample.input_ids), found) == (ref.length, ref.sample_digest):
            return sample
    raise ValueError(
        f"{folder / ref.shard}: ids and mask at position {ref.position} are not those of sample {ref.sample_id} "
        f"({ref.length} tokens) in {INDEX}: another or a damaged shard; {_remedy(folder / ref.shard)}"
    )


def _remedy(shard: Path) -> str:
    return f"`eagle3 verify {shard.parent}` says what brings it back"


@lru_cache(maxsize=OPEN_SHARDS)
def _opened(path: Path) -> Shard:
    return open_shard(path)


def _finite(states: torch.Tensor) -> bool:
    """The least and the greatest value tell (NaN is both), and are found many times faster than by a look at each."""
    return not states.numel() or all(bool(value.isfinite()) for value in torch.aminmax(states))


def _join(parts: list[torch.Tensor], empty: tuple[int, ...]) -> torch.Tensor:
    return torch.cat(parts, dim=-1) if parts else torch.empty(empty, dtype=torch.int64)


def _drain(items: "queue.Queue[Any]") -> None:
    while True:
        try:
            items.get_nowait()
        except queue.Empty:
            return
