"""`eagle3 verify`: every kind of damage is told by name, with a remedy that works, and nothing whole is."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from eagle3.schemas import PARTS
from eagle3.serving import recorder
from eagle3.tables import INDEX, read_table, write_table
from stages.extract import extract
from tests.dvc_project import copy_project, eagle3, lines, make_project
from tests.test_extract import FAKE
from tests.token_tables import PROJECT

INPUTS_AND_OUTS = ("tokens", "verifier.json", "hidden_states", "metrics.json", "params.yaml")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return make_project(tmp_path_factory.mktemp("verify") / "project", monkeypatch)


@pytest.fixture
def project(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EAGLE3_WORK_DIR", str(tmp_path / "project" / ".work"))
    return copy_project(template, tmp_path / "project")


def shard() -> Path:
    return sorted(Path("data/hidden_states").glob("*.safetensors"))[1]


def flip(path: Path, place: int = -100) -> None:
    """Change one byte in place, with all names that the file has, and keep the times, as a bad disk does."""
    state = path.stat()
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    path.chmod(0o444)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def dvc(*words: str) -> None:
    subprocess.run(["dvc", *words, "--quiet"], check=True)


def shell(command: str) -> None:
    subprocess.run(["sh", "-c", command], check=True)


def remedy(line: str) -> list[str]:
    """The commands of a remedy."""
    return line.split("`")[1::2]


def tree() -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_ino) for path in Path("data").rglob("*")}


def test_whole_data_is_whole_and_stays_as_it_was(project: Path) -> None:
    assert shard().stat().st_nlink == 3  # out, cache and work store
    before = tree()
    done = eagle3("verify")
    assert done.exit_code == 0, done.output
    files = [path for path in Path("data").rglob("*") if path.is_file() and path.parent.name != "verifier"]
    counted = int(done.stdout.split(" files")[0].split()[-1])
    assert counted == len({path.stat().st_ino for path in files}) - 2  # params and metrics are no outs here
    assert done.stdout.splitlines() == [done.stdout.strip()]
    assert done.stdout.startswith("verify: ")
    assert "GB/s); all whole" in done.stdout
    assert tree() == before


def test_what_is_not_there_yet_is_said_and_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = eagle3("verify")
    assert done.exit_code == 0
    assert "skipped: data/hidden_states: not there yet" in done.stderr
    assert "skipped: dvc.lock: this folder lies in no DVC repository" in done.stderr


def test_an_out_that_only_the_lock_has(project: Path) -> None:
    shutil.rmtree("data/draft")
    done = eagle3("verify")
    assert done.exit_code == 0
    assert "skipped: data/draft: not there yet; `dvc pull data/draft` brings it" in done.stderr


def test_a_flipped_byte_in_all_three_names_of_a_shard_and_the_way_back(project: Path) -> None:
    dvc("push")
    path, whole = shard(), shard().read_bytes()
    flip(path)
    dvc("checkout", "--force")  # DVC trusts what is read-only
    assert path.read_bytes() != whole
    done = eagle3("verify")
    assert done.exit_code == 1
    [line] = lines(done)
    assert line.startswith(f"{path}: its bytes differ from its sha256 in data/hidden_states/{INDEX}; ")
    remove, pull, repro = remedy(line)
    assert [repro, pull] == ["dvc repro extract", "dvc pull data/hidden_states"]
    assert len(remove.split()) == 5  # rm -f, and the three names
    assert f".work/extract/{path.name}" in remove
    shell(remove)
    shell(pull)
    assert path.read_bytes() == whole
    assert eagle3("verify").exit_code == 0


def test_a_shard_that_extract_redid_does_not_come_back_damaged_from_the_cache(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With hard links the damaged file is an object of the cache, which DVC links again unless it has to look at it."""
    path, whole = shard(), shard().read_bytes()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(-5000, os.SEEK_END)
        file.write(b"damage")
    path.chmod(0o444)
    shutil.rmtree("data/hidden_states")  # as DVC does before it runs a stage
    monkeypatch.setattr(recorder, "ENGINE", FAKE)
    monkeypatch.setenv("EAGLE3_FAKE_REQUESTS", str(project / "requests.log"))
    extract(*(Path("data") / name for name in INPUTS_AND_OUTS))
    assert path.read_bytes() == whole
    dvc("commit", "--force", "extract")
    assert path.read_bytes() == whole
    assert eagle3("verify").exit_code == 0


def test_a_damaged_file_of_its_own_comes_from_the_cache(project: Path) -> None:
    path, whole = shard(), shard().read_bytes()
    path.unlink()
    path.write_bytes(whole)
    flip(path)
    [line] = lines(eagle3("verify"))
    assert remedy(line) == ["dvc checkout --force data/hidden_states"]
    shell(remedy(line)[0])
    assert eagle3("verify").exit_code == 0


