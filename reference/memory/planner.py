"""Computes the memory that a model needs, and the longest context within a budget.

Everything follows from the graph's declarations and the tier's footprint of them, so a model family
needs no code here. Sizes are in bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from contract.arithmetic import PAGE_TOKENS
from contract.footprint import Footprint
from contract.ir.graph import BufferDecl, BufferKind, Graph
from contract.lazy_dataclass import dataclass
from contract.ops import TABLE
from contract.ops.recurrent import RECURRENT
from contract.shape_key import ShapeKey
from contract.spec import Access
from reference.limits import Limits

RECURRENT_OPCODES = frozenset(spec.opcode for spec in RECURRENT)
"""Opcodes that have a state per slot."""

FootprintOf = Callable[[Graph, ShapeKey], Footprint]
"""``Tier.footprint``, or ``contract.footprint.declared_footprint``."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of one engine, in bytes.

    - ``weights`` by storage type, in the tier's own layout. ``constants`` are tables.
    - ``step_data``: inputs and outputs of steps. ``scratch``: intermediate results. ``variants``:
      lowered shape buckets. ``workspace``: allocated only during a step.
    - ``kv``: all pages. ``recurrent``: the states of all slots, ``slot_states`` of each, and the
      saved states. ``state``: all other buffers that outlive a step.
    - Of the total, ``mapped`` is read in place from the model file, and ``evictable`` is mapped
      from files that the system may drop and read again. ``staging`` is host memory in addition to
      the device's.
    - ``streamed`` weights are in host memory; every step copies them to the ``ring`` on the device.
      A step of one token copies ``moved`` bytes."""

    slots: int
    saved_states: int
    context: int
    pages: int
    kv_dtype: str
    step_tokens: int
    step_rows: int
    weights: dict[str, int]
    constants: int
    step_data: int
    scratch: int
    variants: int
    workspace: int
    kv: int
    recurrent: int
    state: int
    mapped: int
    staging: int
    unified: bool
    ring: int = 0
    streamed: int = 0
    moved: int = 0
    evictable: int = 0
    slot_states: int = 1

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.fixed + self.kv + self.recurrent + self.streamed

    @property
    def fixed(self) -> int:
        """Memory that does not grow with pages or slots."""
        parts = self.constants, self.step_data, self.scratch, self.variants, self.workspace
        return sum(self.weights.values()) + sum(parts) + self.state + self.staging + self.ring

    @property
    def kv_per_token(self) -> int:
        """Bytes of keys and values of all layers for one position of one sequence."""
        return self.kv // (self.pages * PAGE_TOKENS)

    @property
    def recurrent_per_slot(self) -> int:
        """Bytes of the latest states of all recurrent layers of one sequence."""
        states = self.slots * self.slot_states + self.saved_states
        return self.recurrent // states * self.slot_states

    @property
    def device(self) -> int:
        """Bytes in the device's own memory; 0 if it shares the host's."""
        return 0 if self.unified else self.total - self.staging - self.streamed

    @property
    def host(self) -> int:
        """Bytes in host memory."""
        return self.total if self.unified else self.staging + self.streamed

    @property
    def budgeted(self) -> int:
        """Bytes that count against a budget: memory of the device, which may be the host's."""
        return self.host if self.unified else self.device

    @property
    def allocated(self) -> int:
        """Bytes allocated by the tier between steps, once all shape buckets are lowered."""
        return self.total - self.mapped - self.workspace - self.staging - self.streamed

    def to_dict(self) -> dict[str, Any]:
        """Every field and sum as JSON values."""
        sums = ("total", "fixed", "kv_per_token", "recurrent_per_slot", "device", "host")
        return asdict(self) | {name: getattr(self, name) for name in sums}


