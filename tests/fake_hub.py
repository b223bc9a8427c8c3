"""A model hub on loopback for the real client of Hugging Face: one model, one commit, the files of a folder."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def fake_hub(model: str, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve `folder` as `model`; yields the address and the names of files that were downloaded."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(send=False)

        def do_GET(self) -> None:
            self._answer(send=True)

        def _answer(self, *, send: bool) -> None:
            path = self.path.partition("?")[0]
            files = f"/{model}/resolve/{COMMIT}/"
            if path.startswith(f"/api/models/{model}/tree/"):
                sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
                tree = [{"type": "file", "path": name, "size": size, "oid": name} for name, size in sizes.items()]
                self._send(json.dumps(tree).encode(), send)
            elif path.startswith(f"/api/models/{model}"):
                siblings = [{"rfilename": file.name} for file in sorted(folder.iterdir())]
                self._send(json.dumps({"id": model, "sha": COMMIT, "siblings": siblings}).encode(), send)
            elif path.startswith(files) and (folder / path.removeprefix(files)).is_file():
                asked.extend([path.removeprefix(files)] if send else [])
                self._send((folder / path.removeprefix(files)).read_bytes(), send)
            else:
                self.send_error(404)

        def _send(self, body: bytes, send: bool) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if send:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
