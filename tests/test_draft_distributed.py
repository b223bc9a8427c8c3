"""Training in several processes, each of them real and started by torchrun: the same steps, and one common end."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eagle3.consistency import check_together
from eagle3.console import Interrupted
from eagle3.draft.data import Batch, SampleRef, read_corpus
from eagle3.draft.processes import LOOPBACK, Processes
from eagle3.draft.training import Trainer, make_schedule
from eagle3.params import load_params
from eagle3.verifier import read_identity
from tests.draft_data import Text, make_states, random_texts
from tests.draft_runs import PARAMS, PLAIN, ROOT, SETTINGS, Run, checkpoints, wait_until
from tests.forked_stages import Stage, end_server, gone

CPU = torch.device("cpu")
TOGETHER = PLAIN | {"nproc": 2, "gradient_accumulation": 3}


@pytest.fixture(scope="module", autouse=True)
def no_server_afterwards() -> Iterator[None]:
    yield
    end_server()
    assert not psutil.Process().children()


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the processes that are started here."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def uneven(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `recorded`, with two long samples among which no row counts: each fills a batch that teaches nothing."""
    root = tmp_path_factory.mktemp("uneven")
    texts = random_texts(24)
    for number in range(2):
        ids = [3 + (7 * number + place) % 400 for place in range(128)]
        texts.append(Text(f"silent-{number}", "train", ids, [place in {20, 90} for place in range(128)]))
    make_states(tiny_verifier, root, texts)
    return root


@pytest.fixture
def run(tmp_path: Path, uneven: Path, tiny_verifier: Path) -> Run:
    return Run(tmp_path, uneven, tiny_verifier)


class Undisturbed:
    """What the same settings make of the corpus in a folder and a work store of their own."""

    def __init__(self, run: Run, monkeypatch: pytest.MonkeyPatch, **changes: Any):
        self.root = run.root / "undisturbed"
        self.root.mkdir()
        with monkeypatch.context() as patch:
            patch.setenv("EAGLE3_WORK_DIR", str(self.root / "work"))
            other = Run(self.root, run.recorded, run.verifier)
            self.metrics = finish(other, **changes)
            self.weights = other.weights()

    def same_as(self, run: Run, within: float = 1e-5) -> None:
        """Up to rounding: another number of processes sums in another order."""
        metrics = json.loads((run.root / "train.json").read_text())
        counted = ("steps", "tokens", "best_step", "draft_vocab_size", "rows_in", "rows_out", "packing_waste")
        assert {name: metrics[name] for name in counted} == {name: self.metrics[name] for name in counted}
        for name in ("train_loss", "validation_loss", "expected_acceptance_length", "prefix_agreement_0"):
            assert metrics[name] == pytest.approx(self.metrics[name], rel=1e-5), name
        ours, theirs = (curve(root) for root in (run.root, self.root))
        assert ours == pytest.approx(theirs, rel=1e-5) and len(ours) == metrics["steps"]
        for name, value in run.weights().items():
            torch.testing.assert_close(value, self.weights[name], atol=within, rtol=1e-4)

    def same_bits_as(self, run: Run) -> None:
        for name, value in run.weights().items():
            assert value.numpy().tobytes() == self.weights[name].numpy().tobytes(), name
        assert curve(run.root) == curve(self.root)


def finish(run: Run, **changes: Any) -> dict[str, Any]:
    """The stage to its end: in this process, or in several that are forked. Returns its metrics."""
    settings = TOGETHER | changes
    if settings["nproc"] == 1:
        return run.stage(**settings)
    run.write_params(settings)
    code, said = Stage(run).ended(within_s=120)
    assert code == 0, said
    metrics: dict[str, Any] = json.loads((run.root / "train.json").read_text())
    return metrics


def curve(root: Path) -> list[float]:
    """The plotted losses."""
    lines = (root / "plots/plots/metrics/train/loss.tsv").read_text().splitlines()[1:]
    return [float(line.split("\t")[1]) for line in lines]


def work() -> Path:
    return Path(os.environ["EAGLE3_WORK_DIR"])


def reached() -> int:
    """The step of the newest checkpoint."""
    return max((int(path.name[5:]) for path in checkpoints(work())), default=0)


def at_step(number: int) -> Callable[[], bool]:
    return lambda: any(int(path.name[5:]) >= number for path in checkpoints(work()))


def schedule_of(run: Run) -> list[list[list[SampleRef]]]:
    """The optimiser steps that `TOGETHER` makes of the corpus."""
    corpus = read_corpus(run.recorded / "hidden_states", read_identity(run.recorded / "verifier.json"))
    return list(make_schedule(corpus.train, PARAMS.model_copy(update=SETTINGS | TOGETHER)).after(0))


