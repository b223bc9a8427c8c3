"""The arithmetic of the benchmarks: what they print follows from what they timed."""

import json
import random
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks import compression, draft_quality, increment, record, scale, store
from eagle3.draft.data import read_corpus
from eagle3.draft.vocab import DraftVocabulary
from eagle3.schemas import STATES
from eagle3.tables import INDEX, Row, read_table
from tests.draft_data import write_states
from tests.dvc_project import make_project
from tests.test_draft_data import VERIFIER, make_sample, make_text
from tests.test_extract import Run, make_row


def test_recording_is_compared_pair_by_pair() -> None:
    found = record.numbers({"prefill": [100.0, 200.0, 100.0], "record": [95.0, 150.0, 90.0]})
    assert found["pairs"] == [0.95, 0.75, 0.9]
    assert (found["ratio_to_prefill"], found["tokens_per_second_record"]) == (0.9, 95.0)


def test_a_ratio_of_rates_is_the_inverse_of_that_of_seconds() -> None:
    found = store.numbers("writer", "write", 10**9, ours=[2.0, 4.0, 2.0], disk=[1.0, 3.0, 2.0])
    assert found["writer_rounds"] == [0.5, 0.75, 1.0]
    assert (found["writer_ratio"], found["writer_mb_per_second"], found["disk_write_mb_per_second"]) == (0.75, 500, 500)


def test_the_order_of_arms_alternates() -> None:
    calls: list[str] = []
    seconds = store.in_turns(2, lambda: calls.append("a") or 1.0, lambda: calls.append("b") or 2.0)
    assert calls == ["a", "b", "b", "a", "a", "b"]  # the first two warm up
    assert seconds == [[1.0, 1.0], [2.0, 2.0]]


def state(shards: dict[str, list[str]], rate: float, remote: dict[str, int]) -> increment.State:
    """Samples of 10 tokens, shards of 100 bytes a sample."""
    index: list[Row] = [
        {"sample_id": sample, "shard": name, "length": 10, "shard_bytes": 100 * len(samples)}
        for name, samples in shards.items()
        for sample in samples
    ]
    metrics = {"tokens": 10 * len(index), "tokens_per_second": rate}
    return increment.State(index, metrics, {}, remote)


def test_an_increment_is_measured_by_the_shards_that_are_new() -> None:
    first = state({"a": list("pqrstu"), "b": list("vwxy")}, 100.0, {"a": 600, "b": 400, "index": 1, "dir": 1})
    second = state({"a": list("pqrstu"), "c": list("vwxyz")}, 50.0, first.remote | {"c": 500, "index2": 2, "dir2": 2})
    found = increment.numbers(first, second)
    assert (found["token_share"], found["sample_share"], found["byte_share"]) == (0.5, 0.1, 0.5)
    assert found["time_share"] == 1.0
    assert found["pushed"] == {"objects": 3, "bytes": 504}
    assert found["new_shards"] == {"count": 1, "bytes": 500}
    assert not found["holds"]


def test_dvc_uploads_the_new_shards_the_index_and_the_list_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = make_project(tmp_path / "project", monkeypatch)  # its samples are the first of these
    choice = random.Random(0)
    rows = [make_row(choice) for _ in range(44)]

    def pushed() -> increment.State:
        for words in (["commit", "--quiet", "--force"], ["push", "--quiet", "data/hidden_states"]):
            subprocess.run(["dvc", *words], cwd=project, check=True)
        index = list(read_table(project / "data/hidden_states" / INDEX, STATES))
        metrics = json.loads((project / "data/metrics.json").read_text())
        return increment.State(index, metrics, {}, increment.remote_objects(tmp_path / "remote"))

    first = pushed()
    Run(project / "data", monkeypatch).extract(rows)
    found = increment.numbers(first, pushed())
    assert 0 < found["new_shards"]["count"] < found["first"]["shards"]
    assert found["pushed"]["objects"] == found["new_shards"]["count"] + 2
    assert found["new_shards"]["bytes"] < found["pushed"]["bytes"] < found["new_shards"]["bytes"] + 100_000
    assert found["sample_share"] == 4 / 40


