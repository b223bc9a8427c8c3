"""What benchmarks/scale.py and train_scale.py measure, at a size for every day: memory and files, never time."""

from pathlib import Path

import pytest

from benchmarks import train_scale
from benchmarks.scale import measure
from eagle3.schemas import STATES
from eagle3.tables import read_columns


@pytest.mark.slow
@pytest.mark.exhaustive
def test_memory_and_files_do_not_grow_with_the_samples(tmp_path: Path) -> None:
    small, large = (measure(tmp_path / str(samples), samples) for samples in (2_000, 20_000))
    assert read_columns(tmp_path / "20000" / "hidden_states" / "index.parquet", STATES).num_rows == 20_000
    assert large.shard_bytes > 9 * small.shard_bytes
    assert large.write_mb - small.write_mb < 50  # one part of the table and one shard, whatever the number of samples
    assert large.read_mb - small.read_mb < 10  # a name and a place for each sample
    assert large.files <= 20


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_memory_of_training_does_not_grow_with_the_tokens(tmp_path: Path) -> None:
    small, large = (train_scale.measure(tmp_path / str(tokens), tokens) for tokens in (20_000, 200_000))
    assert large.tokens > 9 * small.tokens
    assert large.memory_mb - small.memory_mb < 50