def test_the_batches_of_a_step_are_dealt_once_each() -> None:
    for count in (1, 2, 3, 8):
        shares = [Processes(rank, count, CPU).share(range(10)) for rank in range(count)]
        assert sorted(item for share in shares for item in share) == list(range(10))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_two_processes_train_what_one_does(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps of an odd number of batches, steps without work for one process, and batches that teach nothing.

    The stage starts them as it does for users.
    """
    steps = schedule_of(run)
    assert {len(step) for step in steps} == {1, 3}
    silent = [[batch[0].sample_id.startswith("silent") for batch in step] for step in steps]
    assert [True] in silent  # no process has anything that counts
    assert any(all(step[1::2]) and not all(step) for step in silent)  # one has not
    single = Undisturbed(run, monkeypatch, nproc=1)
    run.stage(**TOGETHER)
    single.same_as(run)


@pytest.mark.parametrize(
    "changes",
    [
        {"sharding": "fsdp"},
        {"sharding": "fsdp", "freeze_lm_head": False, "num_layers": 2, "max_gradient_norm": 0.05},
        {"optimiser": "muon"},
        {"optimiser": "muon", "sharding": "fsdp"},
    ],
    ids=["shards", "shards of more", "Muon", "Muon in shards"],
)
def test_sharded_or_not_they_train_what_one_does(
    run: Run, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    single = Undisturbed(run, monkeypatch, **(changes | {"nproc": 1}))
    finish(run, **changes)
    single.same_as(run, within=1e-4 if "optimiser" in changes else 1e-5)  # Muon's own products are in bfloat16


def test_a_step_in_which_nothing_counts_leaves_a_resume_exact(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimiser takes no step then, so its count is not that of the schedule."""
    changes = TOGETHER | {"nproc": 1}
    steps = schedule_of(run)
    idle = next(n for n, step in enumerate(steps) if all(batch[0].sample_id.startswith("silent") for batch in step))
    assert idle + 2 < len(steps)
    whole = run.trainer(**changes)
    whole.train(run.root / "plots")
    (run.root / "other").mkdir()
    other = Run(run.root / "other", run.recorded, run.verifier)
    original = Trainer._step

    def interrupted(self: Trainer, group: list[Batch]) -> None:
        original(self, group)
        if self.state.step == idle + 1:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "_step", interrupted)
    with pytest.raises(Interrupted):
        other.trainer(**changes).train(other.root / "plots")
    monkeypatch.setattr(Trainer, "_step", original)
    resumed = other.trainer(**changes)
    resumed.train(other.root / "plots")
    assert resumed.state.updates < resumed.state.step
    for name, value in whole.trained.items():
        assert torch.equal(value, resumed.trained[name]), name


def test_a_process_without_work_is_refused_with_the_remedy(run: Run) -> None:
    with pytest.raises(ValueError, match=r"gradient_accumulation is 2.*too few for 3 processes; set it to 3 or more"):
        run.stage(nproc=3, gradient_accumulation=2)
    with pytest.raises(ValueError, match=r"train.nproc is above train.gradient_accumulation"):
        check_together(load_params(run.params))


def test_an_error_in_all_processes_is_told_once(run: Run) -> None:
    run.write_params(TOGETHER | {"learning_rate": 1e38})
    code, said = Stage(run).ended(within_s=120)
    assert code == 1
    assert said.count("error:") == 1 and "Traceback" not in said, said
    assert "at optimiser step 2 (samples" in said
    assert checkpoints(work())[-1].name == "step-00000001"
    assert not (run.root / "draft").exists()


