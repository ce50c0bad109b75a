"""What recurrent layers remember of each slot's sequence, taken out and put back bit for bit.

Unlike KV pages, a recurrent state cannot be cut back to a shorter prefix: to return to a position
one needs a snapshot made there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from contract.errors import RequestError
from contract.ir.graph import BufferDecl, Graph
from contract.ops import TABLE
from contract.ops.recurrent import RECURRENT
from contract.spec import Access
from contract.tier import Buffer, Tier

RECURRENT_OPCODES = frozenset(spec.opcode for spec in RECURRENT)


@dataclass(frozen=True, slots=True)
class SlotState:
    """One buffer's part of a snapshot: ``data`` of ``shape`` in the buffer's element type."""

    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class RecurrentSnapshot:
    """All that recurrent layers know of a sequence after its first ``position`` tokens.

    The token that continues it has this position. ``states`` is by buffer name. It belongs to no
    slot and no tier: any slot of any runner of the same graph can take it.
    """

    position: int
    states: Mapping[str, SlotState]

    @property
    def nbytes(self) -> int:
        """Host memory of the states."""
        return sum(len(state.data) for state in self.states.values())


def recurrent_buffers(graph: Graph) -> tuple[BufferDecl, ...]:
    """The state buffers of ``graph`` that recurrent opcodes update, [slots, ...] each."""
    names = {
        node.operands[operand.name].buffer: None
        for node in graph.nodes
        if node.opcode in RECURRENT_OPCODES
        for operand in TABLE[node.opcode].operands
        if operand.access is Access.UPDATE
    }
    return tuple(graph.buffers[name] for name in names)


class RecurrentMemory:
    """The recurrent states of all slots on one tier, and the position each slot is at.

    A graph without recurrent layers has no slots here. No submission may be running during a call.
    """

    def __init__(self, tier: Tier, graph: Graph, buffers: Mapping[str, Buffer]) -> None:
        self._tier = tier
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._nbytes: dict[str, int] = {}
        slots = 0
        for decl in recurrent_buffers(graph):
            slots, *shape = (int(dim) for dim in decl.shape)
            self._shapes[decl.name] = tuple(shape)
            self._nbytes[decl.name] = math.prod(shape[:-1]) * decl.dtype.row_bytes(shape[-1])
        self._buffers = {name: buffers[name] for name in self._shapes}
        self._positions = [0] * slots

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot's states."""
        return sum(self._nbytes.values())

    def position(self, slot: int) -> int:
        """The position of the token that would continue the slot's sequence."""
        self._check_slot(slot)
        return self._positions[slot]

    def advance(self, query: NDArray[np.void]) -> None:
        """Note a step over QUERY_TOKEN[tokens].

        Raises AssertionError for a token that neither continues its slot's sequence nor begins one:
        the state would be of other tokens.
        """
        if not self._positions:
            return
        positions = list(self._positions)
        for slot, position in zip(query["slot"].tolist(), query["position"].tolist(), strict=True):
            if position not in (0, positions[slot]):
                raise AssertionError(
                    f"slot {slot} has a recurrent state for position {positions[slot]}, "
                    f"not {position}"
                )
            positions[slot] = position + 1
        self._positions = positions

    def snapshot(self, slot: int) -> RecurrentSnapshot:
        """The state of ``slot`` as it is now. Raises RequestError for a slot there is not."""
        self._check_slot(slot)
        states = {
            name: SlotState(shape, self._read(name, slot).tobytes())
            for name, shape in self._shapes.items()
        }
        return RecurrentSnapshot(self._positions[slot], MappingProxyType(states))

    def restore(self, slot: int, snapshot: RecurrentSnapshot) -> None:
        """Make ``slot`` continue where the snapshot was taken.

        Raises RequestError, having changed nothing, for a slot there is not and for a snapshot of
        another graph.
        """
        self._check_slot(slot)
        self._check_states(snapshot)
        for name, state in snapshot.states.items():
            self._write(name, slot, np.frombuffer(state.data, np.uint8))
        self._positions[slot] = snapshot.position

    def copy(self, source: int, target: int) -> None:
        """Give ``target`` the state of ``source``. Raises RequestError for a slot there is not."""
        self._check_slot(source)
        self._check_slot(target)
        for name in self._shapes:
            self._write(name, target, self._read(name, source))
        self._positions[target] = self._positions[source]

    def _read(self, name: str, slot: int) -> NDArray[np.uint8]:
        nbytes = self._nbytes[name]
        return self._tier.read(self._buffers[name], slot * nbytes, nbytes)

    def _write(self, name: str, slot: int, data: NDArray[np.uint8]) -> None:
        self._tier.write(self._buffers[name], slot * self._nbytes[name], data)

    def _check_slot(self, slot: int) -> None:
        slots = len(self._positions)
        if not 0 <= slot < slots:
            raise RequestError("slot", f"is {slot}, not one of {slots} with a recurrent state")

    def _check_states(self, snapshot: RecurrentSnapshot) -> None:
        for name in sorted(self._shapes.keys() | snapshot.states.keys()):
            expected, state = self._shapes.get(name), snapshot.states.get(name)
            if state is None or expected is None:
                problem = "is missing" if state is None else "is not a state of this model"
                raise RequestError("snapshot", f"{name} {problem}")
            if state.shape != expected:
                raise RequestError("snapshot", f"{name} is {state.shape}, expected {expected}")
            if len(state.data) != self._nbytes[name]:
                raise RequestError(
                    "snapshot",
                    f"{name} has {len(state.data)} bytes, expected {self._nbytes[name]}",
                )
