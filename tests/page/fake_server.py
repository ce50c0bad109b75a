"""A test double of the server: the pages, and canned answers in the wire's format.

What it answers is decided by the last user message, see ``Fake.answer_to``."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from flask import Flask, Response, request
from werkzeug.serving import WSGIRequestHandler, make_server

from harness.serve.page import PageFile, read_page
from tests.patience import PATIENCE_SECONDS

MARKDOWN = Path(__file__).with_name("answer.md").read_text()
THINKING = "<think>Let me see: two and two.</think>\n\nThe answer is **4**."
CONTEXT = 4096
PIECE_CHARACTERS = 4
CUT_CHARACTERS = 2 * PIECE_CHARACTERS
"""What comes of an answer that is cut."""
FACTS = {
    "tier": "cpu", "device": "test", "context": CONTEXT, "fingerprint": "f0", "slots": 8,
    "thinking": True,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "data": [
        {"id": "tiny", "x_zinc": FACTS},
        {"id": "other", "x_zinc": FACTS | {"tier": "opencl", "context": 512, "thinking": False}},
    ]
}


@dataclass
class Fake:
    """What the double does, changed by the tests, and what it was asked."""

    key: str | None = None
    busy: int = 0
    """So many requests are refused first, with 503 and 429 in turn."""
    answers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    """Seconds between chunks."""
    drift: bool = False
    """Whether the same seed gives another text each time."""
    cut: bool = False
    """Whether streams end early without saying so."""
    refusal: str = ""
    """The message with which every question is refused."""
    max_messages: int | None = None
    """Longer conversations do not fit the context."""
    finish: str = "stop"
    used: int = 1024
    """Tokens of prompt and answer together."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Pieces of tool calls that come before the text."""
    memory: int | None = None
    """Bytes that the server has free, where it says so."""
    managed: list[dict[str, Any]] | None = None
    """The models it has and could fetch; None where the server does not say."""
    progress: list[dict[str, Any]] = field(default_factory=list)
    """What a pull tells; an error ends it."""
    fetched: threading.Event = field(default_factory=threading.Event)
    """Until it is set, a pull stays at what it told last before its end."""
    metrics: list[str] = field(default_factory=list)
    """Answers of ``/metrics``, the last one for ever."""

    def answer_to(self, body: dict[str, Any]) -> str:
        text = body["messages"][-1]["content"]
        answer = self.answers.get(text, f"You said {text} with seed {body['seed']}")
        return f"{answer} again {len(self.asked)}" if self.drift else answer


@dataclass
class Double:
    """The server of all tests, and what it does for the present one."""

    fake: Fake = field(default_factory=Fake)
    url: str = ""


def add_page(app: Flask) -> None:
    """Add a route for each file of the pages."""
    for path, file in read_page().items():
        app.add_url_rule(path, path, partial(_file, file))


def _file(file: PageFile) -> Any:
    return file.answer(request.environ)


def fake_app(double: Double) -> Flask:
    """The double as an application."""
    app = Flask("fake", static_folder=None)
    add_page(app)

    @app.before_request
    def check_key() -> Response | None:
        fake = double.fake
        guarded = request.path.startswith("/v1/") or request.path == "/metrics"
        if guarded and fake.key and request.headers.get("Authorization") != f"Bearer {fake.key}":
            return _refused(401, "this server needs a key")
        return None

    @app.get("/metrics")
    def metrics() -> str:
        fake = double.fake
        return fake.metrics.pop(0) if len(fake.metrics) > 1 else fake.metrics[0]

    @app.post("/v1/chat/completions")
    def chat() -> Response:
        fake = double.fake
        body = request.get_json()
        fake.asked.append(body)
        if fake.busy:
            fake.busy -= 1
            status = 503 if fake.busy % 2 else 429
            return _refused(status, "the queue is full", **{"Retry-After": "1"})
        if fake.refusal:
            return _refused(400, fake.refusal)
        if fake.max_messages is not None and len(body["messages"]) > fake.max_messages:
            return _refused(400, "prompt: is too long", code="context_length_exceeded")
        return Response(_chunks(fake, body), mimetype="text/event-stream")

    _add_models(app, double)
    return app


