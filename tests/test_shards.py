"""Shards: what is written is read back; the file is plain safetensors; damage is named."""

import ctypes
import mmap
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.disk import drop_from_cache
from eagle3.shards import DTYPES, Sample, begin_shard, open_shard, sample_bytes, shard_layout, write_shard

LAYERS, HIDDEN = 3, 8


def metadata(dtype: str = "bfloat16") -> dict[str, str]:
    return {
        "schema_version": "1",
        "key": "k" * 64,
        "verifier_digest": "v" * 64,
        "aux_layer_ids": "[2,4,5]",
        "hidden_size": str(HIDDEN),
        "dtype": dtype,
        "prenorm": "true",
        "engine": "test 0",
    }


def make_samples(lengths: list[int], dtype: torch.dtype = torch.bfloat16) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    return [
        Sample(
            torch.randint(0, 1000, (length,), generator=generator, dtype=torch.int32),
            torch.rand(length, generator=generator) > 0.5,
            torch.randn(length, LAYERS * HIDDEN, generator=generator).to(dtype),
            torch.randn(length, HIDDEN, generator=generator).to(dtype),
        )
        for length in lengths
    ]


def same(one: Sample, other: Sample) -> bool:
    return all(torch.equal(vars(one)[name], vars(other)[name]) for name in vars(one))


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "a.safetensors"
    write_shard(path, make_samples([3, 50, 1, 7]), metadata())
    return path


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_round_trip_in_any_order(tmp_path: Path, dtype: str) -> None:
    samples = make_samples([3, 50, 1, 7], DTYPES[dtype])
    write_shard(tmp_path / "a.safetensors", samples, metadata(dtype))
    shard = open_shard(tmp_path / "a.safetensors")
    assert len(shard) == 4
    assert shard.offsets == [0, 3, 53, 54, 61]
    assert shard.metadata == metadata(dtype)
    for position in (2, 0, 3, 1):
        assert same(shard.sample(position), samples[position])
    with pytest.raises(IndexError):
        shard.sample(4)


def test_fp8_states_are_read_back_as_bfloat16_and_each_sample_alone(tmp_path: Path) -> None:
    samples = make_samples([3, 50, 1, 7])
    write_shard(tmp_path / "a.safetensors", samples, metadata("float8_e4m3fn"))
    shard = open_shard(tmp_path / "a.safetensors")
    for position in (2, 0, 3, 1):
        read, given = shard.sample(position), samples[position]
        assert torch.equal(read.input_ids, given.input_ids) and torch.equal(read.loss_mask, given.loss_mask)
        for name in ("aux_hidden_states", "last_hidden_states"):
            found, wanted = getattr(read, name), getattr(given, name)
            assert found.dtype == torch.bfloat16 and found.shape == wanted.shape
            torch.testing.assert_close(found, wanted, rtol=1 / 16, atol=1e-3)
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:  # anybody can read it: state = value * scale
        values, scales = file.get_tensor("aux_hidden_states").float(), file.get_tensor("aux_scales")
    aux = (values.view(-1, LAYERS, HIDDEN) * scales.unsqueeze(-1)).flatten(1)
    assert torch.equal(aux, shard.states(slice(None))[0].float())


def test_fp8_states_without_their_scales_are_refused(tmp_path: Path) -> None:
    write_shard(tmp_path / "a", make_samples([3]), metadata("float8_e4m3fn"))
    with safe_open(tmp_path / "a", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys() if name != "aux_scales"}  # noqa: SIM118
    save_file(tensors, tmp_path / "b", metadata("float8_e4m3fn"))
    with pytest.raises(ValueError, match="states of dtype float8_e4m3fn, aux_scales missing"):
        open_shard(tmp_path / "b")


def test_rows_and_layers_keep_their_order_where_shapes_cannot_tell(tmp_path: Path) -> None:
    states = torch.arange(LAYERS * LAYERS * HIDDEN, dtype=torch.float32).view(LAYERS, LAYERS * HIDDEN)  # T = A
    ids = torch.arange(LAYERS, dtype=torch.int32)
    sample = Sample(ids, ids > 0, states, states[:, :HIDDEN].contiguous())
    write_shard(tmp_path / "a.safetensors", [sample], metadata("float32"))
    read = open_shard(tmp_path / "a.safetensors").sample(0).aux_hidden_states
    assert read.view(LAYERS, LAYERS, HIDDEN)[1, 2, 0] == (1 * LAYERS + 2) * HIDDEN