def test_a_damaged_object_of_the_cache_alone(project: Path) -> None:
    path, whole = shard(), shard().read_bytes()
    path.unlink()
    path.write_bytes(whole)
    cached = next(other for other in Path(".dvc/cache").rglob("*") if other.is_file() and other.read_bytes() == whole)
    flip(cached)
    [line] = lines(eagle3("verify"))
    assert line.startswith(f"{cached}: its bytes differ from its md5 in its name (DVC's cache has it for {path})")
    shell(remedy(line)[0])
    assert remedy(line)[1] == "dvc commit extract"
    dvc("commit", "--force", "extract")  # without --force it asks
    assert eagle3("verify").exit_code == 0


def test_a_truncated_file(project: Path) -> None:
    path = shard()
    path.chmod(0o644)
    size = path.stat().st_size
    os.truncate(path, size // 2)
    [line] = lines(eagle3("verify"))
    assert line.startswith(f"{path}: {size // 2:,} bytes where data/hidden_states/{INDEX} says {size:,}; `rm -f ")


def test_a_renamed_part_is_missing_and_foreign(project: Path) -> None:
    [part] = Path("data/tokens").glob("part-*")
    other = part.rename(part.with_name("part-0000.parquet"))
    missing, foreign = sorted(lines(eagle3("verify", "data/tokens")), key=lambda line: "foreign" in line)
    assert missing.startswith(f"{part}: missing, data/tokens/{INDEX} names it; `dvc checkout --force data/tokens`")
    assert foreign.startswith(f"{other}: foreign: neither index nor dvc.lock names it; move it elsewhere")
    other.unlink()
    shell(remedy(missing)[0])
    assert eagle3("verify").exit_code == 0


def test_two_shards_with_each_others_names(project: Path) -> None:
    one, two = sorted(Path("data/hidden_states").glob("*.safetensors"))[:2]
    one.rename("aside")
    two.rename(one)
    Path("aside").rename(two)
    found = lines(eagle3("verify"))
    assert [line.partition(":")[0] for line in found] == [str(one), str(two)]
    shell(remedy(found[0])[0])
    assert eagle3("verify").exit_code == 0


@pytest.mark.parametrize("name", ["data/draft/optimizer.pt", "data/responses/x.tmp", "data/hidden_states/sub/a"])
def test_d20_a_foreign_file_is_named(project: Path, name: str) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text("left here")
    [line] = lines(eagle3("verify"))
    assert line.startswith(f"{name}: foreign")


def test_d16_an_out_that_was_appended_to_by_hand(project: Path) -> None:
    path = Path("data/responses/rejected.parquet")
    path.chmod(0o644)
    with path.open("ab") as file:
        file.write(b"x")
    [line] = lines(eagle3("verify"))
    assert line.startswith(f"{path}: its bytes differ from its md5 in dvc.lock; `rm -f {path} .dvc/cache/")


@pytest.mark.parametrize("name", ["../x", "/etc/hostname", "sub/part", "..", "", "a\0b", "\x1b[2J"])
def test_an_index_that_names_files_elsewhere_is_refused(project: Path, name: str) -> None:
    index = Path("data/tokens") / INDEX
    rows = list(read_table(index, PARTS))
    index.unlink()
    write_table(index, [*rows, rows[0] | {"file": name}], PARTS)
    done = eagle3("verify")
    assert done.exit_code == 1
    assert "\x1b" not in done.output
    told = [line for line in lines(done) if line.startswith(f"{index}: ") or "\\x1b" in line]
    assert told
    assert "`dvc checkout --force data/tokens`" in told[0] or "missing" in told[0]


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "foreign"])
def test_a_damaged_index_is_told_once_and_the_parts_are_still_compared(project: Path, damage: str) -> None:
    index = Path("data/hidden_states") / INDEX
    if damage == "flip":
        flip(index)
    else:
        data = index.read_bytes()
        index.unlink()
        if damage == "truncate":
            index.write_bytes(data[:-10])
        if damage == "foreign":
            pq.write_table(pq.read_table("data/hidden_states/rejected.parquet"), index)
    flip(shard())
    told = [line.partition(":")[0] for line in lines(eagle3("verify"))]
    assert told == sorted([str(index), str(shard())])


@pytest.mark.parametrize("text", ["", "[]", '{"draft": 3}', '{"draft": {"../../params.yaml": "0"}}'])
def test_a_damaged_lineage(project: Path, text: str) -> None:
    lineage = Path("data/draft/lineage.json")
    lineage.unlink()
    lineage.write_text(text)
    [line] = lines(eagle3("verify"))
    assert line.startswith(f"{lineage}: ")
    assert remedy(line) == ["dvc checkout --force data/draft"]