def _add_models(app: Flask, double: Double) -> None:
    """The routes about models."""

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        managed = double.fake.managed
        told = {
            "tenant": {"name": "local", "qos": "interactive"},
            "memory_available_bytes": double.fake.memory,
        }
        return MODELS if managed is None else MODELS | {"x_zinc": {"managed": managed} | told}

    @app.post("/v1/models/pull")
    def pull() -> Response:
        name = request.get_json()["model"]
        return Response(_pulling(double.fake, name), mimetype="text/event-stream")

    @app.post("/v1/models/activate")
    def activate() -> dict[str, Any]:
        fake = double.fake
        name = request.get_json()["model"]
        assert fake.managed is not None
        fake.managed = [model | {"active": model["id"] == name} for model in fake.managed]
        return {"id": name}

    @app.delete("/v1/models/<path:name>")
    def remove(name: str) -> Response:
        fake = double.fake
        assert fake.managed is not None
        if any(model["id"] == name and model["active"] for model in fake.managed):
            return _refused(400, f"{name} answers requests")
        fake.managed = [
            model | {"installed": model["installed"] and model["id"] != name}
            for model in fake.managed
        ]
        return Response('{"deleted": true}', mimetype="application/json")


def _refused(status: int, message: str, code: str = "", **headers: str) -> Response:
    response = Response(json.dumps({"error": {"message": message, "code": code}}), status)
    response.headers.update(headers)
    return response


def _pulling(fake: Fake, name: str) -> Iterator[str]:
    for number, state in enumerate(fake.progress, 1):
        if number == len(fake.progress) > 1:
            fake.fetched.wait(10 * PATIENCE_SECONDS)
        yield _line(state)
    if "error" not in fake.progress[-1]:
        assert fake.managed is not None
        fake.managed = [m | {"installed": m["installed"] or m["id"] == name} for m in fake.managed]
        yield "data: [DONE]\n\n"


def _chunks(fake: Fake, body: dict[str, Any]) -> Iterator[str]:
    text = fake.answer_to(body)
    starts = range(0, len(text), PIECE_CHARACTERS)
    pieces = [text[at : at + PIECE_CHARACTERS] for at in starts]
    yield ": ping\n\n"
    for call in fake.calls:
        yield _line({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]})
    for index, piece in enumerate(pieces):
        if fake.cut and index * PIECE_CHARACTERS == CUT_CHARACTERS:
            return
        choice: dict[str, Any] = {"index": 0, "delta": {"content": piece}, "finish_reason": None}
        if body.get("logprobs"):
            other = {"token": "else", "logprob": -1.5}
            one = {"token": piece, "logprob": -0.25}
            choice["logprobs"] = {"content": [{**one, "top_logprobs": [one, other]}]}
        yield _line({"choices": [choice], "system_fingerprint": "f0"})
        time.sleep(fake.delay)
    yield _line({"choices": [{"index": 0, "delta": {}, "finish_reason": fake.finish}]})
    usage = {"prompt_tokens": 10, "completion_tokens": len(pieces), "total_tokens": fake.used}
    yield _line({"choices": [], "usage": usage, "x_zinc": {"seed": body["seed"]}})
    yield "data: [DONE]\n\n"


def _line(value: object) -> str:
    return f"data: {json.dumps(value)}\n\n"


class _Quiet(WSGIRequestHandler):
    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Nothing: what a page asks for is no news."""


@contextmanager
def serving() -> Iterator[Double]:
    """The double on a free port."""
    double = Double()
    app = fake_app(double)
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=_Quiet)
    server.daemon_threads = True  # type: ignore[attr-defined]
    double.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield double
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
