"""Who asks, as far as an answer has to know: whether it is still there, and what sends at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

SEND_AT_ONCE = "zinc_rt.send_at_once"
"""Where the WSGI environment has what sends at once."""

Gone = Callable[[], bool]
"""Whether the client has left."""
SendAtOnce = Callable[[Callable[[], bytes]], bool]
"""Sends more of a body that has begun, from any thread and without waiting: what is given it makes
the bytes. False where they have to go the ordinary way, and then nothing was made."""


def _stays() -> bool:
    return False


def _never(make: Callable[[], bytes]) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of a request; by default one that stays, and is told by who iterates the body."""

    gone: Gone = _stays
    send_at_once: SendAtOnce = _never
