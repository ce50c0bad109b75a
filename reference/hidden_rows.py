"""The layout of the table of hidden states, from which a draft block reads the model's results.

The table has a ring of rows for every slot; a position is in the row of its remainder. Then come
``passing`` rows, for tokens of a long chunk that have no room in the rings, which the next step
overwrites; a row of zeros; and a row per slot for the latest result of the draft block."""

from __future__ import annotations

import numpy as np

from contract.arrays import Ints, Records
from contract.ir.graph import BufferKind, Graph
from contract.lazy_dataclass import dataclass
from reference.limits import Limits

HIDDEN_TABLE = "state.hidden"
HIDDEN_PAIRS = "request.hidden_pairs"
HIDDEN_ROWS = "request.hidden_rows"
"""The table, the rows that a step writes, and the rows that it reads."""
BLOCK_ENDS = "request.block_ends"
"""The query tokens of a DFlash head's step, each at the last position of its block."""
HEAD_PAGES = "state.head_kv"
"""The beginning of the names of the pages of a DFlash head."""
SHARED_STATES = (HIDDEN_TABLE, HEAD_PAGES, "state.slots", "state.recent")
"""Beginnings of the names of buffers that a draft block or head and its model both write."""

Indices = Ints


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
        """The ring rows of ``positions`` of a slot, which must be among the latest."""
        found: Indices = positions % self.ring + np.int32(slot * self.ring)
        return found

    def in_step(self, tokens: Indices) -> Indices:
        """The rows of tokens of the latest step, by their indices in it."""
        return (self.slots * self.ring + tokens).astype(np.int32)

    def drafted(self, slot: int) -> int:
        """The row of the latest result of the draft block for a slot."""
        return self.zeros + 1 + slot

    def written(self, query: Records) -> Indices:
        """int32[tokens, 2] for a step over QUERY_TOKEN[tokens]: each token and its row. Of a chunk
        longer than the ring, the last positions are in the ring, the others in passing rows."""
        tokens = np.arange(len(query), dtype=np.int32)
        slots, positions = query["slot"], query["position"]
        rows = slots * self.ring + positions % self.ring
        if len(query) > self.ring:
            ends = np.zeros(self.slots, np.int32)
            np.maximum.at(ends, slots, positions + 1)
            early = positions < ends[slots] - self.ring
            rows = np.where(early, self.in_step(tokens), rows)
        pairs = np.empty((len(query), 2), np.int32)
        pairs[:, 0], pairs[:, 1] = tokens, rows
        return pairs


def shared_names(graph: Graph, other: Graph) -> set[str]:
    """The buffers that two graphs of one model have in common."""
    fixed = (BufferKind.WEIGHT, BufferKind.CONSTANT)
    return {
        name
        for name, decl in other.buffers.items()
        if graph.buffers.get(name) == decl
        and (decl.kind in fixed or name.startswith(SHARED_STATES))
    }