def test_weights_that_are_no_safetensors(project: Path) -> None:
    path = Path("data/draft/model.safetensors")
    path.chmod(0o644)
    path.write_bytes(b"PK\3\4" + bytes(4000))
    told = lines(eagle3("verify", "data/draft"))
    assert any(line.startswith(f"{path}: its bytes differ") for line in told) or "safetensors" in told[0]


def test_a_foreign_identity(project: Path) -> None:
    Path("data/verifier.json").unlink()
    Path("data/verifier.json").write_text("{}")
    [line] = lines(eagle3("verify"))
    assert line.startswith("data/verifier.json: not a verifier identity")
    assert remedy(line) == ["dvc checkout --force data/verifier.json"]


def test_d11_an_object_that_the_cache_lacks_is_told_before_a_push_leaves_it_out(project: Path) -> None:
    path = shard()
    [cached] = [other for other in Path(".dvc/cache").rglob("*") if other.is_file() and other.samefile(path)]
    cached.unlink()
    [line] = lines(eagle3("verify"))
    assert line.startswith(f"{path}: not in DVC's cache ({cached}), so no push takes it along")
    dvc("commit", "--force", "extract")
    assert eagle3("verify").exit_code == 0


def test_a_lost_listing(project: Path) -> None:
    for listing in Path(".dvc/cache").rglob("*.dir"):
        listing.unlink()
    told = lines(eagle3("verify"))
    assert [line.partition(":")[0] for line in told] == [
        f"data/{name}" for name in ("draft", "hidden_states", "responses", "tokens")
    ]
    assert "is not in DVC's cache" in told[0]


@pytest.mark.parametrize("name", ["../../x", "/etc/hostname"])
def test_a_listing_that_leads_elsewhere_is_refused(project: Path, name: str) -> None:
    lock = Path("dvc.lock").read_text()
    for listing in Path(".dvc/cache").rglob("*.dir"):
        entries = json.loads(listing.read_text())
        entries[0]["relpath"] = name
        text = json.dumps(entries).encode()
        md5 = subprocess.run(["md5sum"], input=text, capture_output=True, check=True).stdout.decode()[:32]
        lock = lock.replace(listing.parent.name + listing.name, f"{md5}.dir")
        target = listing.parent.parent / md5[:2] / f"{md5[2:]}.dir"
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(text)
    Path("dvc.lock").write_text(lock)
    told = lines(eagle3("verify"))
    assert len(told) == 4
    assert all("its listing names" in line and "refused" in line for line in told)


def test_places_may_be_chosen(project: Path) -> None:
    flip(shard())
    assert eagle3("verify", "data/tokens", "data/draft").exit_code == 0
    assert eagle3("verify", "data/hidden_states").exit_code == 1
    assert eagle3("verify", "data").exit_code == 1
    assert eagle3("verify", str(Path("data/tokens").absolute())).exit_code == 0
    assert "neither an index nor dvc.lock" in eagle3("verify", "params.yaml").stderr
    assert "nowhere: not there yet" in eagle3("verify", "nowhere").stderr


def test_a_copy_of_a_folder_outside_any_project(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree("data/hidden_states", tmp_path / "disk" / "copy")
    monkeypatch.chdir(tmp_path / "disk")
    assert eagle3("verify", "copy").exit_code == 0
    os.truncate(next(Path("copy").glob("*.safetensors")), 100)
    [line] = lines(eagle3("verify", "copy"))
    assert line.endswith("; restore it from where it came from, or `dvc repro`")


def test_a_damaged_lock_is_one_line(project: Path) -> None:
    Path("dvc.lock").write_text("<<<<<<< HEAD\n")
    done = eagle3("verify")
    assert done.exit_code == 1
    assert "dvc.lock" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.output


def test_ctrl_c_ends_it_quietly(project: Path) -> None:
    big = Path("big")
    big.mkdir()
    with (big / "part-1.parquet").open("wb") as file:
        file.truncate(400 << 30)
    row = {"file": "part-1.parquet", "rows": 1, "bytes": 400 << 30, "sha256": "0"}
    write_table(big / INDEX, [row], PARTS)
    with subprocess.Popen(
        [sys.executable, "-m", "eagle3.cli", "verify", "big"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(PROJECT)},
    ) as running:
        descriptors = Path(f"/proc/{running.pid}/fd")
        while not any(os.path.realpath(fd).endswith("part-1.parquet") for fd in descriptors.iterdir()):
            time.sleep(0.2)
        running.send_signal(signal.SIGINT)
        try:
            _, told = running.communicate(timeout=120)
        finally:
            running.kill()
    assert running.returncode == 130
    assert "Traceback" not in told