@pytest.mark.parametrize(
    ("change", "holds"),
    [({}, True), ({"write_mb": 401.0}, False), ({"read_seconds": 113.0}, False), ({"files": 101}, False)],
)
def test_what_grows_or_bends_does_not_hold(change: dict[str, float], holds: bool) -> None:
    runs = [
        scale.Run(n, seconds, 300.0, seconds, 300.0, 50, 1) for n, seconds in ((20, 10.0), (110, 55.0), (200, 100.0))
    ]
    runs[2] = replace(runs[2], **({"write_mb": 399.0} | change))
    assert scale.numbers(runs, 59.0)["holds"] == holds
    assert not scale.numbers(runs, 61.0)["holds"]


def test_planes_that_repeat_compress_and_noise_does_not() -> None:
    noise = np.random.default_rng(0)
    piece = np.stack([noise.integers(0, 256, 100_000), np.full(100_000, 60)], axis=1).astype(np.uint8)
    found = compression.compress(piece, 1)
    assert found["high"].numbers()["ratio"] > 1000
    assert found["low"].numbers()["ratio"] == pytest.approx(1, abs=0.01)
    assert found["planes"].numbers()["ratio"] == pytest.approx(2, abs=0.05)
    assert found["planes"].original == found["whole"].original == piece.size


def test_the_peer_reads_the_same_samples_and_holds_out_the_same(tmp_path: Path) -> None:
    splits = ["validation", "train", "train", "validation", "train"]
    texts = [make_text(number, 8 + number, 4, split) for number, split in enumerate(splits)]
    states = [
        replace(sample, aux_hidden_states=torch.randn(len(sample.input_ids), 12)) for sample in map(make_sample, texts)
    ]
    write_states(tmp_path / "states", texts, states, VERIFIER, per_shard=2)
    vocabulary = DraftVocabulary(torch.tensor([2, 5, 7]), VERIFIER.vocab_size, 1.0)
    corpus = read_corpus(tmp_path / "states", VERIFIER)
    draft_quality.write_data(corpus, vocabulary, tmp_path / "peer")
    order = [1, 2, 4, 0, 3]
    rows = [json.loads(line) for line in (tmp_path / "peer/rows.jsonl").read_text().splitlines()]
    assert [row["input_ids"] for row in rows] == [texts[number].input_ids for number in order]
    assert [row["loss_mask"] for row in rows] == [list(map(int, texts[number].loss_mask)) for number in order]
    for row, number in enumerate(order):
        found = load_file(tmp_path / f"peer/hidden_states/hs_{row}.safetensors")
        assert found["token_ids"].tolist() == texts[number].input_ids
        assert torch.equal(found["hidden_states"][:, :-1].flatten(1), states[number].aux_hidden_states)
        assert torch.equal(found["hidden_states"][:, -1], states[number].last_hidden_states)
    assert np.load(tmp_path / "peer/d2t.npy").tolist() == [2, 4, 5]
    assert np.load(tmp_path / "peer/t2d.npy").nonzero()[0].tolist() == [2, 5, 7]


def test_the_peer_cuts_the_samples_where_ours_are_cut() -> None:
    for train in range(1, 600):
        for validation in (1, 2, 23, 300):
            ratio = draft_quality.train_ratio(train, validation)
            assert 0 < ratio < 1 and int((train + validation) * ratio) == train


def test_drafts_are_compared_question_by_question() -> None:
    one = {"a": [30, 10], "b": [20, 10], "c": [20, 20], "d": [10, 8]}
    assert draft_quality.difference_interval(one, dict(reversed(one.items()))) == [0.0, 0.0]
    faster = {prompt: [emitted + steps, steps] for prompt, (emitted, steps) in one.items()}
    assert draft_quality.difference_interval(faster, one) == [1.0, 1.0]
    uneven = one | {"b": [40, 10]}
    low, high = draft_quality.difference_interval(uneven, one) or (0.0, 0.0)
    assert low == 0.0 and high > 0.5  # of four questions, none or most may be the one that differs
    assert draft_quality.difference_interval({"a": [30, 10], "b": [20, 10]}, one) is None


@pytest.mark.parametrize(("length", "promised"), [(1.0, 1.9), (1.4, 1.9), (1.2, 1.0)])
def test_a_draft_that_is_not_served_as_it_was_trained_is_an_error(length: float, promised: float) -> None:
    served = {"metrics": {"acceptance_length": 1.5, "num_drafts": 7}, "by_prompt": {}}
    found = draft_quality.summary(served, 1.9, 12, 3.0)
    assert found == served["metrics"] | {"expected_acceptance_length": 1.9, "steps": 12, "seconds": 3.0}
    with pytest.raises(SystemExit, match="not served"):
        draft_quality.summary({"metrics": {"acceptance_length": length}}, promised, 12, 3.0)
