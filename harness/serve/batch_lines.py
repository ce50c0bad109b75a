"""OpenAI's batch files: requests and answers, a JSON object in each line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
from msgspec import Raw, Struct

from contract.errors import ConfigError, TemplateUnavailable, system_errors_as
from contract.types import LOCAL_TENANT, Tenant
from harness.host.faults import log_fault
from harness.host.structured.grammars import GrammarsUnavailable
from harness.host.submissions import EngineStopped
from harness.serve.answers import Json
from harness.serve.caller import Caller
from harness.serve.errors import as_api_error, internal_error, unsupported
from harness.serve.random_pool import random_bytes
from harness.serve.route import Route
from harness.serve.routes import ROUTES
from harness.serve.service import FailedWhileRunning, Service
from harness.serve.streams import CLIENT_LEFT
from harness.serve.strict_json import known_type

BATCH_ROUTES = {
    route.path: route for route in ROUTES if route.generates and not route.path.startswith("/api/")
}
"""The routes that a line may name, by path; Ollama's stream unless told otherwise."""
MARK = b"\xef\xbb\xbf"
"""What some editors write before the first line."""
EXAMPLE = (
    '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", '
    '"body": {"messages": [{"role": "user", "content": "Hello"}]}}'
)
BUSY = ("queue_full", "overloaded")
"""Codes of errors that end as soon as other requests of the batch have."""
START_TRIES = 30
"""How often the system may refuse to start a process for a request, a second apart."""
AHEAD = 2
"""Requests under way for each that is computed, so that no slot waits for the host."""


class _Line(Struct):
    custom_id: str
    url: str
    body: Raw
    method: str = "POST"


class _Streamed(Struct):
    stream: Any = None


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line of a batch: its name, its route, and the bytes of its body."""

    custom_id: str
    route: Route
    body: bytes


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """The answer to a line. ``line``: its line of the file of answers; ``refused``: the code of
    its error, None if it is answered. ``tokens``: of the prompts and of the answers."""

    line: bytes
    refused: str | None = None
    tokens: tuple[int, int] = (0, 0)


def read_batch(path: Path, max_body: int) -> Iterator[BatchRequest]:
    """The requests of a file; empty lines are none. Raises ConfigError for a file that cannot be
    read, a line that is no request, a body of more than ``max_body`` bytes and a name that an
    earlier line has."""
    seen: dict[str, int] = {}
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path}: is no file, which can be read more than once; write one")
    with system_errors_as(f"{path}: cannot read"), path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            text = raw.removeprefix(MARK) if number == 1 else raw
            if not text.strip():
                continue
            try:
                request = _request_of(text, max_body)
                if request.custom_id in seen:
                    first = seen[request.custom_id]
                    raise ValueError(f"custom_id {request.custom_id!r} is that of line {first}")
            except ValueError as problem:
                raise ConfigError(f"{path}: line {number}: {problem}") from None
            seen[request.custom_id] = number
            yield request


def _request_of(raw: bytes, max_body: int) -> BatchRequest:
    """The request of a line. Raises ValueError."""
    try:
        line = msgspec.json.decode(raw, type=known_type(_Line))
    except msgspec.ValidationError as error:
        problem = str(error).replace("Object missing required field", "has no field")
        raise ValueError(f"{problem}; a line is such as {EXAMPLE}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise ValueError(f"is no JSON object; a line is such as {EXAMPLE}") from None
    if not line.custom_id:
        raise ValueError("custom_id is empty")
    if line.method != "POST":
        raise ValueError(f"method is {line.method!r}, not POST")
    route = BATCH_ROUTES.get(line.url)
    if route is None:
        raise ValueError(f"url is {line.url!r}, not one of {', '.join(BATCH_ROUTES)}")
    if len(line.body) > max_body:
        raise ValueError(f"the body has more than {max_body:,} bytes")
    return BatchRequest(line.custom_id, route, bytes(line.body))


@dataclass(frozen=True)
class Batch:
    """Answers requests as the server does. ``reject_unknown``: refuse unknown fields."""

    service: Service
    reject_unknown: bool = False
    tenant: Tenant = LOCAL_TENANT
    _stopped: Event = field(default_factory=Event)

    def run(
        self, requests: Iterable[BatchRequest], write: Callable[[BatchRequest, BatchAnswer], None]
    ) -> None:
        """Answer all requests, and call ``write`` with each answer, in the order in which they
        end and from several threads. An exception, such as KeyboardInterrupt, ends the requests
        under way. Raises EngineStopped and what ``write`` raises."""
        at_once = AHEAD * self.service.model.limits.slots

        def work(request: BatchRequest) -> None:
            answer = None if self._stopped.is_set() else self.answer(request)
            if answer is not None:
                write(request, answer)

        with ThreadPoolExecutor(at_once, "batch") as pool:
            running: set[Future[None]] = set()
            try:
                for request in requests:
                    if len(running) == at_once:
                        running = _rest(running)
                    running.add(pool.submit(work, request))
                while running:
                    running = _rest(running)
            finally:
                self._stopped.set()

    def answer(self, request: BatchRequest) -> BatchAnswer | None:
        """The answer to a request; None if the batch was ended meanwhile. Raises EngineStopped if
        the engine, or the server's disk, answers no request, and what the system refuses."""
        refused = 0
        while True:
            try:
                return _answered(request, self._computed(request))
            except Exception as failed:
                error = failed.error if isinstance(failed, FailedWhileRunning) else failed
            if error is CLIENT_LEFT:
                return None
            refusal = as_api_error(error)
            if refusal is None:
                log_fault(f"{request.custom_id} failed", error)
                refusal = internal_error()
            if isinstance(error, TemplateUnavailable | GrammarsUnavailable):
                refused += 1
                if refused == START_TRIES:
                    raise error
            if refusal.code not in BUSY:
                break
            if self._stopped.wait(refusal.retry_after):
                return None
        if refusal.status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise EngineStopped(refusal.message)
        body = Raw(request.route.errors(refusal))
        return BatchAnswer(_line(request, refusal.status, body), refusal.code or "error")

    def _computed(self, request: BatchRequest) -> Json:
        """The body of an answer. Raises what its route raises."""
        with suppress(msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            if msgspec.json.decode(request.body, type=known_type(_Streamed)).stream is True:
                raise unsupported("stream", "answers of a batch are whole; leave stream out")
        ignored: list[str] = []
        caller = Caller(gone=self._stopped.is_set, ignored=ignored)
        unknown = None if self.reject_unknown else ignored
        route = request.route
        answered: Json = route.answer_to(self.service, request.body, self.tenant, caller, unknown)
        return answered


def _answered(request: BatchRequest, body: Json) -> BatchAnswer:
    usage = body.get("usage") or {}
    read = usage.get("prompt_tokens") or usage.get("input_tokens") or 0
    written = usage.get("completion_tokens") or usage.get("output_tokens") or 0
    return BatchAnswer(_line(request, HTTPStatus.OK, body), tokens=(read, written))


def _rest(running: set[Future[None]]) -> set[Future[None]]:
    """Wait until one has ended; the others. Raises what one raised."""
    done, rest = wait(running, return_when=FIRST_COMPLETED)
    for one in done:
        one.result()
    return rest


def _line(request: BatchRequest, status: int, body: object) -> bytes:
    answer = {
        "id": f"batch_req_{random_bytes(12).hex()}",
        "custom_id": request.custom_id,
        "response": {
            "status_code": int(status),
            "request_id": f"req_{random_bytes(12).hex()}",
            "body": body,
        },
        "error": None,
    }
    return msgspec.json.encode(answer) + b"\n"
