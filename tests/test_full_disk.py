"""Stages on a disk that is really full: a small tmpfs in a mount namespace of its own, filled, and freed again."""

import functools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from eagle3 import schemas
from eagle3.prompts import write_splits
from eagle3.reasoning import NO_MARKERS
from eagle3.tables import Row, read_parts, read_table
from eagle3.verifier import VerifierIdentity, identify_verifier, write_identity
from tests.draft_data import generate_texts, make_states, verifier_params
from tests.extract_runs import contents, finish, make_rows, names_by_ids, prepare
from tests.faulty_server import MODEL, VOCAB, Fault, FaultyServer
from tests.test_extract import FAKE
from tests.token_tables import PROJECT, token_row, write_params, write_tokens


@functools.cache
def namespace() -> list[str] | None:
    """The command that gives a process mounts of its own, if this system allows one."""
    for command in (["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"]):
        try:
            tried = subprocess.run([*command, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False)
        except OSError:
            return None
        if tried.returncode == 0:
            return command
    return None


pytestmark = pytest.mark.skipif(namespace() is None, reason="this system lets nobody mount a small disk")


def fill_and_free(folder: Path, size_kib: int, free_kib: int, stage: str, *arguments: str) -> tuple[str, str]:
    """Run a stage with the outs and the work store on a disk with `free_kib` left, then again with all of it.

    Returns what each of the two said; the first must have failed, the second not. Outs are kept in folder/disk.
    """
    disk = folder / "disk"
    disk.mkdir()
    script = f"""
        mount -t tmpfs -o size={size_kib}k none {disk}
        head -c {(size_kib - free_kib) * 1024} /dev/zero > {disk}/ballast
        "$@" 2> first.log && exit 9
        rm {disk}/ballast
        "$@" 2> second.log || exit 8
        cp -r {disk} {folder}/kept
    """
    wrapper = namespace()
    assert wrapper is not None
    environment = os.environ | {"EAGLE3_WORK_DIR": str(disk / "work"), "PYTHONPATH": str(PROJECT)}
    ran = subprocess.run(
        [*wrapper, "sh", "-c", script, "sh", sys.executable, "-m", f"stages.{stage}", *arguments],
        cwd=folder,
        env=environment,
        timeout=300,
        check=False,
    )
    first = (folder / "first.log").read_text()
    assert ran.returncode != 9, "the stage took no notice of the full disk"
    assert ran.returncode == 0, first + (folder / "second.log").read_text()
    assert "Traceback" not in first, first
    return first, (folder / "second.log").read_text()


def identity() -> VerifierIdentity:
    """Of the model that the fake server serves."""
    return VerifierIdentity(MODEL, "d" * 64, "x", 8, 8, VOCAB, 512, 1e-5, (2, 4, 5), (2,), "float32", "x", NO_MARKERS)


def test_prompts(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number} {os.urandom(500).hex()}", "category": "a"} for number in range(2000)]
    (tmp_path / "source.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    params = YAML().load((PROJECT / "params.yaml").read_text())
    params["prompts"]["sources"] = [params["prompts"]["sources"][0] | {"path": "source.jsonl", "name": "s"}]
    with (tmp_path / "params.yaml").open("w") as file:
        YAML().dump(params, file)
    first, _ = fill_and_free(tmp_path, 8192, 500, "prompts", "disk/prompts", "disk/prompts.json", "params.yaml")
    assert "No space left on device" in first and "'disk/prompts'" in first and "free some room" in first
    kept = [row for split in ("train", "validation", "evaluation") for row in kept_rows(tmp_path, split)]
    assert len(kept) == 2000


def kept_rows(folder: Path, split: str) -> list[Row]:
    return list(read_table(folder / "kept/prompts" / f"{split}.parquet", schemas.PROMPTS))


def test_generate_asks_again_only_for_what_was_not_kept(tmp_path: Path) -> None:
    texts = [f"question {number} {'x' * 300}" for number in range(400)]
    write_splits(tmp_path / "prompts", (prompt_row(text) for text in texts))
    write_identity(identity(), tmp_path / "verifier.json")
    with FaultyServer(lambda _text, _attempt: Fault(delay_s=0.1)) as server:
        write_params(
            tmp_path / "params.yaml",
            tmp_path,
            verifier__model=MODEL,
            verifier__revision="main",
            verifier__max_model_len=512,
            generate__endpoints=[server.url],
            generate__concurrency=8,
        )
        first, second = fill_and_free(
            tmp_path, 8192, 700, "generate", "prompts", "verifier.json", "disk/responses", "disk/m.json", "params.yaml"
        )
        asked = Counter(server.asked)
    assert "disk is full" in first and "responses.sqlite" in first and "free some room" in first
    rows = list(read_parts(tmp_path / "kept/responses", schemas.RESPONSES))
    assert Counter(row["prompt_id"] for row in rows) == Counter(texts)
    reused = json.loads((tmp_path / "kept/m.json").read_text())["reused"]
    assert reused > 20, second  # a few pages of the store's log for each, until it is folded in
    assert sum(count == 1 for count in asked.values()) >= reused


def prompt_row(text: str) -> Row:
    """A row of schemas.PROMPTS."""
    message = [{"role": "user", "content": text}]
    row: Row = {"prompt_id": text, "source": "s", "source_row": 1, "category": "c", "split": "train"}
    return row | {"messages": message, "reference": None}


def test_extract_says_before_it_starts(tmp_path: Path, tiny_verifier: Path) -> None:
    """The engine is not started for states that cannot fit; with room the same command would start it."""
    params = write_params(tmp_path / "params.yaml", tiny_verifier)
    write_identity(identify_verifier(params.verifier, params.reasoning), tmp_path / "verifier.json")
    write_tokens(tmp_path / "tokens", [token_row([3 + n % 500] * 200, 5) for n in range(40)])
    disk = tmp_path / "disk"
    disk.mkdir()
    wrapper = namespace()
    assert wrapper is not None
    command = "-m stages.extract tokens verifier.json disk/hidden_states disk/m.json params.yaml"
    ran = subprocess.run(
        [*wrapper, "sh", "-c", f'mount -t tmpfs -o size=4m none {disk}; "$@"', "sh", sys.executable, *command.split()],
        cwd=tmp_path,
        env=os.environ | {"EAGLE3_WORK_DIR": str(disk / "work"), "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert "hidden states need" in ran.stderr and "Free some room" in ran.stderr
    assert "Traceback" not in ran.stderr and "starting" not in ran.stderr


def test_extract_keeps_what_was_finished_when_others_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All would have fitted; then somebody else takes the rest of the disk. The same command goes on from there."""
    rows = make_rows(120)
    run = prepare(tmp_path, monkeypatch, rows)
    finish(run)
    calm, shard_of = contents(run.out), names_by_ids(run, rows)
    run.requests()
    code = f"import sys; from eagle3.serving import recorder; recorder.ENGINE = {FAKE!r};"
    code += "from eagle3.stage import run_stage; from stages.extract import extract; run_stage(extract)"
    arguments = " ".join(str(path).replace(str(run.out), "disk/out") for path in run.arguments())
    script = f"""
        mkdir disk && mount -t tmpfs -o size=32m none disk
        "$@" {arguments} 2> first.log & stage=$!
        until [ "$(ls disk/work/extract/*.safetensors 2> /dev/null | wc -l)" -ge 2 ]; do sleep 0.01; done
        head -c 99999999 /dev/zero > disk/ballast 2> /dev/null
        wait $stage && exit 9
        mv requests.log first-requests.log
        ls disk/work/extract/*.safetensors > kept.txt
        ls -A disk/work/extract | grep -c partial && exit 7
        rm disk/ballast
        "$@" {arguments} 2> second.log || exit 8
        cp -r disk kept
    """
    wrapper = namespace()
    assert wrapper is not None
    environment = os.environ | {
        "EAGLE3_WORK_DIR": str(tmp_path / "disk/work"),
        "EAGLE3_FAKE": json.dumps({"seconds_each": 0.02}),
        "PYTHONPATH": str(PROJECT),
    }
    command = [*wrapper, "sh", "-c", script, "sh", sys.executable, "-c", code]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, check=False)
    told = (tmp_path / "first.log").read_text()
    assert ran.returncode == 0, told
    assert "No space left on device" in told.splitlines()[-1]
    assert "free some room" in told.splitlines()[-1] and "kept" in told.splitlines()[-1]
    assert "Traceback" not in told
    finished = {Path(line).name for line in (tmp_path / "kept.txt").read_text().split()}
    assert len(finished) >= 2
    again = (tmp_path / "requests.log").read_text().split()
    assert finished.isdisjoint(shard_of[ids] for ids in again)
    assert contents(tmp_path / "kept/out") == calm


def test_train_goes_on_from_its_last_checkpoint(tmp_path: Path, tiny_verifier: Path) -> None:
    make_states(tiny_verifier, tmp_path, generate_texts(tiny_verifier, 24))
    params = YAML().load((PROJECT / "params.yaml").read_text())
    params["verifier"] = verifier_params(tiny_verifier).model_dump()
    params["train"] |= {"epochs": 3, "batch_tokens": 128, "validations": 2, "checkpoint_every_s": 0}
    with (tmp_path / "params.yaml").open("w") as file:
        YAML().dump(params, file)
    outs = ["disk/draft", "disk/train.json", "disk/plots"]
    # one checkpoint fits, the next does not
    first, second = fill_and_free(
        tmp_path, 65536, 5000, "train", "hidden_states", "verifier.json", *outs, "params.yaml"
    )
    assert "No space left on device" in first and "step-" in first and "free some room" in first
    assert "found this run at step" in second, second
    assert (tmp_path / "kept/draft/model.safetensors").is_file()
