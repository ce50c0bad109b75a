"""The state slots: buffers for saved recurrent states, and the prefix that each belongs to."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Set

from reference.memory.prefix import Node


class StateSlots:
    """``count`` state slots: each is free, taken by a caller that saves a state, or attached to the
    node of a prefix."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = deque(range(count))
        self._taken: set[int] = set()
        self._attached: OrderedDict[Node, None] = OrderedDict()

    def take(self) -> int | None:
        """Take a state slot, if need be that of the least recently used node; None when callers
        have all of them."""
        if not self._free and self._attached:
            self.forget(next(iter(self._attached)))
        if not self._free:
            return None
        state_slot = self._free.popleft()
        self._taken.add(state_slot)
        return state_slot

    def attach(self, node: Node, state_slot: int) -> None:
        """Attach a taken state slot to a node."""
        assert node.state is None, "the node has a state"
        self._taken.remove(state_slot)
        node.state = state_slot
        self._attached[node] = None

    def drop(self, state_slot: int) -> None:
        """Free a taken state slot."""
        if state_slot not in self._taken:
            raise AssertionError(f"state slot {state_slot} is not taken")
        self._taken.remove(state_slot)
        self._free.append(state_slot)

    def touch(self, node: Node) -> None:
        """Make the node's state the most recently used one."""
        self._attached.move_to_end(node)

    def forget(self, node: Node) -> None:
        """Free the state slot of the node, if it has one."""
        if node.state is not None:
            del self._attached[node]
            self._free.append(node.state)
            node.state = None

    def check(self, nodes: Set[Node]) -> None:
        """Raise AssertionError unless ``nodes`` are the nodes with a state, and each state slot is
        used once."""
        assert nodes == self._attached.keys(), "a state belongs to no prefix"
        state_slots = [*self._free, *self._taken, *(node.state for node in nodes)]
        assert sorted(p for p in state_slots if p is not None) == list(range(self.count)), (
            "a state slot is lost or used twice"
        )
