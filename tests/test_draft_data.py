"""Packing, shifting and reading."""

import dataclasses
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3.draft import data
from eagle3.draft.data import (
    BatchStream,
    SampleRef,
    build_batch,
    count_generated,
    load_batch,
    plan_epoch,
    read_corpus,
    shift,
)
from eagle3.reasoning import NO_MARKERS
from eagle3.schemas import STATES
from eagle3.shards import Sample, Shard, open_shard
from eagle3.tables import INDEX, read_table, write_table
from eagle3.verifier import VerifierIdentity
from tests.draft_data import Text, write_states
from tests.dvc_project import eagle3

VERIFIER = VerifierIdentity(
    name="test",
    digest="d" * 64,
    architecture="LlamaForCausalLM",
    hidden_size=4,
    num_layers=8,
    vocab_size=50,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    aux_layer_ids=(2, 4, 5),
    stop_token_ids=(2,),
    dtype="float32",
    engine="test 1",
    markers=NO_MARKERS,
)


def make_text(number: int, length: int, answer: int, split: str = "train") -> Text:
    ids = [(number * 7 + place) % 50 for place in range(length)]
    return Text(f"s{number}", split, ids, [place >= length - answer for place in range(length)])


def make_sample(text: Text) -> Sample:
    """States that say where they come from: every value is the position."""
    places = torch.arange(len(text.input_ids), dtype=torch.float32)[:, None]
    ids = torch.tensor(text.input_ids, dtype=torch.int32)
    return Sample(ids, torch.tensor(text.loss_mask), places.repeat(1, 12), places.repeat(1, 4))


def write_corpus(folder: Path, texts: list[Text], verifier: VerifierIdentity = VERIFIER) -> None:
    write_states(folder, texts, [make_sample(text) for text in texts], verifier, per_shard=3)


def test_the_table_of_an_answer_of_four_tokens() -> None:
    table = shift(torch.tensor([False] * 3 + [True] * 4), steps=3)
    assert table is not None
    assert (table.first, table.last) == (2, 4)
    assert table.targets.tolist() == [3, 4, 5]
    assert table.counted.tolist() == [[True, True, True], [False, True, True], [False, False, True]]
    assert table.source[table.counted].tolist() == [2, 3, 4, 2, 3, 2]


@pytest.mark.parametrize("mask", [[False] * 5, [False, False, True], [True], [True, False, False, True]])
def test_m05_no_counted_row_no_table(mask: list[bool]) -> None:
    assert shift(torch.tensor(mask, dtype=torch.bool), steps=2) is None


def test_a_packed_batch_follows_the_table() -> None:
    texts = [make_text(0, 9, 4), make_text(1, 6, 1), make_text(2, 7, 7)]
    batch = build_batch([(text.sample_id, make_sample(text)) for text in texts], steps=3)
    assert batch.sample_ids == ("s0", "s1", "s2") and batch.tokens == 22
    assert batch.documents == ((0, 4, 7), (7, 7, 12))  # s1 teaches nothing and is not there
    positions = batch.context_positions.tolist()
    assert positions == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4]
    ids = [texts[0].input_ids] * 7 + [texts[2].input_ids] * 5
    assert batch.context_ids.tolist() == [ids[n][i + 1] for n, i in enumerate(positions)]
    assert batch.aux_hidden_states[:, 0].tolist() == positions
    for step in range(3):
        for target, (row, counted) in enumerate(
            zip(batch.source[step].tolist(), batch.counted[step].tolist(), strict=True)
        ):
            if counted:
                context = int(batch.rows[row])
                assert batch.target_states[target, 0] == positions[context] + 1 + step
                assert batch.target_ids[target] == ids[context][positions[context] + 2 + step]
                assert batch.step_ids[step, row] == ids[context][positions[context] + 1 + step]


@pytest.mark.parametrize("accepted", [2, 3])
def test_m01_counts_are_answer_tokens_less_the_documented_constant(accepted: int) -> None:
    texts = [make_text(0, 5 + accepted, accepted)]
    batch = build_batch([(text.sample_id, make_sample(text)) for text in texts], steps=3)
    assert batch.counted.sum(1).tolist() == [max(0, accepted - 1 - step) for step in range(3)]


def test_every_sample_is_in_an_epoch_once() -> None:
    lengths = [3 + (37 * number) % 200 for number in range(1300)] + [900]
    for epoch in range(2):
        plan = plan_epoch(lengths, 512, seed=3, epoch=epoch)
        assert Counter(index for batch in plan for index in batch) == Counter(range(1301))
        assert all(sum(lengths[i] for i in batch) <= 512 or batch == [1300] for batch in plan)
        assert 1 - sum(lengths) / (len(plan) * 512) < 0.02


