"""Small models, wheels and servers for the catalog tests; nothing leaves this machine."""

from __future__ import annotations

import contextlib
import hashlib
import random
import socket
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from harness.catalog import CatalogEntry, HttpsSource, Network, WheelMember

DISTRIBUTION = "tiny-model"
VERSION = "1.0"
MEMBER = "tiny_model/tiny.gguf"
HOST = "hub.test"
Answer = Callable[[BaseHTTPRequestHandler], None]


def random_bytes(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def entry_for(content: bytes, source: HttpsSource | WheelMember, **changes: object) -> CatalogEntry:
    fields = {
        "id": "tiny",
        "name": "Tiny",
        "architecture": "llama",
        "parameters": "1K",
        "quant": "F32",
        "licence": "Apache-2.0",
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "cache_bytes_per_token": 64,
        "source": source,
    }
    return CatalogEntry(**{**fields, **changes})


def wheel_entry(content: bytes, **changes: object) -> CatalogEntry:
    source = changes.pop("source", WheelMember(DISTRIBUTION, VERSION, MEMBER))
    return entry_for(content, source, **changes)


def build_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    """A wheel pip accepts, holding ``members`` besides its metadata."""
    info = f"tiny_model-{VERSION}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"tiny_model-{VERSION}-py3-none-any.whl"
    texts = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {VERSION}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        for name, text in texts.items():
            archive.writestr(name, text)
    return path


def offline_pip(folder: Path) -> dict[str, str]:
    """Environment that makes the real pip see only the wheels in ``folder``."""
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": "/dev/null"}


class Recorder:
    """A Progress that remembers what it was told."""

    def __init__(self) -> None:
        self.jobs: list[tuple[str, int | None, str]] = []
        self.counts: list[int] = []
        self.open = False

    def start(self, label: str, total: int | None, unit: str) -> None:
        self.jobs.append((label, total, unit))
        self.counts.append(0)
        self.open = True

    def advance(self, n: int) -> None:
        assert self.open
        assert n > 0
        self.counts[-1] += n

    def close(self) -> None:
        self.open = False


class LocalServer:
    """Answers by path; ``requests`` lists (path, Range header) in order of arrival."""

    def __init__(self, answers: dict[str, Answer]) -> None:
        self.requests: list[tuple[str, str | None]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests.append((self.path, self.headers.get("Range")))
                with contextlib.suppress(ConnectionError):
                    answers[self.path](self)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def wrap(self, context: object) -> None:
        """Serve TLS instead of plain text."""
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    def network(self) -> Network:
        """A Network on which ``HOST`` is this server, without TLS."""
        return Network(
            hosts=(HOST,),
            retry_seconds=0.0,
            connect=lambda host, port: socket.create_connection(("127.0.0.1", self.port), 10),
        )

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextlib.contextmanager
def serving(answers: dict[str, Answer]) -> Iterator[LocalServer]:
    server = LocalServer(answers)
    try:
        yield server
    finally:
        server.close()


def send(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, **headers: str) -> None:
    """A reply with a true Content-Length unless ``headers`` says otherwise."""
    handler.send_response(status)
    for name, value in {"Content_Length": str(len(body)), **headers}.items():
        if value:
            handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def file_answer(content: bytes) -> Answer:
    """The whole file, or the part a Range header asks for."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        asked = handler.headers.get("Range")
        if asked is None:
            send(handler, content)
            return
        start = int(asked.removeprefix("bytes=").rstrip("-"))
        span = f"bytes {start}-{len(content) - 1}/{len(content)}"
        send(handler, content[start:], 206, Content_Range=span)

    return answer


def visible_files(cache_dir: Path) -> list[Path]:
    """The files under models/ that a user of the cache would see."""
    return [path for path in (cache_dir / "models").glob("*/*") if not path.name.startswith(".")]
