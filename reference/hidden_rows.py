"""The rows of the table of hidden states, from which a draft block reads what a model computed.

The table has a ring of rows for every slot, in which a position has the row of its remainder. What
a long chunk of a prompt leaves out of the rings has rows that the next step overwrites. Then follow
a row of zeros, and a row of every slot for what the draft block computed last."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from contract.lazy_dataclass import dataclass
from reference.limits import Limits

HIDDEN_TABLE = "state.hidden"
HIDDEN_PAIRS = "request.hidden_pairs"
HIDDEN_ROWS = "request.hidden_rows"
"""The table, the rows of it that a step writes, and the rows that it reads."""
SHARED_STATES = (HIDDEN_TABLE, "state.slots", "state.recent")
"""The table that a draft block and its model write for each other."""

Indices = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """The layout of the table: ``ring`` rows for each of ``slots``, then ``passing`` rows."""

    slots: int
    ring: int
    passing: int

    @classmethod
    def of(cls, limits: Limits) -> HiddenRows:
        """The layout for an engine with these limits."""
        return cls(limits.slots, limits.hidden_rows, limits.step_tokens)

    @property
    def zeros(self) -> int:
        """The row of zeros: no step writes it."""
        return self.slots * self.ring + self.passing

    def in_ring(self, slot: int, positions: Indices) -> Indices:
        """The rows of ``positions`` of a slot, of which the ring has the latest."""
        found: Indices = positions % self.ring + np.int32(slot * self.ring)
        return found

    def in_step(self, tokens: Indices) -> Indices:
        """The rows of tokens of the latest step, by their indices in it."""
        return (self.slots * self.ring + tokens).astype(np.int32)

    def drafted(self, slot: int) -> int:
        """The row of what the draft block computed last for a slot."""
        return self.zeros + 1 + slot

    def written(self, query: NDArray[np.void]) -> Indices:
        """int32[tokens, 2] for a step over QUERY_TOKEN[tokens]: each token and the row for it. A
        chunk longer than a ring has its last positions there, and the others in passing rows."""
        tokens = np.arange(len(query), dtype=np.int32)
        slots, positions = query["slot"], query["position"]
        rows = slots * self.ring + positions % self.ring
        if len(query) > self.ring:
            ends = np.zeros(self.slots, np.int32)
            np.maximum.at(ends, slots, positions + 1)
            early = positions < ends[slots] - self.ring
            rows = np.where(early, self.in_step(tokens), rows)
        return np.stack((tokens, rows), axis=1).astype(np.int32)