def test_plans_follow_from_seed_and_epoch() -> None:
    lengths = [10 + number % 13 for number in range(100)]
    assert plan_epoch(lengths, 64, 0, 1) == plan_epoch(lengths, 64, 0, 1)
    assert plan_epoch(lengths, 64, 0, 1) != plan_epoch(lengths, 64, 0, 2)
    assert plan_epoch(lengths, 64, 0, 1) != plan_epoch(lengths, 64, 1, 1)


def test_the_corpus_is_split_by_the_column_and_counts_what_teaches_nothing(tmp_path: Path) -> None:
    texts = [make_text(0, 9, 4), make_text(1, 6, 1), make_text(2, 7, 3, "validation"), make_text(3, 8, 5)]
    write_corpus(tmp_path, texts)
    corpus = read_corpus(tmp_path, VERIFIER)
    assert [ref.sample_id for ref in corpus.train] == ["s0", "s3"]
    assert [ref.sample_id for ref in corpus.validation] == ["s2"]
    assert [ref.sample_id for ref in corpus.skipped] == ["s1"]
    counts = count_generated(corpus.folder, corpus.train, 50)
    assert counts.tolist() == [sum(i in t.input_ids[-n:] for t, n in ((texts[0], 4), (texts[3], 5))) for i in range(50)]


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path, [make_text(0, 40, 30)])
    corpus = read_corpus(tmp_path, VERIFIER)
    with pytest.raises(ValueError, match="s0 has ids outside the vocabulary of 20"):
        count_generated(corpus.folder, corpus.train, 20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"digest": "e" * 64}, "verifier_digest"),
        ({"aux_layer_ids": (2, 4, 6)}, "aux_layer_ids"),
    ],
)
def test_states_of_another_verifier_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    write_corpus(tmp_path, [make_text(0, 9, 4)])
    with pytest.raises(ValueError, match=rf"states-0000.*{message}.*another verifier"):
        read_corpus(tmp_path, dataclasses.replace(VERIFIER, **change))


def test_a_sample_in_both_splits_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path, [make_text(0, 9, 4), make_text(0, 9, 4, "validation")])
    with pytest.raises(ValueError, match="train and the validation split"):
        read_corpus(tmp_path, VERIFIER)


def test_nothing_to_train_on_is_said(tmp_path: Path) -> None:
    write_corpus(tmp_path, [make_text(0, 9, 4, "validation"), make_text(1, 9, 1)])
    with pytest.raises(ValueError, match="no train sample"):
        read_corpus(tmp_path, VERIFIER)


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
@pytest.mark.parametrize("states", ["aux_hidden_states", "last_hidden_states"])
def test_states_that_are_not_finite_are_named(tmp_path: Path, states: str, value: str) -> None:
    text = make_text(0, 9, 4)
    sample = make_sample(text)
    vars(sample)[states][3, 1] = float(value)
    write_states(tmp_path, [text], [sample], VERIFIER)
    with pytest.raises(ValueError, match=r"states-0000.*sample s0 has states that are not finite"):
        load_batch(tmp_path, read_corpus(tmp_path, VERIFIER).train, 3)


def test_the_stream_gives_the_groups_in_order_and_passes_errors_on(tmp_path: Path) -> None:
    write_corpus(tmp_path, [make_text(number, 12, 6) for number in range(7)])
    refs = read_corpus(tmp_path, VERIFIER).train
    groups = [[[refs[0], refs[1]], [refs[2]]], [[refs[3]]], [[refs[4], refs[5], refs[6]]]]
    with BatchStream(tmp_path, iter(groups), 3) as stream:
        found = [[batch.sample_ids for batch in group] for group in stream]
    assert found == [[("s0", "s1"), ("s2",)], [("s3",)], [("s4", "s5", "s6")]]
    lost = dataclasses.replace(refs[0], shard="absent.safetensors")
    with BatchStream(tmp_path, iter([[[lost]]]), 3) as stream, pytest.raises(ValueError, match="no such shard"):
        list(stream)


def test_the_disk_is_asked_for_samples_before_they_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path, [make_text(number, 12, 6) for number in range(5)])
    refs = read_corpus(tmp_path, VERIFIER).train
    told: list[str] = []
    monkeypatch.setattr(Shard, "prefetch", lambda shard, position: told.append("ask"))
    monkeypatch.setattr(data, "load_batch", lambda folder, given, steps: told.append("load"))
    with BatchStream(tmp_path, iter([[[ref]] for ref in refs]), 3) as stream:
        assert len(list(stream)) == 5
    assert told == ["ask", "ask", "ask", "load", "ask", "load", "ask", "load", "load", "load"]


