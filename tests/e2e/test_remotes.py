"""DVC's remotes on real servers: a folder, S3 as two servers speak it, SSH; whole, cut off, down, damaged, at once."""

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from dvc.cli import main as dvc_here
from s3fs import S3FileSystem

from eagle3.digests import digest_file
from tests.dvc_project import copy_project, eagle3, lines, make_project
from tests.page import commands
from tests.remote_servers import (
    BUCKET,
    KEY,
    SECRET,
    Relay,
    Server,
    Settings,
    openssh,
    plain_folder,
    rclone_s3,
    seaweedfs_s3,
    sshd_program,
)

Start = Callable[[Path], AbstractContextManager[Server]]

pytestmark = pytest.mark.slow

needs_sshd = pytest.mark.skipif(sshd_program() is None, reason="sshd is not installed (Debian: openssh-server)")
S3 = pytest.param(rclone_s3, id="s3-rclone")
SSH = pytest.param(openssh, id="ssh", marks=needs_sshd)
ANY = [pytest.param(plain_folder, id="folder"), S3, pytest.param(seaweedfs_s3, id="s3-seaweedfs"), SSH]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return make_project(tmp_path_factory.mktemp("remotes") / "project", monkeypatch)


@pytest.fixture
def project(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project that was never pushed; the current folder."""
    monkeypatch.chdir(tmp_path)
    return copy_project(template, tmp_path / "project")


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    start: Start = request.param
    with start(tmp_path / "server") as running:
        yield running


def on(*servers: object) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("server", servers, indirect=True)


def configure(settings: Settings) -> None:
    """Make a remote with these settings the default one, in this checkout alone."""
    (Path(".dvc") / "config.local").write_text(
        "[core]\n    remote = there\n['remote \"there\"']\n    verify = true\n"
        + "".join(f'    {name} = "{value}"\n' for name, value in settings.items())
    )


def configure_as_told(server: Server) -> str:
    """The same by the commands of docs/experiments.md; returns the name that the remote has there."""
    name = {"s3:": "s3", "ssh": "ssh"}.get(server.settings["url"][:3], "shared")
    told_there = {
        "url": ("s3://bucket/store", "ssh://data.example.com/srv/drafts", "/mnt/shared/drafts"),
        "endpointurl": ("https://s3.example.com",),
        "access_key_id": ("KEY",),
        "secret_access_key": ("SECRET",),
        "user": ("ME",),
        "keyfile": ("~/.ssh/id_ed25519",),
    }
    ours = {word: server.settings.get(key, "") for key, words in told_there.items() for word in words}
    for command in commands("experiments.md", "Remotes"):
        words = shlex.split(command)
        if name in words:
            assert dvc_here([ours.get(word, word) for word in words[1:]]) == 0
    return name


def start_dvc(*words: str, folder: Path = Path()) -> "subprocess.Popen[str]":
    """dvc as the leader of a process group, as from a terminal."""
    return subprocess.Popen(
        ["dvc", *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    )


def dvc(*words: str, fails: bool = False) -> str:
    """Run dvc; returns all that it printed."""
    process = start_dvc(*words)
    told, _ = process.communicate()
    assert (process.returncode != 0) == fails, told
    return told


def digests() -> dict[str, str]:
    """Every file of the outs."""
    return {str(path): digest_file(path) for path in Path("data").rglob("*") if path.is_file()}


def forget() -> None:
    """As in a fresh clone: neither cache nor outs."""
    shutil.rmtree(".dvc/cache")
    for name in ("responses", "tokens", "hidden_states", "draft"):
        shutil.rmtree(f"data/{name}")
    Path("data/verifier.json").unlink()


def objects() -> dict[str, Path]:
    """Everything in DVC's cache, by name."""
    return {path.parent.name + path.name: path for path in Path(".dvc/cache/files/md5").glob("??/*")}


def lacking(server: Server) -> set[str]:
    """The objects of the cache that the server has not, or not whole."""
    assert server.objects is not None
    there = server.objects / "files/md5"
    found = {name: there / path.parent.name / path.name for name, path in objects().items()}
    return {
        name for name, path in found.items() if not path.is_file() or path.read_bytes() != objects()[name].read_bytes()
    }


def settled(server: Server) -> set[str]:
    """The same, once the server has taken in all that was on its way."""
    before, now = None, lacking(server)
    while now != before:
        time.sleep(0.5)
        before, now = now, lacking(server)
    return now


def told(*words: str) -> set[str]:
    """The objects that `eagle3 verify --remote` names."""
    return {line.partition("object ")[2].split()[0] for line in lines(eagle3("verify", "--remote", *words))}


@on(*ANY)
def test_what_was_pushed_comes_back_bit_for_bit(project: Path, server: Server) -> None:
    before = digests()
    name = configure_as_told(server)
    assert told() == set(objects())
    *there, back = [shlex.split(command) for command in commands("experiments.md", "There and back")]
    for program, *words in there:
        if program == "dvc":
            dvc(*words)
        else:
            done = eagle3(*words)
            assert f"remote {name}: {len(objects())} objects" in done.stdout, done.output
    assert "0 uploaded; all whole" in done.stdout
    forget()
    dvc(*back[1:])
    assert digests() == before
    assert eagle3("verify").exit_code == 0


@on(S3, SSH)
def test_a_push_that_was_killed_is_told_and_made_good(project: Path, server: Server) -> None:
    """What arrived in part looks whole to the second `dvc push`; to `eagle3 verify --remote` it does not."""
    before = digests()
    with Relay(server.port) as relay:
        configure(server.through(relay.port))
        relay.hold_after(1_500_000)
        push = start_dvc("push")
        assert relay.held.wait(120)
        os.killpg(push.pid, signal.SIGKILL)
        push.communicate()
        relay.recover()
        missing = settled(server)
        assert missing
        assert told("--read") == missing
        dvc("push")
        left = lacking(server)
        assert told("--read") == left
        assert eagle3("verify", "--remote", "--read", "--repair").exit_code == 0
    assert lacking(server) == set()
    configure(server.settings)
    forget()
    dvc("pull")
    assert digests() == before


@on(S3, SSH)
def test_a_server_that_goes_down_during_a_push(project: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # S3's client tries for two minutes otherwise
    with Relay(server.port) as relay:
        configure(server.through(relay.port))
        relay.hold_after(1_500_000)
        push = start_dvc("push")
        assert relay.held.wait(120)
        relay.hang_up()
        said, _ = push.communicate(timeout=120)
        assert push.returncode != 0
        assert "Traceback" not in said
        [*_, last] = eagle3("verify", "--remote").stderr.splitlines()
        assert last.startswith("error: remote there: ")
        assert eagle3("verify").exit_code == 0  # nothing is lost here
        relay.recover()
        dvc("push")
        assert eagle3("verify", "--remote", "--read", "--repair").exit_code == 0
    assert lacking(server) == set()


@on(S3, SSH)
def test_wrong_credentials(project: Path, server: Server) -> None:
    key = server.settings.get("keyfile", "")
    wrong = {"secret_access_key": "another-secret"} if not key else {"keyfile": str(Path(key).with_name("stranger"))}
    configure(server.settings | wrong)
    said = dvc("push", fails=True)
    assert "Traceback" not in said and "another-secret" not in said
    assert any(line.startswith("ERROR: ") for line in said.splitlines()), said
    done = eagle3("verify", "--remote")
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1].startswith("error: remote there: ")
    assert "another-secret" not in done.output
    assert done.stdout == ""
    assert lacking(server) == set(objects())


@on(S3)
def test_two_clones_that_push_at_once(project: Path, server: Server, tmp_path: Path) -> None:
    """The same data and a draft of each one's own."""
    configure(server.settings)
    other = copy_project(project, tmp_path / "other")
    for folder in (project, other):
        os.chdir(folder)
        weights = Path("data/draft/model.safetensors")
        data = weights.read_bytes()
        weights.unlink()
        weights.write_bytes(data[:-1] + (b"a" if folder is other else b"b"))
        dvc("commit", "--force", "--quiet", "train")
    pushes = [start_dvc("push", folder=folder) for folder in (project, other)]
    said = [push.communicate()[0] for push in pushes]
    assert [push.returncode for push in pushes] == [0, 0], said
    for folder in (project, other):
        os.chdir(folder)
        assert eagle3("verify", "--remote", "--read").exit_code == 0


@on(ANY[0])
def test_an_object_with_other_bytes_on_the_remote(project: Path, server: Server, tmp_path: Path) -> None:
    """Its size is right, so only who reads it can know: `dvc pull`, which takes nothing of it, and `--read`."""
    configure(server.settings)
    dvc("push")
    shard = sorted(Path("data/hidden_states").glob("*.safetensors"))[0]
    [(name, path)] = [(name, path) for name, path in objects().items() if path.read_bytes() == shard.read_bytes()]
    assert server.objects is not None
    victim = server.objects / "files/md5" / path.parent.name / path.name
    data = victim.read_bytes()
    victim.chmod(0o644)
    victim.write_bytes(data[:1000] + bytes([data[1000] ^ 1]) + data[1001:])
    assert eagle3("verify", "--remote").exit_code == 0
    [line] = lines(eagle3("verify", "--remote", "--read"))
    assert line.startswith(f"{shard}: object {name} is damaged: its bytes differ from its name; `eagle3 verify")
    clone = copy_project(project, tmp_path / "clone")
    forget()
    said = dvc("pull", fails=True)
    assert "Checkout failed for following targets:\ndata/hidden_states" in said
    assert not (clone / shard).exists()
    assert victim.read_bytes() not in [path.read_bytes() for path in objects().values()]
    os.chdir(project)
    assert eagle3("verify", "--remote", "--read", "--repair").exit_code == 0
    os.chdir(clone)
    dvc("pull")
    assert eagle3("verify").exit_code == 0


@on(S3)
def test_objects_that_an_s3_server_lost_are_uploaded_again(project: Path, server: Server) -> None:
    configure(server.settings)
    dvc("push")
    bucket = S3FileSystem(key=KEY, secret=SECRET, endpoint_url=server.settings["endpointurl"])
    sizes = bucket.du(f"{BUCKET}/store/files", total=False)
    *_, second, largest = sorted(sizes, key=lambda path: sizes[path])
    bucket.rm_file(largest)
    bucket.pipe_file(second, bytes(100))
    done = eagle3("verify", "--remote")
    assert done.exit_code == 1
    assert len(lines(done)) == 2
    assert all(line.startswith("data/hidden_states/") for line in lines(done))
    done = eagle3("verify", "--remote", "--repair")
    assert done.exit_code == 0, done.output
    assert "2 uploaded; all whole" in done.stdout
    configure(server.settings | {"url": "s3://nowhere/store"})
    done = eagle3("verify", "--remote")
    assert done.exit_code == 1
    assert "missing" in done.stdout or "nowhere" in done.stderr
