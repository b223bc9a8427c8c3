"""What benchmarks/scale.py measures at 200,000 samples, at a size for every day: memory and files, never time."""

from pathlib import Path

import pytest

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
