"""The recurrent states of each slot's sequence, saved and loaded bit for bit on the device.

Unlike KV pages, a recurrent state cannot be cut back to a shorter prefix. Returning to a position
needs a state saved at it, or one of the slot's latest states."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from contract.arrays import Records
from contract.dtypes import F32
from contract.errors import RequestError
from contract.execution import ExecutableGraph
from contract.ir.graph import BufferDecl, BufferKind, Graph
from contract.ir.inputs import pack_inputs
from contract.tier import Buffer, Fence, Tier
from reference.memory.planner import RECURRENT_OPCODES, state_buffers
from reference.memory.row_copies import ONE_ROW, PAIRS, RowCopies, Saved, SavedPage, copying

SAVE, LOAD = 0, 1


def recurrent_buffers(graph: Graph) -> tuple[BufferDecl, ...]:
    """The state buffers of ``graph`` that recurrent opcodes update, [slots, ...] each."""
    _, recurrent = state_buffers(graph)
    return tuple(decl for decl in graph.buffers.values() if decl.name in recurrent)


def slot_states(graph: Graph) -> int:
    """The number of latest states that each slot keeps."""
    found = [node.params["states"] for node in graph.nodes if node.opcode in RECURRENT_OPCODES]
    return int(max(found, default=1))


def state_bytes(graph: Graph) -> int:
    """Bytes of the recurrent states of one sequence; 0 if there are no recurrent layers."""
    return sum(_bytes_of_one(decl) for decl in recurrent_buffers(graph))


def _bytes_of_one(decl: BufferDecl) -> int:
    _, *rows, columns = (int(dim) for dim in decl.shape)
    return math.prod(rows) * decl.dtype.row_bytes(columns)


class RecurrentMemory:
    """The recurrent states of all slots on one tier, and the position of each slot.

    A slot keeps the states after its latest positions; the state after a position is in row
    (position modulo the number of states). A step may start after any of them.

    ``save`` and ``load`` are queued submissions like steps and do not wait. There are
    ``state_slots`` slots for saved states; none for a graph without recurrent layers."""

    def __init__(
        self, tier: Tier, graph: Graph, buffers: Mapping[str, Buffer], state_slots: int = 0
    ) -> None:
        self._tier = tier
        decls = recurrent_buffers(graph)
        rows, states = int(decls[0].shape[0]) if decls else 0, slot_states(graph)
        self._widths = {decl.name: _bytes_of_one(decl) // F32.block_bytes for decl in decls}
        self._states = states
        self._positions = [0] * (rows // states)
        self._earliest = [0] * (rows // states)
        self._saved_positions = np.zeros(state_slots, np.int64)
        self._pool: dict[str, Buffer] = {}
        self._graphs: tuple[ExecutableGraph, ...] = ()
        self._last: Fence | None = None
        self._copies: RowCopies | None = None
        if rows and state_slots:
            for name, width in self._widths.items():
                decl = BufferDecl(_saved(name), BufferKind.STATE, F32, (state_slots, width))
                nbytes = state_slots * width * F32.block_bytes
                self._pool[decl.name] = tier.alloc(decl, nbytes)
            bound = {**{name: buffers[name] for name in self._widths}, **self._pool}
            states_of_slots, saved = (str, rows), (_saved, state_slots)
            self._graphs = tuple(
                ExecutableGraph(tier, copying(name, self._widths, *ends), bound, ONE_ROW)
                for name, ends in (
                    ("save", (states_of_slots, saved)),
                    ("load", (saved, states_of_slots)),
                )
            )

    def prepare(self) -> None:
        """Lower the copies of states now, so that the first copy is not slowed by it."""
        for copies in self._graphs:
            for bucket in copies.buckets:
                copies.record(bucket)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot's states."""
        return sum(self._widths.values()) * F32.block_bytes

    def position(self, slot: int) -> int:
        """The position of the token that would continue the slot's sequence."""
        self._check_slot(slot)
        return self._positions[slot]

    def advance(self, query: Records) -> None:
        """Record a step over QUERY_TOKEN[tokens]. Raises AssertionError for a token that neither
        starts its slot's sequence nor follows one of the slot's states."""
        if not self._positions:
            return
        ended: dict[int, int] = {}
        slots, positions = query["slot"].tolist(), query["position"].tolist()
        for slot, position in zip(slots, positions, strict=True):
            if position == 0:
                self._earliest[slot] = 0
            elif slot in ended and position != ended[slot]:
                raise _lacks(slot, ended[slot], position)
            elif slot not in ended and not (
                self._earliest[slot] <= position <= self._positions[slot]
            ):
                raise _lacks(slot, self._positions[slot], position)
            ended[slot] = position + 1
        for slot, top in ended.items():
            self._positions[slot] = top
            self._earliest[slot] = max(self._earliest[slot], top - self._states + 1)

    def save(self, slot: int, state_slot: int, position: int | None = None) -> None:
        """Queue a copy to ``state_slot`` of the slot's state for ``position``, by default the
        latest. Raises RequestError for a slot or state slot that does not exist."""
        self._check_slot(slot)
        self._check_state_slot(state_slot)
        position = self._positions[slot] if position is None else position
        assert self._earliest[slot] <= position <= self._positions[slot], "its state was replaced"
        self._copy(SAVE, self._row(slot, position), state_slot)
        self._saved_positions[state_slot] = position

    def load(self, state_slot: int, slot: int) -> None:
        """Queue a copy of the state in ``state_slot`` to ``slot``. Raises RequestError for a slot
        or state slot that does not exist."""
        self._check_slot(slot)
        self._check_state_slot(state_slot)
        position = int(self._saved_positions[state_slot])
        self._copy(LOAD, state_slot, self._row(slot, position))
        self._positions[slot] = self._earliest[slot] = position

    def _row(self, slot: int, position: int) -> int:
        """The row of the state from which ``position`` of a slot is computed."""
        return slot * self._states + (position - 1) % self._states

    def read(self, state_slot: int) -> SavedPage:
        """Queue a copy of a saved state to host memory. Its slot may be overwritten at once."""
        self._check_state_slot(state_slot)
        return self._host_copies().save(state_slot)

    def write(self, state_slot: int, saved: Saved, position: int) -> None:
        """Queue a copy of a saved state, after ``position`` tokens, into a state slot."""
        self._check_state_slot(state_slot)
        self._host_copies().load(saved, state_slot)
        self._saved_positions[state_slot] = position

    def _host_copies(self) -> RowCopies:
        """The copies to host memory, created at first use because they lower two graphs."""
        if self._copies is None:
            widths = {_saved(name): width for name, width in self._widths.items()}
            state_slots = len(self._saved_positions)
            self._copies = RowCopies(self._tier, self._pool, widths, state_slots)
        return self._copies

    def close(self) -> None:
        """Free the state slots."""
        self._settle()
        if self._copies is not None:
            self._copies.close()
            self._copies = None
        for copies in self._graphs:
            copies.close()
        for buffer in self._pool.values():
            self._tier.free(buffer)
        self._pool = {}

    def _settle(self) -> None:
        if self._last is not None:
            self._tier.wait(self._last)
            self._last = None

    def _copy(self, graph: int, source: int, target: int) -> None:
        copies, pair = self._graphs[graph], np.array([[source, target]], np.int32)
        self._last = copies.replay(pack_inputs(copies.inputs, ONE_ROW, {PAIRS: pair}))

    def _check_slot(self, slot: int) -> None:
        slots = len(self._positions)
        if not 0 <= slot < slots:
            raise RequestError("slot", f"is {slot}, not one of {slots} with a recurrent state")

    def _check_state_slot(self, state_slot: int) -> None:
        state_slots = len(self._saved_positions)
        if not 0 <= state_slot < state_slots:
            raise RequestError(
                "state_slot", f"is {state_slot}, not one of {state_slots} for saved states"
            )


def _lacks(slot: int, needed: int, given: int) -> AssertionError:
    return AssertionError(f"slot {slot} has a recurrent state for position {needed}, not {given}")


def _saved(name: str) -> str:
    return f"saved.{name}"
