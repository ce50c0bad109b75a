"""Token constraints of clients: which token may come next depends on the tokens before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from reference.engine import MaskProvider
from reference.sched.constraints import Mask, pack_mask

FREE_ONE_IN = 4
"""One position of this many, on average, allows any token."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A rule that continues after the tokens ``before``: the next token is one more than the last,
    modulo ``modulus``; after ``dead_end`` tokens no token may come."""

    modulus: int
    dead_end: int | None = None
    before: tuple[int, ...] = ()

    def after(self, generated: Sequence[int]) -> Constraint:
        """The rule for the rest of an answer that begins with these tokens."""
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

    def counted(self, counts: Counter[str], vocab: int) -> MaskProvider:
        """``mask`` for this vocabulary, which also counts its calls."""

        def mask(generated: list[int]) -> Mask | None:
            counts["masks"] += 1
            return self.mask(generated, vocab)

        return mask

    def mask(self, generated: Sequence[int], vocab: int) -> Mask | None:
        """The same tokens as a packed mask, None for all."""
        allowed = self.allowed(generated, vocab)
        if allowed is None:
            return None
        return pack_mask(np.arange(allowed.start, allowed.stop, allowed.step), vocab)


def nearest(token: int, allowed: Sequence[int] | None) -> int:
    """The token that the simulated model samples under a mask: the first allowed one from ``token``
    on, cyclically; -1 where none is allowed or ``token`` is -1. ``allowed`` is in order."""
    if allowed is None or token < 0:
        return token
    if not allowed:
        return -1
    return next((other for other in allowed if other >= token), allowed[0])
