"""The client of a request: whether it is connected, and how to send to it from any thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import TypeVar

from contract.types import Tenant
from harness.serve.errors import naming_fields

Server = TypeVar("Server")
Body = TypeVar("Body")
Answer = TypeVar("Answer")

SEND_AT_ONCE = "zinc_rt.send_at_once"
"""Key of the function in the WSGI environment that sends at once."""

BEGIN = "zinc_rt.begin"
"""Key of the function in the WSGI environment that sends the head of the answer."""

Gone = Callable[[], bool]
"""Whether the client has left."""
SendAtOnce = Callable[[Callable[[], bytes]], bool]
"""Sends more of a body that has begun, from any thread and without waiting. The given function
makes the bytes. False if they must be returned by the body's iterator; then it was not called."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of a request; by default one that stays connected and is sent the iterated body.

    ``ignored`` are the fields it sent that change nothing here; ``client_name`` gives the client's
    name of a field of chat completions."""

    gone: Gone = lambda: False
    begin: Callable[[], None] = lambda: None
    """Sends the head of an answer whose body has begun without bytes, so that the first ones can be
    sent at once. For the thread that iterates the body."""
    send_at_once: SendAtOnce = lambda make: False
    ignored: list[str] = field(default_factory=list)
    client_name: Callable[[str], str] = lambda field: field

    def ignore(self, names: Iterable[str]) -> None:
        """Note that these fields of a chat completion change nothing."""
        own = map(self.client_name, names)
        self.ignored.extend(name for name in own if name not in self.ignored)


Answers = Callable[[Server, Body, Tenant, Caller], Answer]
"""Answers the body of a tenant's request."""


def in_names_of(
    client_name: Callable[[str], str],
) -> Callable[[Answers[Server, Body, Answer]], Answers[Server, Body, Answer]]:
    """Let a function name the fields of its refusals, and those it ignores, as a client's API calls
    what chat completions call otherwise."""

    def decorate(answer: Answers[Server, Body, Answer]) -> Answers[Server, Body, Answer]:
        @wraps(answer)
        def named(server: Server, body: Body, tenant: Tenant, caller: Caller) -> Answer:
            with naming_fields(client_name):
                return answer(server, body, tenant, replace(caller, client_name=client_name))

        return named

    return decorate