def test_is_plain_safetensors(shard: Path) -> None:
    mine = open_shard(shard)
    with safe_open(shard, framework="pt") as file:
        assert torch.equal(file.get_tensor("aux_hidden_states"), mine.states(slice(None))[0])
        assert torch.equal(file.get_tensor("input_ids"), mine.input_ids)
        assert file.get_tensor("offsets").tolist() == mine.offsets
        assert file.metadata() == metadata()


def test_reading_copies_nothing(shard: Path) -> None:
    opened = open_shard(shard)
    read, file = opened.sample(1), opened.states(slice(None))
    for part, whole in zip((read.aux_hidden_states, read.last_hidden_states), file, strict=True):
        assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def resident(path: Path, start: int, size: int) -> bool:
    """Whether this part of a file, in whole pages, lies in the page cache."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    pages = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped, start))
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0
    return all(page & 1 for page in pages)


def test_prefetching_a_sample_brings_its_states_into_memory_and_changes_none(tmp_path: Path) -> None:
    path, samples = tmp_path / "a.safetensors", make_samples([10_000, 0, 600_000])
    write_shard(path, samples, metadata())
    drop_from_cache([path])
    shard = open_shard(path)
    for position in range(3):
        shard.prefetch(position)
    deadline = time.monotonic() + 30
    while not resident(path, 20 << 20, 4 << 20) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert resident(path, 20 << 20, 4 << 20)  # opening alone reads only the beginning
    assert all(same(shard.sample(position), sample) for position, sample in enumerate(samples))


def test_layout_says_where_everything_goes(tmp_path: Path) -> None:
    layout = shard_layout([2, 3], LAYERS, HIDDEN, torch.float16, metadata("float16"))
    path = tmp_path / "a.partial"
    begin_shard(path, layout, [([1, 2], [False, True]), ([3, 4, 5], [True] * 3)])
    assert path.stat().st_size == layout.size
    place = layout.places["last_hidden_states"]
    with path.open("r+b") as file:
        file.seek(place.start + 2 * place.row_bytes)
        file.write(torch.full((3, HIDDEN), 2.0, dtype=torch.float16).numpy().tobytes())
    shard = open_shard(path)
    assert shard.input_ids.tolist() == [1, 2, 3, 4, 5]
    assert shard.sample(1).last_hidden_states.eq(2).all()
    assert shard.sample(0).last_hidden_states.eq(0).all()


def test_s05_stored_bytes_are_those_of_the_dtype() -> None:
    assert sample_bytes(100, 3, 576, torch.bfloat16) == 100 * 4 * 576 * 2
    assert sample_bytes(100, 3, 576, torch.float32) == 100 * 4 * 576 * 4
    assert sample_bytes(100, 3, 576, DTYPES["float8_e4m3fn"]) == 100 * 4 * (576 + 4)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.999])
def test_truncated_shard_is_named(shard: Path, share: float) -> None:
    data = shard.read_bytes()
    shard.write_bytes(data[: int(share * len(data))])
    with pytest.raises(ValueError, match=r"a\.safetensors: (damaged|not a safetensors)"):
        open_shard(shard)


def test_longer_shard_is_named(shard: Path) -> None:
    with shard.open("ab") as file:
        file.write(b"more")
    with pytest.raises(ValueError, match="damaged shard"):
        open_shard(shard)


@pytest.mark.parametrize(
    ("header", "told"),
    [
        (b"\x00" * 8, "not a safetensors"),
        (b"\xff" * 8, "not a safetensors"),
        (b"\x04" + b"\x00" * 7 + b"null", "damaged header"),
        (b"\x04" + b"\x00" * 7 + b"{[}]", "damaged header"),
        (b"PAR1 and so on", "not a safetensors"),
    ],
)
def test_foreign_bytes_are_named(tmp_path: Path, header: bytes, told: str) -> None:
    (tmp_path / "x").write_bytes(header)
    with pytest.raises(ValueError, match=told):
        open_shard(tmp_path / "x")


def test_foreign_safetensors_is_named(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, tmp_path / "x", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="not a hidden-state shard of ours: aux_hidden_states"):
        open_shard(tmp_path / "x")


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("schema_version", "99", "schema version 99"),
        ("aux_layer_ids", "[2,4]", "its metadata says"),
        ("aux_layer_ids", "none", "not readable"),
        ("hidden_size", "16", "its metadata says"),
        ("dtype", "float32", "its metadata says"),
        ("dtype", "int4", "its metadata says"),
    ],
)
def test_metadata_and_tensors_must_agree(tmp_path: Path, key: str, value: str, told: str) -> None:
    write_shard(tmp_path / "x", make_samples([4]), metadata() | {key: value})
    with pytest.raises(ValueError, match=told):
        open_shard(tmp_path / "x")


def test_missing_shard_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such shard"):
        open_shard(tmp_path / "x")
