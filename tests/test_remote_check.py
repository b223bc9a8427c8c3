"""`eagle3 verify --remote`: what dvc.lock implies is on the remote, or told, and repaired if it can be."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.dvc_project import copy_project, eagle3, lines, make_project


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that was pushed; its remote lies beside it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        made = make_project(tmp_path_factory.mktemp("remote") / "both" / "project", monkeypatch)
    subprocess.run(["dvc", "push", "--quiet"], cwd=made, check=True)
    return made


@pytest.fixture
def project(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(template.parent / "remote", tmp_path / "remote")
    return copy_project(template, tmp_path / "project")


def files(root: str) -> list[Path]:
    return sorted(path for path in Path(root).rglob("*") if path.is_file() and "runs" not in path.parts)


def shard_object(root: str) -> Path:
    """The object of the shard whose name comes first."""
    return same(root, sorted(Path("data/hidden_states").glob("*.safetensors"))[0])


def same(root: str, path: Path) -> Path:
    [found] = [other for other in files(root) if other.read_bytes() == path.read_bytes()]
    return found


def damage(path: Path, kept: int | None) -> None:
    """Truncate a file, or remove it."""
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:kept]) if kept is not None else path.unlink()


def test_all_there(project: Path) -> None:
    done = eagle3("verify", "--remote")
    assert done.exit_code == 0, done.output
    assert done.stdout == f"remote local: {len(files('../remote'))} objects; all whole\n"
    assert eagle3("verify", "--remote", "local").exit_code == 0


def test_d11_missing_and_truncated_objects_are_told_by_file_and_repaired(project: Path) -> None:
    damage(shard_object("../remote"), None)
    truncated = same("../remote", Path("data/draft/model.safetensors"))
    size = truncated.stat().st_size
    damage(truncated, 10)
    push = subprocess.run(["dvc", "push"], capture_output=True, text=True, check=True)
    assert "Everything is up to date" in push.stdout  # which is why we look ourselves
    done = eagle3("verify", "--remote")
    assert done.exit_code == 1
    weights, shard = lines(done)
    assert weights.startswith("data/draft/model.safetensors: object ")
    assert f"has 10 bytes instead of {size:,}" in weights
    assert shard.startswith("data/hidden_states/")
    assert "is missing; `eagle3 verify --remote --repair` uploads it from .dvc/cache/" in shard
    done = eagle3("verify", "--remote", "--repair")
    assert done.exit_code == 0, done.output
    assert "2 uploaded; all whole" in done.stdout
    assert eagle3("verify", "--remote").exit_code == 0
    shutil.rmtree(".dvc/cache")
    shutil.rmtree("data")
    subprocess.run(["dvc", "pull", "--quiet"], check=True)
    assert eagle3("verify").exit_code == 0


def test_an_empty_remote_is_filled(project: Path) -> None:
    shutil.rmtree("../remote")
    done = eagle3("verify", "--remote")
    assert done.exit_code == 1
    assert all("is missing" in line for line in lines(done))
    assert eagle3("verify", "--remote", "--repair").exit_code == 0
    assert {path.name for path in files("../remote")} <= {path.name for path in files(".dvc/cache")}


def test_what_is_nowhere_is_told_and_its_listing_stays_away(project: Path) -> None:
    damage(shard_object(".dvc/cache"), None)
    shutil.rmtree("../remote")
    done = eagle3("verify", "--remote", "--repair")
    assert done.exit_code == 1
    told = lines(done)
    assert len(told) == 2
    assert told[0].startswith("data/hidden_states: object ")
    assert "nor is it in DVC's cache: push from where it is, or `dvc repro extract` and `dvc push`" in told[1]
    assert not any(path.name.endswith(".dir") and "extract" in path.name for path in files("../remote"))
    subprocess.run(["dvc", "commit", "--force", "--quiet", "extract"], check=True)
    assert eagle3("verify", "--remote", "--repair").exit_code == 0


@pytest.mark.parametrize("kept", [100, -1])
def test_a_damaged_object_of_the_cache_is_not_uploaded(project: Path, kept: int) -> None:
    cached = shard_object(".dvc/cache")
    damage(shard_object("../remote"), None)
    data = cached.read_bytes()
    cached.chmod(0o644)
    cached.write_bytes(data[:kept] + bytes([data[kept] ^ 1]) + data[kept + 1 :] if kept < 0 else data[:kept])
    done = eagle3("verify", "--remote", "--repair")
    assert done.exit_code == 1
    [line] = lines(done)
    assert "is missing, and the cache's copy is damaged" in line
    assert str(cached) in line


def test_a_truncated_cache_does_not_put_a_whole_remote_in_doubt(project: Path) -> None:
    damage(shard_object(".dvc/cache"), 100)
    assert eagle3("verify", "--remote").exit_code == 0
    assert eagle3("verify").exit_code == 1


def test_a_fresh_clone_reads_the_listings_from_the_remote(project: Path) -> None:
    before = {path.name for path in files(".dvc/cache")}
    victim = shard_object("../remote")
    shutil.rmtree(".dvc/cache")
    assert eagle3("verify", "--remote").exit_code == 0
    assert files(".dvc") == [path for path in files(".dvc") if "cache" not in path.parts]  # nothing was downloaded
    assert before
    damage(victim, 5000)
    [line] = lines(eagle3("verify", "--remote"))
    assert line.startswith("data/hidden_states: its objects have ")
    damage(victim, None)
    [line] = lines(eagle3("verify", "--remote"))
    assert line.startswith("data/hidden_states/")
    listing = next(path for path in files("../remote") if path.name.endswith(".dir"))
    damage(listing, None)
    assert any("nor on remote local" in line for line in lines(eagle3("verify", "--remote")))


def test_a_damaged_listing_on_the_remote(project: Path) -> None:
    listing = next(path for path in files("../remote") if path.name.endswith(".dir"))
    damage(listing, 20)
    [line] = lines(eagle3("verify", "--remote"))
    assert "has 20 bytes instead of" in line
    assert eagle3("verify", "--remote", "--repair").exit_code == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--remote", "elsewhere"], "remote elsewhere: "),
        (["--remote", "a", "b"], "one remote at a time: a, b"),
        (["--repair"], "--repair goes with --remote"),
    ],
)
def test_mistakes_are_one_line(project: Path, words: list[str], told: str) -> None:
    done = eagle3("verify", *words)
    assert done.exit_code == 1
    [line] = done.stderr.splitlines()
    assert line.startswith(f"error: {told}")


def test_outside_a_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "lies in no DVC repository" in eagle3("verify", "--remote").stderr


@pytest.mark.parametrize(
    "settings",
    [
        {
            "url": "s3://bucket/store",
            "endpointurl": "http://127.0.0.1:9",
            "access_key_id": "a",
            "secret_access_key": "b",
        },
        {"url": "ssh://127.0.0.1:9/store", "user": "nobody", "password": "hidden-word"},
    ],
)
def test_a_server_that_is_down_is_one_line(project: Path, settings: dict[str, str]) -> None:
    for name, value in settings.items():
        subprocess.run(["dvc", "config", "--local", "--quiet", f"remote.away.{name}", value], check=True)
    done = eagle3("verify", "--remote", "away")
    assert done.exit_code == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: remote away: ")
    assert "127.0.0.1" in last or "onnect" in last
    assert "hidden-word" not in done.output
    assert "Traceback" not in done.output