def test_leaving_the_stream_early_ends_its_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path, [make_text(0, 12, 6)])
    refs = read_corpus(tmp_path, VERIFIER).train
    loaded: list[int] = []
    original = data.load_batch

    def counting(folder: Path, given: list[SampleRef], steps: int) -> data.Batch:
        loaded.append(1)
        return original(folder, given, steps)

    monkeypatch.setattr(data, "load_batch", counting)
    with BatchStream(tmp_path, iter([[refs]] * 1000), 3) as stream:
        next(iter(stream))
        time.sleep(0.2)
        assert len(loaded) <= 2 + data.AHEAD  # memory stays bounded
    assert not stream._thread.is_alive()


def swap(folder: Path) -> None:
    one, two = sorted(folder.glob("*.safetensors"))[:2]
    one.rename(folder / "aside")
    two.rename(one)
    (folder / "aside").rename(two)


def truncate(folder: Path) -> None:
    one = min(folder.glob("*.safetensors"))
    os.truncate(one, one.stat().st_size // 2)


def flip_an_id(folder: Path) -> None:
    """One bit of one token id; size, time and header stay."""
    one = min(folder.glob("*.safetensors"))
    ids = open_shard(one).sample(1).input_ids.numpy().tobytes()
    data = bytearray(one.read_bytes())
    data[data.index(ids) + 4] ^= 1
    one.write_bytes(data)


def flip_the_mask(folder: Path) -> None:
    one = min(folder.glob("*.safetensors"))
    data = bytearray(one.read_bytes())
    assert data[-1] == 1  # the mask lies last; the last token of an answer is learnt
    data[-1] = 0
    one.write_bytes(data)


def rename(folder: Path) -> None:
    min(folder.glob("*.safetensors")).rename(folder / "states-1.safetensors")


def put_a_foreign_shard(folder: Path) -> None:
    """A shard of other samples under the name and key of ours."""
    other = folder / "other"
    write_corpus(other, [make_text(number + 9, 12, 6) for number in range(3)])
    min(other.glob("*.safetensors")).replace(min(folder.glob("*.safetensors")))


def put_a_shard_of_fewer_samples(folder: Path) -> None:
    other = folder / "other"
    write_corpus(other, [make_text(0, 12, 6)])
    min(other.glob("*.safetensors")).replace(min(folder.glob("*.safetensors")))


def put_something_else(folder: Path) -> None:
    min(folder.glob("*.safetensors")).write_bytes(b"PAR1" * 100)


def shorten_in_the_index(folder: Path) -> None:
    """A sample that is longer in the shard than in the index."""
    rows = list(read_table(folder / INDEX, STATES))
    rows[0]["length"] -= 1
    write_table(folder / INDEX, rows, STATES)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (truncate, "damaged shard, .* bytes where its header says"),
        (rename, "no such shard"),
        (swap, "it holds the shard states-0003: renamed or swapped"),
        (flip_an_id, "ids and mask at position 1 are not those of sample s1 "),
        (flip_the_mask, "ids and mask at position 2 are not those of sample s2 "),
        (put_a_foreign_shard, "ids and mask at position 0 are not those of sample s0 "),
        (put_a_shard_of_fewer_samples, "ids and mask at position 1 are not those of sample s1 "),
        (put_something_else, "not a safetensors file"),
        (shorten_in_the_index, r"are not those of sample s0 \(11 tokens\)"),
    ],
)
def test_e20_a_shard_that_is_not_what_the_index_says_is_named(
    tmp_path: Path, damage: Callable[[Path], None], told: str
) -> None:
    write_corpus(tmp_path, [make_text(number, 12, 6) for number in range(6)])
    damage(tmp_path)
    with pytest.raises(ValueError, match=rf"states-0000\.safetensors: .*{told}"):
        load_batch(tmp_path, read_corpus(tmp_path, VERIFIER).train, 3)


def test_a_flipped_bit_of_a_state_is_left_to_verify_unless_it_is_no_number(tmp_path: Path) -> None:
    """What a reader checks costs nothing beside what it reads; all bytes are `eagle3 verify`'s."""
    text = make_text(0, 12, 6)
    write_corpus(tmp_path, [text])
    [shard] = tmp_path.glob("*.safetensors")
    whole, place = shard.read_bytes(), open_shard(shard).sample(0).last_hidden_states.numpy().tobytes()
    for value, refused in ((np.float32(4.25), False), (np.float32("nan"), True)):
        changed = bytearray(whole)
        start = whole.index(place) + 4 * 4 * 3
        changed[start : start + 4] = value.tobytes()
        shard.write_bytes(changed)
        data._opened.cache_clear()
        refs = read_corpus(tmp_path, VERIFIER).train
        if refused:
            with pytest.raises(ValueError, match=r"not finite; `eagle3 verify .*` says what brings it back"):
                load_batch(tmp_path, refs, 3)
        else:
            assert load_batch(tmp_path, refs, 3).tokens == 12
        done = eagle3("verify", tmp_path)
        assert done.exit_code == 1
        assert f"{shard}: its bytes differ from its sha256" in done.stdout
