"""Clients of a server: threads that ask, read streams, and note when everything came."""

from __future__ import annotations

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
"""How long a server may say nothing: one that answers one at a time lets the others wait."""


@dataclass(frozen=True, slots=True)
class ServerTarget:
    """A server; ``keys`` are those of its tenants, None for one without keys."""

    url: str
    model: str
    keys: tuple[str | None, ...] = (None,)

    def client(self, tenant: int) -> ServerClient:
        """A tenant's client."""
        return ServerClient(self.url, self.keys[tenant % len(self.keys)], SILENT_SECONDS)


@dataclass(slots=True)
class RequestOutcome:
    """What became of a request. Times are monotonic seconds; ``due`` is when it should have been
    sent, ``texts`` when each piece of text came. ``error`` is None for a whole answer."""

    asked: PlannedRequest
    due: float
    texts: list[float] = field(default_factory=list)
    ended: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    error: str | None = None


def run_load(
    target: ServerTarget, plan: LoadPlan, load: Sequence[PlannedRequest]
) -> list[RequestOutcome]:
    """Ask for everything, and wait until it is there; in the order of ``load``.

    With a rate a request is sent when it is due, however many are under way.
    """
    answers = [RequestOutcome(asked, 0.0) for asked in load]
    began = time.monotonic()
    if plan.rate is None:
        waiting = deque(answers)
        workers = [
            threading.Thread(target=_take_turns, args=(target, waiting), daemon=True)
            for _ in range(plan.clients)
        ]
    else:
        for answer in answers:
            answer.due = began + answer.asked.at
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
    """Send a request and note what comes."""
    asked = answer.asked
    body = {
        "model": target.model,
        "prompt": asked.prompt,
        "max_tokens": asked.max_tokens,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    try:
        for event in target.client(asked.tenant).stream(PATH, body):
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
