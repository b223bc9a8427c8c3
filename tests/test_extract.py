"""The stage `extract` against a fake engine: bookkeeping, resumption, damage, faults of the engine and of the disk."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from eagle3.boundaries import cut_points
from eagle3.reasoning import NO_MARKERS
from eagle3.schemas import REJECTED, STATES
from eagle3.serving import recorder
from eagle3.shards import open_shard
from eagle3.tables import Row, read_table
from eagle3.verifier import VerifierIdentity, write_identity
from stages.extract import extract
from tests.fake_recording_engine import HIDDEN, VOCABULARY, following, states_of
from tests.token_tables import PROJECT, token_row, write_params, write_tokens

FAKE = "tests.fake_recording_engine:run_engine"
IDENTITY = VerifierIdentity(
    name="fake",
    digest="d" * 64,
    architecture="FakeForCausalLM",
    hidden_size=HIDDEN,
    num_layers=8,
    vocab_size=VOCABULARY,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    aux_layer_ids=(2, 4, 5),
    stop_token_ids=(1,),
    dtype="float32",
    engine="fake 1",
    markers=NO_MARKERS,
)


def make_row(choice: random.Random, *, length: int | None = None) -> Row:
    """A sample that obeys the fake verifier's rule."""
    length = length or choice.randrange(30, 120)
    prompt = choice.randrange(5, 20)
    ids = [choice.randrange(VOCABULARY) for _ in range(prompt)]
    while len(ids) < length:
        ids.append(following(ids[-1]))
    return token_row(ids, prompt, split=choice.choice(["train", "train", "validation"]))


