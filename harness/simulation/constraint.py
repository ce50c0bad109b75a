"""What a client may ask of its tokens: which may come next depends on those before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from reference.sched.constraints import Mask, pack_mask

FREE_ONE_IN = 4
"""How often any token may come next."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A rule that goes on after ``before``: the next token is one more than the last, modulo
    ``modulus``; after ``dead_end`` tokens none may come."""

    modulus: int
    dead_end: int | None = None
    before: tuple[int, ...] = ()

    def after(self, generated: Sequence[int]) -> Constraint:
        """The rule for whoever has these tokens already."""
        return replace(self, before=(*self.before, *generated))

    def allowed(self, generated: Sequence[int], vocab: int) -> range | None:
        """The tokens that may come next, None for all."""
        tokens = [*self.before, *generated]
        if self.dead_end is not None and len(tokens) >= self.dead_end:
            return range(0)
        if len(tokens) % FREE_ONE_IN == FREE_ONE_IN - 1:
            return None
        first = (tokens[-1] + 1 if tokens else 0) % self.modulus
        return range(first, vocab, self.modulus)

    def mask(self, generated: Sequence[int], vocab: int) -> Mask | None:
        """The same as an engine wants it."""
        allowed = self.allowed(generated, vocab)
        if allowed is None:
            return None
        return pack_mask(np.arange(allowed.start, allowed.stop, allowed.step), vocab)


def nearest(token: int, allowed: Sequence[int] | None) -> int:
    """What the simulated model samples under a mask: the next allowed token from ``token`` on, in
    a circle; -1 where none is, or where it samples none anyway. ``allowed`` is in order."""
    if allowed is None or token < 0:
        return token
    if not allowed:
        return -1
    return next((other for other in allowed if other >= token), allowed[0])