def plan_memory(
    graph: Graph, limits: Limits, footprint: Footprint, unified: bool = True
) -> MemoryPlan:
    """The memory plan of ``graph``, which was built with ``limits``.

    ``unified``: the device uses the host's memory."""
    weights: dict[str, int] = {}
    sums = dict.fromkeys(("constants", "step_data", "kv", "recurrent", "state"), 0)
    paged, recurrent = state_buffers(graph)
    for decl in graph.buffers.values():
        held = footprint.buffers.get(decl.name, 0) + footprint.mapped.get(decl.name, 0)
        if decl.kind is BufferKind.WEIGHT:
            weights[decl.dtype.name] = weights.get(decl.dtype.name, 0) + held
        elif decl.kind is not BufferKind.SCRATCH:
            sums[_part(decl, paged, recurrent)] += held
    state = sums["recurrent"] // (limits.slots * limits.slot_states)
    sums["recurrent"] += state * limits.saved_states
    return MemoryPlan(
        saved_states=limits.saved_states,
        slot_states=limits.slot_states,
        slots=limits.slots,
        context=limits.context,
        pages=limits.pages,
        kv_dtype=limits.kv_dtype.name,
        step_tokens=limits.step_tokens,
        step_rows=limits.step_rows,
        weights=weights,
        scratch=footprint.scratch,
        variants=footprint.variants,
        workspace=footprint.workspace,
        mapped=sum(footprint.mapped.values()),
        staging=footprint.staging,
        ring=footprint.ring,
        streamed=footprint.streamed,
        moved=footprint.moved,
        evictable=sum(footprint.mapped.values()) + footprint.on_disk,
        unified=unified,
        **sums,
    )


def state_buffers(graph: Graph) -> tuple[frozenset[str], frozenset[str]]:
    """The names of the KV pools and of the recurrent states, found by the ops that update them."""
    paged: set[str] = set()
    recurrent: set[str] = set()
    for node in graph.nodes:
        for operand in TABLE[node.opcode].operands:
            if operand.access is not Access.UPDATE or operand.name not in node.operands:
                continue
            buffer = node.operands[operand.name].buffer
            if node.opcode in RECURRENT_OPCODES:
                recurrent.add(buffer)
            elif operand.name == "kv":
                paged.add(buffer)
    return frozenset(paged), frozenset(recurrent)


def _part(decl: BufferDecl, paged: frozenset[str], recurrent: frozenset[str]) -> str:
    if decl.name in paged:
        return "kv"
    if decl.name in recurrent:
        return "recurrent"
    if decl.kind is BufferKind.STATE:
        return "state"
    return "constants" if decl.kind is BufferKind.CONSTANT else "step_data"


def longest_plan(
    plan_at: Callable[[int], MemoryPlan], longest: int, budget: int
) -> MemoryPlan | None:
    """The plan of the longest context of at most ``longest`` positions within ``budget`` bytes,
    None if there is none.

    ``plan_at`` gives the plan for a context in positions. Contexts are whole pages, or ``longest``.
    The returned plan is within the budget, and the plan with one page more is not."""
    pages = -(-longest // PAGE_TOKENS)

    def plan_of(count: int) -> MemoryPlan:
        return plan_at(min(count * PAGE_TOKENS, longest))

    too_long, high = plan_of(pages), pages
    if too_long.budgeted <= budget:
        return too_long
    fitting, low = plan_of(1), 1
    if fitting.budgeted > budget:
        return None
    # Memory grows almost linearly with the context, so interpolating between the two ends comes
    # close to the answer. Every third step halves the interval, in case it does not.
    guesses = 0
    while high - low > 1:
        guesses += 1
        slope = too_long.budgeted - fitting.budgeted
        step = (budget - fitting.budgeted) * (high - low) // slope
        middle = (high - low) // 2 if guesses % 3 == 0 else min(step, high - low - 1)
        count = low + max(1, middle)
        plan = plan_of(count)
        if plan.budgeted <= budget:
            fitting, low = plan, count
        else:
            too_long, high = plan, count
    return fitting
