"""Recording with a real vLLM on a tiny verifier: values, a full KV cache, chunks, kill and resume, errors."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.v1.kv_cache_interface import KVCacheConfig

from eagle3.gates import check_shard
from eagle3.hidden_states import require_agreement
from eagle3.params import Params
from eagle3.schemas import STATES
from eagle3.serving.connector import FinishedRequest, StateWriter, hidden_state_group, request_problem
from eagle3.serving.recorder import Placement, digest_ids
from eagle3.shards import Sample, open_shard, write_shard
from eagle3.tables import Row, read_table
from eagle3.verifier_head import load_head
from stages.extract import extract
from tests.tiny_verifiers import build_tiny_verifier
from tests.token_tables import (
    PROJECT,
    greedy_samples,
    token_row,
    write_params,
    write_tokens,
    write_verifier_json,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_core")]
AUX = [2, 4, 5]
FILES = ("tokens", "verifier.json", "hidden_states", "metrics.json", "params.yaml")


@dataclass(frozen=True)
class Interruption:
    """How a run of the stage was ended: what it said, processes that outlived it, shards finished by then."""

    code: int
    told: str
    orphans: list[psutil.Process]
    shards: dict[str, int]  # with times of modification


@dataclass
class Recording:
    """A finished run of the stage, interrupted three times on its way: engine killed, engine stopped, stage killed."""

    folder: Path
    verifier: Path
    rows: list[Row]
    params: Params
    interruptions: dict[str, Interruption]

    @property
    def work(self) -> Path:
        return self.folder / "work"

    def index(self) -> list[Row]:
        return list(read_table(self.folder / "hidden_states" / "index.parquet", STATES))

    def sample(self, entry: Row) -> Sample:
        return open_shard(self.folder / "hidden_states" / entry["shard"]).sample(entry["position"])


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory, one_core: None) -> Recording:
    """72 samples; the KV cache holds 10 blocks of 128 tokens, a step reads at most 48 tokens.

    The last three share a prefix of 200 tokens, and two of them are the same row.
    """
    folder = tmp_path_factory.mktemp("recording")
    verifier = build_tiny_verifier(folder / "verifier", tied=False)
    _vary_norm(verifier)
    settings: dict[str, object] = {
        "verifier__aux_layer_ids": AUX,
        "engine__cpu_kv_cache_gib": 0.008,
        "engine__max_num_seqs": 8,
        "engine__max_num_batched_tokens": 48,
        "extract__shard_min_mib": 0.3,
        "extract__shard_max_mib": 0.9,
        "extract__max_pending_mib": 0.3,
    }
    params = write_params(folder / "params.yaml", verifier, **settings)
    write_verifier_json(folder / "verifier.json", params)
    choice = random.Random(0)
    lengths = [(choice.randrange(5, 60), choice.randrange(4, 90)) for _ in range(69)] + [(150, 106)]
    rows = [token_row(ids, prompt) for ids, (prompt, _) in zip(greedy_samples(verifier, lengths), lengths, strict=True)]
    rows += [token_row(rows[-1]["input_ids"][:200], 150), rows[-1]]
    write_tokens(folder / "tokens", rows)
    interruptions = {"engine killed": _interrupt(folder, 1, engine=True, number=signal.SIGKILL)}
    write_params(folder / "params.yaml", verifier, **settings, extract__stall_timeout_s=5.0)
    interruptions["engine stopped"] = _interrupt(folder, 2, engine=True, number=signal.SIGSTOP)
    write_params(folder / "params.yaml", verifier, **settings)
    interruptions["stage killed"] = _interrupt(folder, 3, engine=False, number=signal.SIGKILL)
    last = _start(folder)
    _, told = last.communicate(timeout=300)
    assert last.returncode == 0, told
    return Recording(folder, verifier, rows, params, interruptions)


def _vary_norm(verifier: Path) -> None:
    """Random final norm: with all ones, states before and after it would give the same tokens."""
    model = AutoModelForCausalLM.from_pretrained(verifier, dtype="auto")
    torch.manual_seed(3)
    model.model.norm.weight.data.uniform_(0.1, 3)
    model.save_pretrained(verifier)


def _start(folder: Path) -> "subprocess.Popen[str]":
    environment = os.environ | {"EAGLE3_WORK_DIR": str(folder / "work")}
    command = [sys.executable, "-m", "stages.extract", *(str(folder / name) for name in FILES)]
    return subprocess.Popen(command, env=environment, cwd=PROJECT, stderr=subprocess.PIPE, text=True)


def _finished(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (folder / "work/extract").glob("*.safetensors")}


def _interrupt(folder: Path, shards: int, *, engine: bool, number: int) -> Interruption:
    """Start the stage; when so many shards are done, signal it or its engine."""
    stage = _start(folder)
    deadline = time.monotonic() + 300
    while len(_finished(folder)) < shards or not psutil.Process(stage.pid).children():
        assert stage.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    if shards > 1:
        _wait_for_another(folder, deadline)
    children = psutil.Process(stage.pid).children(recursive=True)
    os.kill(children[0].pid if engine else stage.pid, number)
    _, told = stage.communicate(timeout=120)
    _, orphans = psutil.wait_procs(children, 10)
    return Interruption(stage.returncode, told, orphans, _finished(folder))


def _wait_for_another(folder: Path, deadline: float) -> None:
    """Until this run has finished a shard too."""
    before = _finished(folder)
    while _finished(folder) == before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_killed_stage_leaves_no_process_and_loses_no_shard(recording: Recording) -> None:
    killed = recording.interruptions["stage killed"]
    assert (killed.code, killed.orphans) == (-signal.SIGKILL, [])
    metrics = json.loads((recording.folder / "metrics.json").read_text())
    assert len(killed.shards) <= metrics["shards_reused"] < metrics["shards"]
    assert killed.shards.items() <= _finished(recording.folder).items()
    assert not list((recording.work / "extract").glob("*.partial"))


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("engine killed", r"recording engine: ended unexpectedly \(killed by SIGKILL\)"),
        ("engine stopped", r"recording engine: made no progress for 5 s; log: "),
    ],
)
def test_a_killed_or_stopped_engine_ends_the_stage_with_its_log_and_loses_no_shard(
    recording: Recording, how: str, told: str
) -> None:
    ended = recording.interruptions[how]
    assert (ended.code, ended.orphans) == (1, [])
    last = ended.told.splitlines()[-1]
    assert re.search(told, last) and "work/logs/extract.log" in last
    assert last.endswith("finished shards are kept, run again to go on")
    assert len(ended.shards) >= 1
    assert ended.shards.items() <= _finished(recording.folder).items()


def test_every_row_is_recorded_with_more_tokens_than_the_cache_holds(recording: Recording) -> None:
    log = (recording.work / "logs" / "extract.log").read_text()
    cache = int(log.split("KV cache size: ")[1].split(" tokens")[0].replace(",", ""))
    assert sum(row["length"] for row in recording.rows) > 2 * cache
    assert [row["sample_id"] for row in recording.index()] == [row["sample_id"] for row in recording.rows]


def test_states_are_those_of_transformers(recording: Recording) -> None:
    """Values, order of layers, and the last state before the final norm; the engine read these rows in chunks.

    Rows of a common prefix and the same row twice are among them, each computed in full.
    """
    model = AutoModelForCausalLM.from_pretrained(recording.verifier, dtype="auto")
    before_norm: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0][0]))
    for entry, row in zip(recording.index(), recording.rows, strict=True):
        sample = recording.sample(entry)
        before_norm.clear()
        with torch.inference_mode():
            expected = model(torch.tensor([row["input_ids"]]), output_hidden_states=True).hidden_states
        aux = torch.cat([expected[layer][0] for layer in AUX], dim=1)
        assert sample.input_ids.tolist() == row["input_ids"]
        torch.testing.assert_close(sample.aux_hidden_states, aux, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(sample.last_hidden_states, before_norm[0], atol=2e-4, rtol=1e-4)


def test_the_gates_fail_for_tampered_states(recording: Recording, tmp_path: Path) -> None:
    head = load_head(recording.verifier)
    entries = [entry for entry in recording.index() if entry["loss_tokens"] >= 20][:12]
    right = [recording.sample(entry) for entry in entries]
    metadata = open_shard(recording.folder / "hidden_states" / entries[0]["shard"]).metadata

    def judge(change: str) -> set[int]:
        write_shard(tmp_path / "x", [_tampered(sample, change, head.norm) for sample in right], metadata)
        if change == "swap":
            write_shard(tmp_path / "x", [_with_states(right[0], right[1]), _with_states(right[1], right[0])], metadata)
        shard = open_shard(tmp_path / "x")
        problems, agreement = check_shard(shard, [True] * len(shard), {}, AUX, head, 12)
        require_agreement("x", problems, agreement, recording.params.extract)
        return set(problems)

    assert judge("nothing") == set()
    for change, told in {"shift": "", "layer": "", "norm": "", "swap": r".*worst samples: 0 \(.* 1 \("}.items():
        with pytest.raises(ValueError, match=r"verifier's head gives" + told):
            judge(change)


def _tampered(sample: Sample, change: str, norm: torch.Tensor) -> Sample:
    last = sample.last_hidden_states
    match change:
        case "shift":
            last = last.roll(1, 0)
        case "layer":
            last = sample.aux_hidden_states[:, -last.shape[1] :].contiguous()
        case "norm":
            last = last * last.square().mean(-1, keepdim=True).rsqrt() * norm
    return Sample(sample.input_ids, sample.loss_mask, sample.aux_hidden_states, last)


def _with_states(sample: Sample, other: Sample) -> Sample:
    """The sample's ids over the other's states, both cut to the shorter length."""
    length = min(len(sample.input_ids), len(other.input_ids))
    return Sample(
        sample.input_ids[-length:],
        sample.loss_mask[-length:],
        other.aux_hidden_states[-length:].contiguous(),
        other.last_hidden_states[-length:].contiguous(),
    )


def test_text_that_the_verifier_did_not_write_is_judged_by_the_engines_own_choices(
    recording: Recording, tmp_path: Path
) -> None:
    """Random ids: the head explains none of them, and gives what the engine chose, in chunks of 48 tokens too."""
    choice = random.Random(5)
    lengths = [(choice.randrange(5, 60), choice.randrange(4, 90)) for _ in range(20)]
    texts = [([choice.randrange(3, 600) for _ in range(prompt + answer)], prompt) for prompt, answer in lengths]
    write_tokens(tmp_path / "tokens", [token_row(ids, n, greedy=False, rebuilt=True) for ids, n in texts])
    names = ("verifier.json", "hidden_states", "metrics.json", "params.yaml")
    for name in ("verifier.json", "params.yaml"):
        (tmp_path / name).write_bytes((recording.folder / name).read_bytes())
    extract(tmp_path / "tokens", *(tmp_path / name for name in names))
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["head_agreement"] >= 0.97
    assert metrics["head_agreement_rows"] == sum(min(answer, 8) for _, answer in lengths)
    assert metrics["rows_out"] == 20


def test_fp8_states_are_the_lossless_ones_rounded(recording: Recording, tmp_path: Path) -> None:
    """And the gates still hold, on the states as they are stored."""
    write_params(tmp_path / "params.yaml", recording.verifier, verifier__aux_layer_ids=AUX, extract__storage="fp8")
    write_tokens(tmp_path / "tokens", recording.rows)
    outs = [tmp_path / name for name in ("hidden_states", "metrics.json", "params.yaml")]
    extract(tmp_path / "tokens", recording.folder / "verifier.json", *outs)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["rows_out"] == len(recording.rows)
    assert metrics["head_agreement"] >= 0.95
    lossless = json.loads((recording.folder / "metrics.json").read_text())
    assert metrics["bytes_per_token"] < 0.35 * lossless["bytes_per_token"]  # of float32
    stored = read_table(tmp_path / "hidden_states" / "index.parquet", STATES)
    for entry, other in zip(stored, recording.index(), strict=True):
        sample = open_shard(tmp_path / "hidden_states" / entry["shard"]).sample(entry["position"])
        exact = recording.sample(other)
        for name in ("aux_hidden_states", "last_hidden_states"):
            found, wanted = getattr(sample, name).float(), getattr(exact, name)
            torch.testing.assert_close(found, wanted, rtol=0.07, atol=2e-3)


def test_a_cache_too_small_for_one_sample_is_refused_at_the_start(recording: Recording, tmp_path: Path) -> None:
    write_params(tmp_path / "params.yaml", recording.verifier, engine__cpu_kv_cache_gib=0.002)
    outs = [tmp_path / "hidden_states", tmp_path / "metrics.json", tmp_path / "params.yaml"]
    told = r"recording engine: failed: .*KV cache.*engine\.cpu_kv_cache_gib sets.*; log: .*extract\.log"
    with pytest.raises(ValueError, match=told):
        extract(recording.folder / "tokens", recording.folder / "verifier.json", *outs)
    assert not psutil.Process().children(recursive=True)


def test_a_folder_without_weights_is_named_before_any_engine_starts(recording: Recording, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_params(tmp_path / "params.yaml", tmp_path / "empty")
    outs = [tmp_path / "hidden_states", tmp_path / "metrics.json", tmp_path / "params.yaml"]
    with pytest.raises(ValueError, match=r"empty: weights not readable"):
        extract(recording.folder / "tokens", recording.folder / "verifier.json", *outs)


@pytest.mark.parametrize(
    ("ids", "computed", "told"),
    [
        ([5, 6, 7], 3, None),
        ([5, 6, 7], 4, None),  # the token that the engine generates
        ([5, 7, 6], 3, "the engine read 3 ids that are not the sample's 3"),
        ([5, 6], 2, "the engine read 2 ids that are not the sample's 3"),
        ([5, 6, 7, 8], 4, "the engine read 4 ids that are not the sample's 3"),
        (None, 0, "the engine read 0 ids that are not the sample's 3"),
        ([5, 6, 7], 2, "the engine computed 2 of 3 tokens"),
    ],
)
def test_e01_e17_a_request_of_other_ids_or_of_fewer_states_is_a_problem(
    ids: list[int] | None, computed: int, told: str | None
) -> None:
    placement = Placement(0, "x", {}, 3, digest_ids([5, 6, 7]), ())
    assert request_problem(ids, computed, placement) == told


BLOCKS, LAYERS, BLOCK, HIDDEN = 6, 4, 8, 16


class Writer:
    """A StateWriter over a cache of random rows, writing to one file."""

    def __init__(self, folder: Path, path: Path, max_pending_bytes: int):
        fifo = folder / "fifo"
        os.mkfifo(fifo)
        self.reader = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
        self.cache = torch.randn(BLOCKS, LAYERS, BLOCK, HIDDEN).bfloat16()
        self.path = path
        self.writer = StateWriter(self.cache, torch.bfloat16, str(fifo), max_pending_bytes)

    def request(self, ordinal: int, blocks: list[int], length: int, problem: str | None = None) -> FinishedRequest:
        row = HIDDEN * 2
        start = ordinal * 1000 * row
        starts = {"aux_hidden_states": start, "last_hidden_states": start + length * 3 * row}
        placement = Placement(ordinal, str(self.path), starts, length, digest_ids([]), ())
        return FinishedRequest(f"request {ordinal}", placement, blocks, problem)

    def advance_until(self, count: int) -> set[str]:
        freed: set[str] = set()
        deadline = time.monotonic() + 10
        while len(freed) < count and time.monotonic() < deadline:
            freed |= self.writer.advance()
        return freed

    def told(self) -> list[dict[str, object]]:
        self.writer.close()
        return [json.loads(line) for line in os.read(self.reader, 1 << 16).splitlines()]


def test_writer_gathers_rows_through_the_block_table(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    made = Writer(tmp_path, tmp_path / "file", 1 << 20)
    made.writer.accept([made.request(0, [4, 1, 3], 19), made.request(1, [2], 8), made.request(2, [5], 3, "other ids")])
    assert made.advance_until(3) == {"request 0", "request 1", "request 2"}
    assert sorted((line["ordinal"], line["problem"]) for line in made.told()) == [
        (0, None),
        (1, None),
        (2, "other ids"),
    ]
    data = (tmp_path / "file").read_bytes()
    aux = torch.frombuffer(bytearray(data[: 19 * 3 * HIDDEN * 2]), dtype=torch.bfloat16).view(19, 3, HIDDEN)
    last = torch.frombuffer(bytearray(data[19 * 3 * HIDDEN * 2 :][: 19 * HIDDEN * 2]), dtype=torch.bfloat16)
    for token in range(19):
        block, slot = [4, 1, 3][token // BLOCK], token % BLOCK
        assert torch.equal(aux[token], made.cache[block, :3, slot])
        assert torch.equal(last.view(19, HIDDEN)[token], made.cache[block, 3, slot])


def test_writer_holds_blocks_back_when_the_disk_is_slow(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "stuck")  # opening it for writing waits for a reader: a disk that does not answer
    made = Writer(tmp_path, tmp_path / "stuck", 8 * LAYERS * HIDDEN * 2)
    made.writer.accept([made.request(n, [n], 8) for n in range(3)])
    assert made.writer.advance() == {"request 0"}
    assert made.writer.advance() == set()
    assert made.writer._pending == 8 * LAYERS * HIDDEN * 2
    reader = os.open(
        tmp_path / "stuck", os.O_RDONLY | os.O_NONBLOCK
    )  # it answers, with an error: a FIFO has no offsets
    with pytest.raises(OSError, match="seek"):
        made.advance_until(3)
    made.writer.close()
    os.close(reader)


def test_writer_raises_what_the_disk_said(tmp_path: Path) -> None:
    made = Writer(tmp_path, Path("/dev/full"), 1 << 20)
    made.writer.accept([made.request(0, [0], 8)])
    with pytest.raises(OSError, match="No space left"):
        made.advance_until(2)


def test_states_need_a_group_of_the_cache() -> None:
    with pytest.raises(ValueError, match="no KV cache group"):
        hidden_state_group(KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[]))
