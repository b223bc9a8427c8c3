"""Write, read and check one hidden-state shard: a safetensors file whose layout is known before its values are.

The states of a shard come from several writers at once, each at the byte offset of its sample; so the header and every
offset follow from the lengths alone (`ShardLayout`), and reading maps the file and never copies it (`open_shard`).

Letters: T tokens of a shard, N samples of a shard, A auxiliary layers, H hidden size.
"""

import errno
import json
import math
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle3 import fp8
from eagle3.schemas import SCHEMA_VERSION, SHARD_METADATA, SHARD_SCALES, SHARD_TENSORS

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": fp8.FP8,
}
Kinds = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # dtype and shape of tensors by name
MAX_HEADER = 1 << 20
_ALIGNMENT = 64
_READ_AHEAD = 128 << 10  # Linux reads no more at one asking than a device's limits, and this is the least of them
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)

_NAMES = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    fp8.FP8: "F8_E4M3",
}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class Sample:
    """input_ids int32 [T], loss_mask bool [T], aux_hidden_states [T, A*H], last_hidden_states [T, H] of one sample."""

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux_hidden_states: torch.Tensor
    last_hidden_states: torch.Tensor


@dataclass(frozen=True)
class TensorPlace:
    """Where one tensor lies in the file. start: byte offset from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (one token)."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def row_start(self, row: int) -> int:
        """Byte offset of a row from the beginning of the file."""
        return self.start + row * self.row_bytes


@dataclass(frozen=True)
class ShardLayout:
    """A shard before its values: header (with its length prefix), places by tensor name, size of the file.

    states: names of the tensors that hold states.
    """

    header: bytes
    places: Mapping[str, TensorPlace]
    states: tuple[str, ...]
    offsets: tuple[int, ...]
    size: int


def state_kinds(tokens: int, aux_layers: int, hidden_size: int, dtype: torch.dtype) -> Kinds:
    """The tensors that hold the states of so many tokens: dtype and shape by name. dtype: of the stored values."""
    states: Kinds = {
        "aux_hidden_states": (dtype, (tokens, aux_layers * hidden_size)),
        "last_hidden_states": (dtype, (tokens, hidden_size)),
    }
    if dtype != fp8.FP8:
        return states
    return {"aux_scales": (torch.float32, (tokens, aux_layers)), "last_scales": (torch.float32, (tokens, 1)), **states}


def encode_states(states: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """States [T, A + 1, H] of all recorded layers, the last one last, as `state_kinds` has them; on their device."""
    if dtype == fp8.FP8:
        values, scales = fp8.encode(states)
        found = {"aux_scales": scales[:, :-1], "last_scales": scales[:, -1:]}
    else:
        values, found = states.to(dtype), {}
    found |= {"aux_hidden_states": values[:, :-1].flatten(1), "last_hidden_states": values[:, -1]}
    return {name: tensor.contiguous() for name, tensor in found.items()}


def sample_bytes(length: int, aux_layers: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Bytes that a sample's hidden states take in a shard."""
    kinds = state_kinds(length, aux_layers, hidden_size, dtype).values()
    return sum(kind.itemsize * math.prod(shape) for kind, shape in kinds)


