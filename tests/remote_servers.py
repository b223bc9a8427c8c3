"""Servers that DVC's remotes are kept on, each on a free port of this machine alone: two that speak S3, and OpenSSH."""

import json
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from getpass import getuser
from pathlib import Path

from s3fs import S3FileSystem

from eagle3.serving.ports import HOST, free_port, free_ports
from tests.stage_runs import wait_until

KEY, SECRET = "test-key", "test-secret-that-is-shown-nowhere"
BUCKET = "bucket"

#: Settings of a remote of DVC, as `dvc remote add` and `dvc remote modify` put them into .dvc/config.
Settings = dict[str, str]


@dataclass(frozen=True)
class Server:
    """A remote. objects: the folder in which the server keeps them as files; None where it keeps them otherwise."""

    settings: Settings
    port: int
    objects: Path | None

    def through(self, port: int) -> Settings:
        """The same remote by another port, a relay's."""
        return {name: value.replace(f":{self.port}", f":{port}") for name, value in self.settings.items()}


@contextmanager
def plain_folder(folder: Path) -> Iterator[Server]:
    """No server at all."""
    yield Server({"url": str(folder / "store")}, 0, folder / "store")


@contextmanager
def rclone_s3(folder: Path) -> Iterator[Server]:
    """rclone's S3 server, with an empty bucket that is a folder below this one."""
    (folder / BUCKET).mkdir(parents=True)
    port = free_port()
    words = ["--addr", f"{HOST}:{port}", "--auth-key", f"{KEY},{SECRET}", str(folder)]
    with _running(["rclone", "serve", "s3", *words], port, {"RCLONE_CONFIG": os.devnull}):
        yield Server(s3_settings(port), port, folder / BUCKET / "store")


@contextmanager
def seaweedfs_s3(folder: Path) -> Iterator[Server]:
    """SeaweedFS: master, volume server, filer and S3 gateway in one process, with an empty bucket."""
    folder.mkdir(parents=True)
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "List", "Tagging", "Write"],
    }
    (folder / "identities.json").write_text(json.dumps({"identities": [identity]}))
    options = {
        "dir": folder,
        "ip": HOST,
        "ip.bind": HOST,
        "master.telemetry": "false",
        "filer": "true",
        "s3": "true",
        "s3.config": folder / "identities.json",
        "volume.max": 8,
        "master.volumeSizeLimitMB": 64,
    }
    names = [f"{part}.port{kind}" for part in ("master", "volume", "filer", "s3") for kind in ("", ".grpc")]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    words = [f"-{name}={value}" for name, value in (options | ports).items()]
    with _running(["weed", "-logtostderr", "server", *words], ports["s3.port"], {}):
        settings = s3_settings(ports["s3.port"])
        _make_bucket(S3FileSystem(key=KEY, secret=SECRET, endpoint_url=settings["endpointurl"]))
        yield Server(settings, ports["s3.port"], None)


def s3_settings(port: int) -> Settings:
    """A remote in the bucket of the server on this port."""
    return {
        "url": f"s3://{BUCKET}/store",
        "endpointurl": f"http://{HOST}:{port}",
        "access_key_id": KEY,
        "secret_access_key": SECRET,
    }


def sshd_program() -> str | None:
    """Where OpenSSH's server is, which most users do not have on their PATH; None where it is not installed."""
    return shutil.which("sshd", path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin{os.pathsep}/usr/local/sbin")


@contextmanager
def openssh(folder: Path) -> Iterator[Server]:
    """OpenSSH's server with a key of its own, for this user and a remote in a folder below this one."""
    program = sshd_program()
    assert program is not None
    folder.mkdir(parents=True)
    for name in ("host", "user", "stranger"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    port = free_port()
    options = {
        "ListenAddress": HOST,
        "Port": port,
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "user.pub",
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "PermitRootLogin": "prohibit-password",
        "Subsystem": "sftp internal-sftp",
    }
    (folder / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in options.items()))
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # it insists, as root
    with _running([program, "-D", "-e", "-f", str(folder / "sshd_config")], port, {}):
        url = f"ssh://{HOST}:{port}{folder / 'store'}"
        settings = {"url": url, "user": getuser(), "keyfile": str(folder / "user"), "allow_agent": "false"}
        yield Server(settings, port, folder / "store")


class Relay:
    """`with Relay(port) as relay:` a port that passes all on to another one, until it holds its breath or hangs up."""

    def __init__(self, target: int):
        self._target = target
        self._listener = socket.create_server((HOST, 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        self._free, self.held = threading.Event(), threading.Event()
        self._free.set()
        self._limit: int | None = None
        self._passed, self._down = 0, False

    def hold_after(self, count: int) -> None:
        """Pass on so many more bytes to the target, then nothing; `held` tells when."""
        self._limit = self._passed + count

    def hang_up(self) -> None:
        """Close all connections, and every new one at once."""
        self._down = True
        self._close()

    def recover(self) -> None:
        """Pass all on again."""
        self._limit, self._down = None, False
        self._free.set()
        self.held.clear()

    def __enter__(self) -> "Relay":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._free.set()
        self._listener.close()
        self._close()

    def _close(self) -> None:
        for side in self._open:
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
            side.close()
        self._open.clear()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                if self._down:
                    ours.close()
                    continue
                theirs = socket.create_connection((HOST, self._target))
                self._open += [ours, theirs]
                for source, sink, counts in ((ours, theirs, True), (theirs, ours, False)):
                    threading.Thread(target=self._pass, args=(source, sink, counts), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 14):
                if counts:
                    self._passed += len(data)
                    if self._limit is not None and self._passed >= self._limit:
                        self._free.clear()
                        self.held.set()
                self._free.wait()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@contextmanager
def _running(command: list[str], port: int, environment: dict[str, str]) -> Iterator[None]:
    """A server from when its port answers to the end of the block."""
    with subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.DEVNULL) as server:
        try:
            wait_until(lambda: server.poll() is not None or _answers(port), 60)
            assert server.poll() is None, command
            yield
        finally:
            server.kill()


def _answers(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex((HOST, port)) == 0


def _make_bucket(store: S3FileSystem) -> None:
    """SeaweedFS's port answers seconds before it can do anything."""

    def made() -> bool:
        with suppress(OSError):
            store.mkdir(BUCKET)
            return True
        return False

    wait_until(made, 60)