def test_an_error_in_one_process_ends_all(run: Run, tmp_path: Path, uneven: Path) -> None:
    """Only the process that is dealt the damaged sample reads it."""
    shutil.copytree(uneven, tmp_path / "damaged")
    last = max((tmp_path / "damaged/hidden_states").glob("*.safetensors"))
    with safe_open(last, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(last)
    tensors["last_hidden_states"][-1] = float("nan")
    save_file(tensors, last, metadata)
    damaged = Run(tmp_path, tmp_path / "damaged", run.verifier)
    damaged.write_params(TOGETHER)
    code, said = Stage(damaged).ended(within_s=120)
    assert code == 1
    assert said.count("error:") == 1 and "Traceback" not in said, said
    assert "sample silent-1 has states that are not finite" in said


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("sharding", "epochs"), [("none", 16), ("fsdp", 8)])  # the steps of the latter take longer
def test_killed_interrupted_and_gone_on(run: Run, monkeypatch: pytest.MonkeyPatch, sharding: str, epochs: int) -> None:
    """A worker is killed, then the stage, then both are interrupted: each time all end, and the next run goes on,
    to the same bits."""
    changes = TOGETHER | {"epochs": epochs, "sharding": sharding}
    whole = Undisturbed(run, monkeypatch, **changes)
    run.write_params(changes)

    stage = Stage(run)
    wait_until(at_step(2))
    started = time.monotonic()
    stage.workers()[1].kill()
    code, said = stage.ended(within_s=60)
    assert time.monotonic() - started < 45
    assert code == 1 and "process 1 of 2 was killed by SIGKILL" in said and "run the same command again" in said
    assert said.count("error:") == 1 and "Traceback" not in said, said

    stage = Stage(run)
    wait_until(at_step(reached() + 2))
    workers = stage.workers()
    stage.process.kill()
    gone(workers, 10)
    assert "found this run at step" in stage.ended(within_s=10)[1]

    for signalled in ("terminal", "one worker"):
        stage = Stage(run)
        wait_until(at_step(reached() + 2))
        if signalled == "terminal":
            os.killpg(stage.pid, signal.SIGINT)
        else:
            stage.workers()[1].terminate()
        code, said = stage.ended(within_s=60)
        assert code == 130 and said.count("interrupted; finished work is kept") == 1, said
        assert "error:" not in said and "Traceback" not in said, said

    assert reached() < whole.metrics["steps"], "it ended too early to prove anything"
    finish(run, **changes)
    whole.same_bits_as(run)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_second_interruption_waits_for_nobody(run: Run) -> None:
    run.write_params(TOGETHER | {"epochs": 400})
    stage = Stage(run)
    wait_until(at_step(1))
    workers = stage.workers()
    workers[0].suspend()  # it cannot save
    for _ in range(2):
        os.killpg(stage.pid, signal.SIGINT)
        time.sleep(0.5)
    code, said = stage.ended(within_s=20)
    assert code == 130 and "Traceback" not in said, said
    gone(workers, 5)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_others_go_on_with_the_same_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two with shards, then two without, then one alone, and what it makes is what one alone makes from the start."""
    changes = {"epochs": 12, "freeze_lm_head": False}
    single = Undisturbed(run, monkeypatch, **(changes | {"nproc": 1}))
    for sharding in ("fsdp", "none"):
        run.write_params(TOGETHER | changes | {"sharding": sharding})
        stage = Stage(run)
        wait_until(at_step(reached() + 3))
        os.kill(stage.pid, signal.SIGTERM)
        assert stage.ended(within_s=60)[0] == 130
    assert 6 <= reached() < single.metrics["steps"]
    finish(run, **(changes | {"nproc": 1}))
    single.same_as(run)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_machines_join_by_torchrun(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two torchruns of the user's, in a network of their own: they share the data, and neither outs nor work store."""
    single = Undisturbed(run, monkeypatch, nproc=1)
    run.write_params(TOGETHER | {"nproc": 1})
    script = f"""
        ip link set lo up
        for node in 0 1; do
            (cd {run.root}/node$node && EAGLE3_WORK_DIR=work {sys.executable} -m torch.distributed.run --nnodes=2 \\
                --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint={LOOPBACK}:29400 --rdzv-id=1 \\
                --local-addr={LOOPBACK} -m stages.train "$@" 2> said) &
        done
        wait
    """
    inputs = [str(path) for path in run.arguments if path.parent != run.root or path == run.params]
    arguments = [*inputs[:2], "draft", "train.json", "plots", inputs[2]]
    for node in range(2):
        (run.root / f"node{node}").mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    isolated = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", script, "sh", *arguments]
    subprocess.run(isolated, env=environment, timeout=300, check=True)
    said = [(run.root / f"node{node}" / "said").read_text() for node in range(2)]
    wrote = [node for node in range(2) if (run.root / f"node{node}" / "draft").is_dir()]
    assert len(wrote) == 1, said
    assert "2 processes" in said[wrote[0]] and "train:" not in said[1 - wrote[0]], said
    assert not (run.root / f"node{1 - wrote[0]}" / "work" / "train").exists()
    joined = Run(run.root / f"node{wrote[0]}", run.recorded, run.verifier)
    single.same_as(joined)
    monkeypatch.setenv("EAGLE3_WORK_DIR", str(joined.root / "work"))
    monkeypatch.setattr(Trainer, "_step", None)  # the finished run is read back
    joined.stage(**(TOGETHER | {"nproc": 1}))
