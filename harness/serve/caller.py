"""The client of a request: whether it is connected, and how to send to it from any thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

CALLER = "zinc_rt.caller"
"""Key of the server's ``Caller`` in the WSGI environment."""
Gone = Callable[[], bool]
"""Whether the client has left."""
SendAtOnce = Callable[..., bool]
"""Sends more of a body that has begun, from any thread and without waiting. Its first argument
makes the bytes from the others. False if they must be returned by the body's iterator; then it was
not called."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of a request. By default it stays connected, and the server's iteration sends its
    body. ``ignored`` lists the fields of the request that were ignored. ``client_name`` maps a
    field of chat completions to its name in the client's API."""

    gone: Gone = lambda: False
    begin: Callable[[], None] = lambda: None
    """Send the head of an answer whose body has no bytes yet, so that ``send_at_once`` works. Only
    the thread that iterates the body calls it."""
    send_at_once: SendAtOnce = lambda make, *given: False
    ignored: list[str] = field(default_factory=list)
    client_name: Callable[[str], str] = lambda field: field

    def naming(self, client_name: Callable[[str], str]) -> Caller:
        """The caller with these names."""
        return Caller(self.gone, self.begin, self.send_at_once, self.ignored, client_name)

    def ignore(self, names: Iterable[str]) -> None:
        """Record that these fields of a chat completion were ignored."""
        own = map(self.client_name, names)
        self.ignored.extend(name for name in own if name not in self.ignored)
