"""A hub on loopback: the part of its protocol that a pull uses, spoken over real HTTP.

Per repository it knows files and who may read them; per path it can misbehave in a given way."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c0ffee" * 6 + "c0ff"
Answer = Callable[[BaseHTTPRequestHandler], None]


@dataclass
class Hub:
    """``files``: repository to path to content. ``requests`` lists what came in: method, path,
    Range header. ``body`` answers a GET of a path in place of the whole truth."""

    address: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: dict[str, str] = field(default_factory=dict)
    status: dict[str, int] = field(default_factory=dict)
    body: dict[str, Answer] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)

    def gets(self, ending: str) -> list[str | None]:
        """The Range headers of the GETs of paths that end so."""
        return [
            asked
            for method, path, asked in self.requests
            if method == "GET" and path.endswith(ending)
        ]


def send(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, **headers: str) -> None:
    """A reply with a true Content-Length unless ``headers`` says otherwise."""
    handler.send_response(status)
    for name, value in {"Content_Length": str(len(body)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)


def start_of(handler: BaseHTTPRequestHandler) -> int:
    """Where the Range header asks to start."""
    return int((handler.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))


def send_file(handler: BaseHTTPRequestHandler, content: bytes, cut: int | None = None) -> None:
    """The part of ``content`` asked for; closes the connection early at offset ``cut``."""
    start = start_of(handler)
    headers = {"Content_Length": str(len(content) - start)}
    if start:
        headers["Content_Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
    send(handler, content[start:cut], 206 if start else 200, **headers)
    if cut is not None:
        handler.close_connection = True


def _refusal(hub: Hub, handler: BaseHTTPRequestHandler, repository: str) -> bool:
    """Answer what the hub answers to who may not read; whether it did."""
    status = hub.status.get(repository)
    token = handler.headers.get("Authorization")
    hub.tokens.add(token)
    if status is not None:
        send(handler, b"", status)
    elif repository not in hub.files:
        send(handler, b"", 401, X_Error_Code="RepoNotFound")
    elif hub.gated.get(repository) not in (None, (token or "").removeprefix("Bearer ")):
        send(handler, b"", 403, X_Error_Code="GatedRepo")
    else:
        return False
    return True


def _describe(hub: Hub, handler: BaseHTTPRequestHandler, repository: str) -> None:
    """``/api/models/ORG/REPO``: the files with their sizes and digests."""
    siblings = [
        {
            "rfilename": path,
            "size": len(content),
            "blobId": "0" * 40,
            "lfs": {"size": len(content), "sha256": _digest(hub, path, content), "pointerSize": 9},
        }
        for path, content in hub.files[repository].items()
    ]
    info = {"id": repository, "modelId": repository, "sha": COMMIT, "siblings": siblings}
    send(handler, json.dumps(info).encode(), Content_Type="application/json")


def _digest(hub: Hub, path: str, content: bytes) -> str:
    return hub.digests.get(path, hashlib.sha256(content).hexdigest())


def _answer(hub: Hub, handler: BaseHTTPRequestHandler) -> None:
    path = handler.path.partition("?")[0]
    hub.requests.append((handler.command, path, handler.headers.get("Range")))
    if path.startswith("/api/models/"):
        repository = path.removeprefix("/api/models/")
        if not _refusal(hub, handler, repository):
            _describe(hub, handler, repository)
        return
    stored = path.startswith("/stored/")
    repository, _, name = path.removeprefix("/stored").strip("/").partition("/resolve/")
    name = name.partition("/")[2]
    if not stored and _refusal(hub, handler, repository):
        return
    content = hub.files[repository].get(name)
    if content is None:
        send(handler, b"", 404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
    elif handler.command == "HEAD":
        headers = {
            "X_Repo_Commit": COMMIT, "X_Linked_Etag": f'"{_digest(hub, name, content)}"',
            "X_Linked_Size": str(len(content)), "Content_Length": str(len(content)),
        }  # fmt: skip
        send(handler, content, **headers)
    elif not stored and name.startswith("moved/"):
        send(handler, b"", 302, Location=f"/stored{path}")
    else:
        hub.body.get(name, lambda handler: send_file(handler, content))(handler)


@contextlib.contextmanager
def serving_hub() -> Iterator[Hub]:
    """A hub that listens until the block ends."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            with contextlib.suppress(ConnectionError):
                _answer(hub, self)

        do_HEAD = do_GET

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