def shard_layout(
    lengths: Sequence[int], aux_layers: int, hidden_size: int, dtype: torch.dtype, metadata: Mapping[str, str]
) -> ShardLayout:
    """The layout of a shard of samples with these lengths. dtype: of the stored values."""
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    tokens = offsets[-1]
    states = state_kinds(tokens, aux_layers, hidden_size, dtype)
    kinds: Kinds = {
        "offsets": (torch.int64, (len(offsets),)),  # widest first: everything stays aligned
        **states,
        "input_ids": (torch.int32, (tokens,)),
        "loss_mask": (torch.bool, (tokens,)),
    }
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    place = 0
    for name, (kind, shape) in kinds.items():
        size = math.prod(shape) * kind.itemsize
        entries[name] = {"dtype": _NAMES[kind], "shape": list(shape), "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    base = 8 + len(text)
    places = {}
    for name, (kind, shape) in kinds.items():
        places[name] = TensorPlace(kind, shape, base)
        base += places[name].bytes
    return ShardLayout(struct.pack("<Q", len(text)) + text, places, tuple(states), tuple(offsets), base)


def begin_shard(path: Path, layout: ShardLayout, samples: Sequence[tuple[Sequence[int], Sequence[bool]]]) -> None:
    """Create a shard at its full size with all but the states: header, offsets, ids and masks.

    samples: (input_ids, loss_mask) of each sample, in order. Raises OSError when the disk has no room for the file.
    """
    ids = torch.tensor([token for input_ids, _ in samples for token in input_ids], dtype=torch.int32)
    mask = torch.tensor([flag for _, loss_mask in samples for flag in loss_mask], dtype=torch.bool)
    with path.open("wb") as file:
        _reserve(file.fileno(), layout.size)
        file.write(layout.header)
        for name, values in (
            ("offsets", torch.tensor(layout.offsets, dtype=torch.int64)),
            ("input_ids", ids),
            ("loss_mask", mask),
        ):
            assert tuple(values.shape) == layout.places[name].shape
            file.seek(layout.places[name].start)
            file.write(tensor_bytes(values))


def write_shard(path: Path, samples: Sequence[Sample], metadata: Mapping[str, str]) -> None:
    """Write a whole shard of in-memory samples, all of one dtype; as fp8 if metadata["dtype"] says so."""
    width, hidden = samples[0].aux_hidden_states.shape[1], samples[0].last_hidden_states.shape[1]
    lengths = [len(sample.input_ids) for sample in samples]
    dtype = fp8.FP8 if DTYPES.get(metadata["dtype"]) == fp8.FP8 else samples[0].last_hidden_states.dtype
    layout = shard_layout(lengths, width // hidden, hidden, dtype, metadata)
    begin_shard(path, layout, [(sample.input_ids.tolist(), sample.loss_mask.tolist()) for sample in samples])
    states = [torch.cat([sample.aux_hidden_states, sample.last_hidden_states], dim=1) for sample in samples]
    tensors = encode_states(torch.cat(states).view(-1, width // hidden + 1, hidden), dtype)
    with path.open("r+b") as file:
        for name, values in tensors.items():
            place = layout.places[name]
            assert (values.dtype, tuple(values.shape)) == (place.dtype, place.shape)
            file.seek(place.start)
            file.write(tensor_bytes(values))


def tensor_bytes(values: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied (numpy knows no bfloat16)."""
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().data


class Shard:
    """A shard mapped into memory. Tensors are views of the file, but for fp8 states, and must not be written to.

    input_ids int32 [T], loss_mask bool [T]; offsets: N + 1 ints; metadata: text by text.
    """

    def __init__(self, metadata: dict[str, str], places: Mapping[str, TensorPlace], data: mmap.mmap):
        tensors = {name: _view(data, place) for name, place in places.items()}
        self._places, self._data = places, data
        self.metadata = metadata
        self.input_ids = tensors["input_ids"]
        self.loss_mask = tensors["loss_mask"]
        self.offsets: list[int] = tensors["offsets"].tolist()
        self._tensors = tensors

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.offsets) - 1

    def states(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """aux_hidden_states [rows, A*H] and last_hidden_states [rows, H]; fp8 ones are decoded into bfloat16."""
        aux, last = self._tensors["aux_hidden_states"][rows], self._tensors["last_hidden_states"][rows]
        if last.dtype != fp8.FP8:
            return aux, last
        hidden = last.shape[1]
        aux_scales, last_scales = self._tensors["aux_scales"][rows], self._tensors["last_scales"][rows]
        return (
            fp8.decode(aux.view(len(aux), -1, hidden), aux_scales).flatten(1),
            fp8.decode(last.unsqueeze(1), last_scales).flatten(1),
        )

    def sample(self, position: int) -> Sample:
        """Sample number `position`. Raises IndexError outside [0, N)."""
        if not 0 <= position < len(self):
            raise IndexError(f"sample {position} of a shard of {len(self)}")
        rows = slice(self.offsets[position], self.offsets[position + 1])
        return Sample(self.input_ids[rows], self.loss_mask[rows], *self.states(rows))

    def prefetch(self, position: int) -> None:
        """Have the kernel read a sample in the background. Without, it is read in pieces as they are first needed."""
        first, end = self.offsets[position], self.offsets[position + 1]
        for name, place in self._places.items():
            if name != "offsets" and first < end:
                start, stop = place.start + first * place.row_bytes, place.start + end * place.row_bytes
                for piece in range(start - start % mmap.PAGESIZE, stop, _READ_AHEAD):
                    self._data.madvise(mmap.MADV_WILLNEED, piece, min(_READ_AHEAD, stop - piece))


def open_shard(path: Path) -> Shard:
    """Map a shard and check its form. Raises ValueError for a truncated or foreign file, or one of another schema."""
    try:
        metadata, places, size = _read_header(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such shard; `dvc checkout` or `dvc repro` restores it") from None
    actual = path.stat().st_size
    if actual != size:
        raise ValueError(f"{path}: damaged shard, {actual} bytes where its header says {size}; restore or remove it")
    _check_form(path, metadata, places)
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # private: torch wants writable memory
    shard = Shard(metadata, places, data)
    steps = zip(shard.offsets, shard.offsets[1:], strict=False)
    if shard.offsets[0] != 0 or shard.offsets[-1] != len(shard.input_ids) or any(a > b for a, b in steps):
        raise ValueError(f"{path}: damaged shard, sample offsets do not ascend from 0 to the number of tokens")
    return shard


def _view(data: mmap.mmap, place: TensorPlace) -> torch.Tensor:
    count = math.prod(place.shape)
    if not count:
        return torch.empty(place.shape, dtype=place.dtype)
    return torch.frombuffer(data, dtype=place.dtype, count=count, offset=place.start).view(place.shape)


def _read_header(path: Path) -> tuple[dict[str, str], dict[str, TensorPlace], int]:
    """Metadata, places by tensor name, and the size that the whole file must have."""
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= MAX_HEADER:
            raise ValueError(f"{path}: not a safetensors file (empty, truncated or of another kind)")
        text = file.read(length)
    try:
        entries = json.loads(text)
        metadata = {str(key): str(value) for key, value in entries.pop("__metadata__").items()}
        places, end = {}, 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            place = TensorPlace(_TYPES[entry["dtype"]], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
            if entry["data_offsets"] != [end, end + place.bytes] or min(place.shape, default=0) < 0:
                raise ValueError(f"tensor {name} is out of place")
            places[name], end = place, end + place.bytes
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: damaged header of a safetensors file: {error}") from None
    return metadata, places, 8 + length + end


def _check_form(path: Path, metadata: dict[str, str], places: dict[str, TensorPlace]) -> None:
    if absent := sorted(SHARD_TENSORS.keys() - places.keys()) + sorted(set(SHARD_METADATA) - metadata.keys()):
        raise ValueError(f"{path}: not a hidden-state shard of ours: {', '.join(absent)} missing")
    if metadata["schema_version"] != str(SCHEMA_VERSION):
        raise ValueError(f"{path}: schema version {metadata['schema_version']}, this code reads {SCHEMA_VERSION}")
    try:
        layers, hidden = len(json.loads(metadata["aux_layer_ids"])), int(metadata["hidden_size"])
    except (ValueError, TypeError):
        raise ValueError(f"{path}: metadata aux_layer_ids or hidden_size is not readable") from None
    dtype = DTYPES.get(metadata["dtype"])
    if dtype is None:
        raise ValueError(f"{path}: its metadata says dtype {metadata['dtype']}, which this code cannot read")
    tokens = math.prod(places["input_ids"].shape)
    expected = {
        "input_ids": (torch.int32, (tokens,)),
        "loss_mask": (torch.bool, (tokens,)),
        **state_kinds(tokens, layers, hidden, dtype),
    }
    if dtype == fp8.FP8 and (absent := sorted(SHARD_SCALES.keys() - places.keys())):
        raise ValueError(f"{path}: states of dtype {metadata['dtype']}, {', '.join(absent)} missing")
    for name, (kind, shape) in expected.items():
        found = places[name]
        if found.dtype != kind or found.shape != shape:
            raise ValueError(
                f"{path}: {name} is {found.dtype} {list(found.shape)}, its metadata says {kind} {list(shape)}"
            )
    if places["offsets"].dtype != torch.int64 or len(places["offsets"].shape) != 1 or not places["offsets"].shape[0]:
        raise ValueError(f"{path}: offsets must be int64 [N + 1]")


def _reserve(descriptor: int, size: int) -> None:
    """Give the file its final size, with its blocks where the filesystem can: a full disk is found now, not later."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
        os.ftruncate(descriptor, size)
