"""Clients of a server: threads that send requests, read streams, and record arrival times."""

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from contract.errors import ZincError
from harness.bench.load.plan import LoadPlan, PlannedRequest
from harness.client import ServerClient, ServerError

PATH = "/v1/completions"
SILENT_SECONDS = 600.0
"""Seconds a server may be silent: one that answers one request at a time lets the others wait."""


@dataclass(frozen=True, slots=True)
class ServerTarget:
    """A server; ``keys`` are the keys of its tenants, None for a server without keys."""

    url: str
    model: str
    keys: tuple[str | None, ...] = (None,)

    def client(self, tenant: int) -> ServerClient:
        """The client of a tenant."""
        return ServerClient(self.url, self.keys[tenant % len(self.keys)], SILENT_SECONDS)


@dataclass(slots=True)
class RequestOutcome:
    """The result of a request. Times are monotonic seconds: ``due`` is when it should be sent,
    ``texts`` when each piece of text arrived. ``error`` is None for a complete answer."""

    request: PlannedRequest
    due: float
    texts: list[float] = field(default_factory=list)
    ended: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    error: str | None = None


def run_load(
    target: ServerTarget, plan: LoadPlan, load: Sequence[PlannedRequest]
) -> list[RequestOutcome]:
    """Send all requests of ``load`` and wait for all answers, which are returned in its order.

    With a rate, a request is sent when it is due, however many are in flight."""
    answers = [RequestOutcome(request, 0.0) for request in load]
    began = time.monotonic()
    if plan.rate is None:
        waiting = deque(answers)
        workers = [
            threading.Thread(target=_take_turns, args=(target, waiting), daemon=True)
            for _ in range(plan.clients)
        ]
    else:
        for answer in answers:
            answer.due = began + answer.request.at
        workers = [
            threading.Thread(target=_when_due, args=(target, answer), daemon=True)
            for answer in answers
        ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return answers


def _take_turns(target: ServerTarget, waiting: deque[RequestOutcome]) -> None:
    while True:
        try:
            answer = waiting.popleft()
        except IndexError:
            return
        answer.due = time.monotonic()
        ask(target, answer)


def _when_due(target: ServerTarget, answer: RequestOutcome) -> None:
    time.sleep(max(0.0, answer.due - time.monotonic()))
    ask(target, answer)


def ask(target: ServerTarget, answer: RequestOutcome) -> None:
    """Send a request and record its answer."""
    request = answer.request
    body = {
        "model": target.model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    try:
        for event in target.client(request.tenant).stream(PATH, body):
            _note(answer, event, time.monotonic())
    except ServerError as error:
        answer.error = error.code or (f"http {error.status}" if error.status else "connection")
    except ZincError:
        answer.error = "client"
    answer.ended = time.monotonic()


def _note(answer: RequestOutcome, event: Mapping[str, Any], at: float) -> None:
    usage = event.get("usage")
    if usage:
        answer.tokens, answer.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
    for choice in event.get("choices", ()):
        if choice.get("text"):
            answer.texts.append(at)
            if not usage:
                answer.tokens += 1