@dataclass
class Run:
    """One project folder with a fake verifier."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch

    @property
    def out(self) -> Path:
        return self.folder / "hidden_states"

    @property
    def work(self) -> Path:
        return self.folder / "work" / "extract"

    def extract(self, rows: list[Row], *, identity: VerifierIdentity = IDENTITY, **faults: object) -> dict[str, float]:
        """Run the stage; returns its metrics."""
        self.monkeypatch.setenv("EAGLE3_FAKE", json.dumps(faults))
        write_tokens(self.folder / "tokens", rows)
        write_identity(identity, self.folder / "verifier.json")
        extract(*self.arguments())
        return json.loads((self.folder / "metrics.json").read_text())

    def arguments(self) -> list[Path]:
        names = ("tokens", "verifier.json", "hidden_states", "metrics.json", "params.yaml")
        return [self.folder / name for name in names]

    def requests(self) -> list[str]:
        """The requests since the last call."""
        log = self.folder / "requests.log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    def index(self) -> list[Row]:
        return list(read_table(self.out / "index.parquet", STATES))

    def rejected(self) -> list[Row]:
        return list(read_table(self.out / "rejected.parquet", REJECTED))

    def shards(self) -> dict[str, int]:
        """Finished shards in the store, with their times of modification."""
        return {path.name: path.stat().st_mtime_ns for path in self.work.glob("*.safetensors")}


def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: object) -> Run:
    """A project in `tmp_path`. changes: of params.yaml, as for write_params."""
    verifier = tmp_path / "verifier"
    verifier.mkdir()
    (verifier / "config.json").write_text(json.dumps({"rms_norm_eps": 1e-5, "tie_word_embeddings": True}))
    weights = {"model.embed_tokens.weight": torch.eye(VOCABULARY), "model.norm.weight": torch.ones(HIDDEN)}
    save_file(weights, verifier / "model.safetensors")
    sizes: dict[str, object] = {"extract__shard_min_mib": 0.2, "extract__shard_max_mib": 0.6}
    write_params(tmp_path / "params.yaml", verifier, **sizes | changes)
    monkeypatch.setattr(recorder, "ENGINE", FAKE)
    monkeypatch.setenv("EAGLE3_FAKE_REQUESTS", str(tmp_path / "requests.log"))
    return Run(tmp_path, monkeypatch)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return make_run(tmp_path, monkeypatch)


@pytest.fixture
def rows() -> list[Row]:
    choice = random.Random(0)
    return [make_row(choice) for _ in range(60)]


def test_fp8_takes_fewer_bytes_and_other_shards(run: Run, rows: list[Row]) -> None:
    plain = run.extract(rows)
    lossless = run.shards()
    params = run.folder / "params.yaml"
    params.write_text(params.read_text().replace("storage: lossless", "storage: fp8"))
    metrics = run.extract(rows)
    assert metrics["rows_out"] == len(rows) and metrics["shards_reused"] == 0
    assert plain["bytes_per_token"] > 3.5 * metrics["bytes_per_token"]  # of float32
    assert lossless.items() <= run.shards().items()  # both are kept
    for row, entry in zip(rows, run.index(), strict=True):
        sample = open_shard(run.out / entry["shard"]).sample(entry["position"])
        aux, last = states_of(row["input_ids"], 3)
        assert sample.input_ids.tolist() == row["input_ids"]
        assert torch.equal(sample.last_hidden_states.float(), torch.tensor(last))
        torch.testing.assert_close(
            sample.aux_hidden_states.float(), torch.tensor(aux).flatten(1), rtol=1 / 16, atol=1e-2
        )
    params.write_text(params.read_text().replace("storage: fp8", "storage: lossless"))
    assert run.extract(rows)["shards_reused"] == plain["shards"]


def test_every_sample_lies_where_the_index_says(run: Run, rows: list[Row]) -> None:
    metrics = run.extract(rows)
    index = run.index()
    assert [row["sample_id"] for row in index] == [row["sample_id"] for row in rows]
    assert [row["split"] for row in index] == [row["split"] for row in rows]
    for entry, row in zip(index, rows, strict=True):
        shard = open_shard(run.out / entry["shard"])
        sample = shard.sample(entry["position"])
        aux, last = states_of(row["input_ids"], 3)
        assert sample.input_ids.tolist() == row["input_ids"]
        assert sample.loss_mask.tolist() == row["loss_mask"]
        assert torch.equal(sample.aux_hidden_states, torch.tensor(aux).flatten(1))
        assert torch.equal(sample.last_hidden_states, torch.tensor(last))
        assert entry["row_start"] == shard.offsets[entry["position"]]
        assert (entry["length"], entry["loss_tokens"]) == (row["length"], sum(row["loss_mask"]))
    assert {path.name for path in run.out.iterdir()} == {row["shard"] for row in index} | {
        "index.parquet",
        "rejected.parquet",
    }
    assert metrics["rows_in"] == metrics["rows_out"] == 60
    assert metrics["shards"] == len({row["shard"] for row in index}) > 4
    assert metrics["shards_reused"] == 0
    assert metrics["tokens"] == sum(row["length"] for row in rows)
    assert metrics["bytes"] == sum((run.out / name).stat().st_size for name in {row["shard"] for row in index})
    assert metrics["bytes_per_token"] == pytest.approx(4 * HIDDEN * 4, rel=0.05)
    assert metrics["head_agreement"] == 1
    assert metrics["tokens_per_second"] > 0


def test_shards_of_the_out_are_links_into_the_store(run: Run, rows: list[Row]) -> None:
    run.extract(rows)
    for name in run.shards():
        assert (run.out / name).samefile(run.work / name)


def test_boundaries_are_those_of_the_content(run: Run, rows: list[Row]) -> None:
    run.extract(rows)
    sizes = [(row["sample_digest"], row["length"] * 4 * HIDDEN * 4) for row in rows]
    counts = list(cut_points(sizes, int(0.2 * 2**20), int(0.6 * 2**20)))
    positions = [row["position"] for row in run.index()]
    assert positions == [position for count in counts for position in range(count)]


def test_a_second_run_records_nothing(run: Run, rows: list[Row]) -> None:
    run.extract(rows)
    before, index = run.shards(), run.index()
    run.requests()
    shutil.rmtree(run.out)
    metrics = run.extract(rows)
    assert run.requests() == []
    assert run.shards() == before
    assert run.index() == index
    assert metrics["shards_reused"] == metrics["shards"]
    assert metrics["tokens_per_second"] == 0


def test_only_touched_shards_are_recorded_again(run: Run, rows: list[Row]) -> None:
    run.extract(rows)
    before = run.shards()
    run.requests()
    choice = random.Random(9)
    more = [*rows[:20], make_row(choice), *rows[20:], make_row(choice)]
    metrics = run.extract(more)
    assert len(run.requests()) < 40
    assert metrics["shards_reused"] > 0
    assert before.items() <= run.shards().items()
    assert [row["sample_id"] for row in run.index()] == [row["sample_id"] for row in more]


def test_fewer_rows_leave_nothing_stale_in_the_out(run: Run, rows: list[Row]) -> None:
    run.extract(rows)
    run.extract(rows[:15])
    assert {path.suffix for path in run.out.iterdir()} == {".safetensors", ".parquet"}
    assert {path.name for path in run.out.glob("*.safetensors")} == {row["shard"] for row in run.index()}


@pytest.mark.parametrize(
    "changed",
    [
        {"digest": "e" * 64},
        {"aux_layer_ids": (1, 4, 5)},
        {"engine": "fake 2"},
    ],
)
def test_whatever_decides_the_values_is_part_of_the_key(run: Run, rows: list[Row], changed: dict[str, object]) -> None:
    run.extract(rows[:10])
    run.requests()
    run.extract(rows[:10], identity=replace(IDENTITY, **changed))
    assert len(run.requests()) == 10


def human_row(choice: random.Random) -> Row:
    """A sample that the fake verifier would not have written."""
    ids = [choice.randrange(VOCABULARY) for _ in range(choice.randrange(30, 120))]
    return token_row(ids, 10, greedy=False, rebuilt=True)


def test_text_of_people_is_recorded_and_judged_by_the_engines_own_choices(run: Run) -> None:
    choice = random.Random(2)
    rows = [human_row(choice) for _ in range(30)]
    metrics = run.extract(rows)
    assert (metrics["rows_out"], metrics["head_agreement"], metrics["head_agreement_rows"]) == (30, 1, 30 * 8)
    with pytest.raises(ValueError, match="verifier's head gives"):
        run.extract([human_row(choice) for _ in range(30)], shift_from=0)
    mixed = [make_row(choice) if number % 2 else human_row(choice) for number in range(30)]
    assert run.extract(mixed)["head_agreement"] == 1


def test_an_engine_that_tells_no_choices_is_noticed(run: Run) -> None:
    choice = random.Random(2)
    with pytest.raises(ValueError, match="did not tell its own choices"):
        run.extract([human_row(choice) for _ in range(30)], no_choices=True)


@pytest.mark.parametrize("kept", [0.0, 0.6])
def test_s02_a_truncated_shard_is_redone(run: Run, rows: list[Row], kept: float) -> None:
    run.extract(rows)
    victim = next(iter(run.work.glob("*.safetensors")))
    data = victim.read_bytes()
    victim.unlink()
    victim.write_bytes(data[: int(kept * len(data))])
    before = run.shards()
    run.requests()
    run.extract(rows)
    assert 0 < len(run.requests()) < 60
    assert victim.read_bytes() == data
    assert sum(before[name] != modified for name, modified in run.shards().items()) == 1


def test_a_shard_with_changed_bytes_or_no_facts_is_redone(run: Run, rows: list[Row]) -> None:
    run.extract(rows)
    one, two = sorted(run.work.glob("*.safetensors"))[:2]
    data = bytearray(one.read_bytes())
    data[-2000] ^= 1
    one.unlink()
    one.write_bytes(data)
    two.with_suffix(".json").write_text("{}")
    run.extract(rows)
    for entry in run.index():
        assert open_shard(run.out / entry["shard"]).metadata["key"] == entry["shard"].split(".")[0]
    assert one.read_bytes() != bytes(data)


def test_s02_strays_are_removed(run: Run, rows: list[Row]) -> None:
    run.work.mkdir(parents=True)
    (run.work / "abc.partial").write_bytes(b"half")
    run.extract(rows)
    assert not list(run.work.glob("*.partial"))


@pytest.mark.parametrize(
    ("spoil", "reason", "where"),
    [
        ("one NaN", "not-finite", "token 3, layer 4"),
        ("one infinity", "not-finite", "token 3, the last layer"),
        ("all NaN", "not-finite", "token 0, layer 2"),
        ("zeros", "zero-row", "token 0, layer 2"),
        ("constant row", "constant-row", "token 3, layer 4"),
    ],
)
def test_e05_e06_a_bad_sample_is_quarantined_by_reason(
    run: Run, rows: list[Row], spoil: str, reason: str, where: str
) -> None:
    write_params(
        run.folder / "params.yaml",
        run.folder / "verifier",
        extract__shard_min_mib=0.2,
        extract__shard_max_mib=0.6,
        extract__max_rejected_share=0.02,
    )
    metrics = run.extract(rows, spoil=spoil, spoil_at=8)
    assert metrics["rows_rejected"] == {reason: 1}
    assert run.rejected() == [{"row": rows[7]["sample_id"], "reason": reason, "detail": where}]
    assert [row["sample_id"] for row in run.index()] == [row["sample_id"] for row in rows[:7] + rows[8:]]
    run.requests()
    assert run.extract(rows)["rows_rejected"] == {reason: 1}  # and it is remembered
    assert run.requests() == []


def test_e05_states_of_another_row_are_named_and_not_kept(run: Run, rows: list[Row]) -> None:
    told = r"shard \w+: the verifier's head gives .* worst samples: \d+ \(the head gives 0% of 8 tokens\).*not kept"
    with pytest.raises(ValueError, match=told):
        run.extract(rows, spoil="another sample", spoil_at=8)
    assert not run.out.exists()


def test_too_many_rejected_samples_fail_the_stage(run: Run, rows: list[Row]) -> None:
    with pytest.raises(ValueError, match=r"1 of 60 rows rejected \(1 not-finite\).*max_rejected_share"):
        run.extract(rows, spoil="one NaN", spoil_at=8)
    assert not run.out.exists()


def test_samples_that_cannot_be_recorded_are_rejected_by_name(run: Run, rows: list[Row]) -> None:
    choice = random.Random(3)
    long, foreign = make_row(choice, length=257), make_row(choice)
    foreign = token_row([*foreign["input_ids"], VOCABULARY], foreign["prompt_length"])
    write_params(run.folder / "params.yaml", run.folder / "verifier", extract__max_rejected_share=0.1)
    metrics = run.extract([long, *rows[:29], foreign, make_row(choice, length=256)], wrong_ids=4)
    assert metrics["rows_rejected"] == {"foreign-token": 1, "not-recorded": 1, "too-long": 1}
    assert metrics["rows_out"] == 29
    details = {row["reason"]: row for row in run.rejected()}
    assert details["too-long"]["row"] == long["sample_id"]
    assert details["not-recorded"]["detail"] == "the engine read other ids"
    assert len(run.requests()) == 30


def test_wrong_states_stop_the_stage_and_are_not_kept(run: Run, rows: list[Row]) -> None:
    with pytest.raises(ValueError, match=r"verifier's head gives .* Likely causes: .* not kept"):
        run.extract(rows, shift_from=30)
    kept = run.shards()
    assert kept
    assert not run.out.exists()
    assert not list(run.work.glob("*.partial"))
    run.requests()
    run.extract(rows)
    assert 30 <= len(run.requests()) < 60
    assert kept.items() <= run.shards().items()


def test_a_stricter_gate_also_judges_what_is_there(run: Run, rows: list[Row]) -> None:
    loose = {"extract__shard_min_mib": 0.2, "extract__shard_max_mib": 0.6}
    write_params(
        run.folder / "params.yaml",
        run.folder / "verifier",
        **loose,
        extract__min_head_agreement=0.0,
        extract__max_rejected_share=1.0,
    )
    run.extract(rows, shift_from=30)
    run.requests()
    write_params(run.folder / "params.yaml", run.folder / "verifier", **loose)
    with pytest.raises(ValueError, match="verifier's head gives"):
        run.extract(rows)
    assert run.requests() == []


def test_shards_that_may_each_fall_short_by_chance_may_not_all(run: Run, rows: list[Row]) -> None:
    """In every sample one of eight judged tokens is not what the head gives."""
    odd = []
    for row in rows:
        ids, first = [*row["input_ids"]], row["prompt_length"]
        ids[first] = (following(ids[first - 1]) + 1) % VOCABULARY
        odd.append(token_row(ids, first, split=row["split"]))
    with pytest.raises(
        ValueError, match=r"all shards together: the verifier's head gives 8.* of \d{3} generated tokens"
    ):
        run.extract(odd)
    assert len(run.shards()) > 6
    assert not run.out.exists()


def test_a_dying_engine_is_one_sentence_with_its_log(run: Run, rows: list[Row]) -> None:
    with pytest.raises(ValueError, match=r"recording engine: ended unexpectedly \(exit code 3\)") as failure:
        run.extract(rows, die_after=40)
    assert "SomethingError: the engine met its end" in str(failure.value)
    assert str(run.folder / "work" / "logs" / "extract.log") in str(failure.value)
    kept = run.shards()
    assert kept
    run.requests()
    run.extract(rows)
    assert len(run.requests()) < 60
    assert kept.items() <= run.shards().items()


def test_a_hanging_engine_is_noticed(run: Run, rows: list[Row]) -> None:
    write_params(run.folder / "params.yaml", run.folder / "verifier", extract__stall_timeout_s=1.0)
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"made no progress for 1 s; log: .*extract\.log"):
        run.extract(rows, hang_after=20)
    assert time.monotonic() - started < 30
    assert not psutil.Process().children(recursive=True)


def test_an_engine_that_does_not_start_says_why(run: Run, rows: list[Row]) -> None:
    with pytest.raises(
        ValueError, match=r"failed: no room for the KV cache \(engine.cpu_kv_cache_gib sets .*; log: .*extract\.log"
    ):
        run.extract(rows, refuse="no room for the KV cache")


def test_a_full_disk_inside_the_engine(run: Run, rows: list[Row]) -> None:
    with pytest.raises(ValueError, match="No space left on device"):
        run.extract(rows, raise_after=10)


def test_s01_a_full_disk_before_a_shard_is_begun(run: Run, rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    def reserve(descriptor: int, start: int, size: int) -> None:
        if len(list(run.work.glob("*.partial"))) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    with pytest.raises(ValueError, match=r"No space left on device while reserving [\d,]+ bytes; free some room"):
        run.extract(rows, seconds_each=0.01)
    assert not run.out.exists()
    assert not list(run.work.glob("*.partial"))
    monkeypatch.undo()


def test_s01_bytes_are_counted_before_the_engine_starts(
    run: Run, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 1000))
    with pytest.raises(ValueError, match=r"need 4,\d\d\d,\d\d\d bytes, 1,000 are free\. Free some room"):
        run.extract(rows)
    assert run.requests() == []


def test_an_empty_table_is_an_error(run: Run) -> None:
    with pytest.raises(ValueError, match="no row is left of 0"):
        run.extract([])


def test_equal_samples_twice(run: Run, rows: list[Row]) -> None:
    metrics = run.extract([*rows, *rows])
    assert metrics["rows_out"] == 120
    assert [row["sample_id"] for row in run.index()] == [row["sample_id"] for row in rows] * 2


def test_killed_midway_and_run_again(run: Run, rows: list[Row]) -> None:
    write_tokens(run.folder / "tokens", rows)
    write_identity(IDENTITY, run.folder / "verifier.json")
    code = "import sys; from pathlib import Path; from eagle3.serving import recorder; "
    code += f"from stages.extract import extract; recorder.ENGINE = {FAKE!r}; extract(*map(Path, sys.argv[1:]))"
    environment = os.environ | {"EAGLE3_FAKE": json.dumps({"seconds_each": 0.05}), "PYTHONPATH": str(PROJECT)}
    stage = subprocess.Popen([sys.executable, "-c", code, *map(str, run.arguments())], env=environment)
    deadline = time.monotonic() + 60
    while len(run.shards()) < 2 and time.monotonic() < deadline:
        time.sleep(0.002)
    children = psutil.Process(stage.pid).children(recursive=True)
    stage.send_signal(signal.SIGKILL)
    stage.wait()
    assert children
    assert not psutil.wait_procs(children, 5)[1]
    kept = run.shards()
    assert len(kept) >= 2
    assert len(list(run.work.glob("*.partial"))) >= 1
    assert not run.out.exists()
    run.requests()
    metrics = run.extract(rows)
    assert kept.items() <= run.shards().items()
    assert metrics["shards_reused"] == len(kept)
    recorded = [row for row in run.index() if row["shard"] not in kept]
    assert len(run.requests()) == len(recorded)


def test_s06_the_out_is_few_large_files_published_at_the_end_where_links_are_impossible(
    run: Run, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(source: Path, target: Path) -> None:
        assert not run.out.exists()  # nothing is seen of it before it is whole
        raise OSError(errno.EXDEV, f"{source} and {target} are on two filesystems")

    monkeypatch.setattr(os, "link", no_links)
    metrics = run.extract(rows)
    names = {row["shard"] for row in run.index()}
    assert {path.name for path in run.out.iterdir()} == names | {"index.parquet", "rejected.parquet"}
    assert len(names) == metrics["shards"] < len(rows)
    for name in names:
        assert (run.out / name).read_bytes() == (run.work / name).read_bytes()
        assert not (run.out / name).samefile(run.work / name)
    assert metrics["tokens_per_second"] > 0
