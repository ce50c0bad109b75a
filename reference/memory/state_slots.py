"""The slots of saved recurrent states, and the choice of the state to evict."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Set

from contract.lazy_dataclass import dataclass
from reference.memory.prefix import NO_TREE_OBSERVER, Node, TreeObserver

PASSED_BY = 8
"""How many times less likely a prompt continues from a state in the middle of one cached sequence
than from the last state of a sequence, or from a state where several sequences part."""


@dataclass(slots=True, eq=False)
class _Attached:
    """A state saved after ``tokens`` tokens. ``above`` is the nearest node towards the root that
    also has a state. ``credit`` is the largest value of an evicted state at its latest use."""

    tokens: int
    above: Node | None
    credit: int


class StateSlots:
    """``count`` slots for states: free, taken by a caller that saves one, or attached to a node.

    The value of a state is the number of tokens that would be computed again without it, less if
    few prompts continue from it, plus its credit. The credit grows with evictions, so an unused
    state is evicted in the end (the rule of GreedyDual caches). All states have the same size, so
    size does not count. ``observer`` is notified of every attached state."""

    def __init__(self, count: int, observer: TreeObserver = NO_TREE_OBSERVER) -> None:
        self.count = count
        self._observer = observer
        self._free = deque(range(count))
        self._taken: set[int] = set()
        self._attached: dict[Node, _Attached] = {}
        self._credit = 0

    def take(self, gain: int | None = None) -> int | None:
        """A slot, if necessary that of the least valuable state; None if all are taken.

        ``gain`` is the number of tokens that a new state in the middle of a prompt would save; then
        the result is also None if every present state has more value than that."""
        if not self._free and self._attached:
            least, value = self._min_valuable()
            if gain is not None and self._credit + gain // PASSED_BY < value:
                return None
            self._credit = max(self._credit, value)
            self.forget(least)
        if not self._free:
            return None
        slot = self._free.popleft()
        self._taken.add(slot)
        return slot

    def attach(self, node: Node, slot: int, tokens: int) -> None:
        """Attach a taken slot with the state after ``tokens`` tokens to ``node``, their last."""
        assert node.state is None, "the node has a state"
        self._taken.remove(slot)
        above = _above(node)
        for other, attached in self._attached.items():
            if attached.above is above and attached.tokens > tokens and node in other.upward():
                attached.above = node
        node.state = slot
        self._attached[node] = _Attached(tokens, above, self._credit)
        self._observer.state_saved(node)

    def drop(self, slot: int) -> None:
        """Give a taken slot back."""
        if slot not in self._taken:
            raise AssertionError(f"state slot {slot} is not taken")
        self._taken.remove(slot)
        self._free.append(slot)

    def touch(self, node: Node) -> None:
        """Record that the node's state was used."""
        attached = self._attached.pop(node)
        attached.credit = self._credit
        self._attached[node] = attached

    def forget(self, node: Node) -> None:
        """Free the slot of the node, if it has one."""
        if node.state is None:
            return
        gone = self._attached.pop(node)
        for attached in self._attached.values():
            if attached.above is node:
                attached.above = gone.above
        self._free.append(node.state)
        node.state = None

    def check(self, nodes: Set[Node]) -> None:
        """Raise AssertionError unless ``nodes`` are those with a state, and no slot is lost."""
        assert nodes == self._attached.keys(), "a state belongs to no prefix"
        for node, attached in self._attached.items():
            assert attached.above is _above(node), "a state is compared with the wrong one"
        slots = [*self._free, *self._taken, *(node.state for node in nodes)]
        assert sorted(s for s in slots if s is not None) == list(range(self.count)), (
            "a state slot is lost or given twice"
        )

    def _min_valuable(self) -> tuple[Node, int]:
        """The attached node of the least value; among equals the least recently used."""
        below = Counter(attached.above for attached in self._attached.values())
        values = {node: self._value(node, below[node]) for node in self._attached}
        least = min(values, key=values.__getitem__)
        return least, values[least]

    def _value(self, node: Node, below: int) -> int:
        """The value of a node's state, with ``below`` states next below it."""
        attached = self._attached[node]
        above = 0 if attached.above is None else self._attached[attached.above].tokens
        gap = attached.tokens - above
        return attached.credit + (gap // PASSED_BY if below == 1 else gap)


def _above(node: Node) -> Node | None:
    """The nearest node towards the root that has a state."""
    nodes = node.upward()
    next(nodes, None)
    return next((above for above in nodes if above.state is not None), None)
