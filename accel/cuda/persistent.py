"""Joins consecutive launches of a plan into one persistent launch of ``kernels/step.cu``.

Phases are made from the launches that rules chose, in whatever family; launches that are no phases
stay. ``step_choice.py`` decides when launches are joined.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from accel.cuda.attention import TILE_WARPS
from accel.cuda.device import Device
from accel.cuda.packed_tiles import unit_bytes
from accel.cuda.phases import (
    AttentionPhase,
    Phase,
    ProductPhase,
    Readers,
    next_phase,
    readers_of,
)
from accel.cuda.plan import LongStep, Plan, PlannedLaunch
from accel.cuda.products import (
    BARRIER_BYTES,
    BLOCK_BYTES,
    CHUNK_UNITS,
    row_macros,
)
from accel.cuda.program import tuned_source
from accel.cuda.row_end import EndPhase, end_phase, short_step
from accel.cuda.runs import ABSENT
from accel.cuda.step_choice import MOST_TOKENS, Block, StepChoice
from accel.cuda.step_table import (
    HEAD,
    HEAD_BYTES,
    RECORD_BYTES,
    WORK_BYTES,
    Bound,
    PhaseBuffers,
)
from accel.packets.packet import aligned
from accel.packets.step import Op
from contract.dtypes import I12, WEIGHT_DTYPES

MOST_FORMATS = 4
STATE_BYTES = 256
"""Workspace before the parts: count of steps, count of finished blocks, the largest logit."""
RECORDS = 3
BY_ID = {dtype.ggml_id: dtype for dtype in WEIGHT_DTYPES}


@dataclass(frozen=True, slots=True)
class StepTable:
    """The phases of a launch before they have addresses. ``works_at`` is the offset in shared
    memory at which the ring's records of them begin."""

    phases: tuple[Phase, ...]
    formats: tuple[int, ...]
    slot_bits: tuple[int, ...]
    exchange: PhaseBuffers
    works_at: int
    end: EndPhase | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of ``bound``'s result."""
        return HEAD_BYTES + self._records * RECORD_BYTES

    @property
    def _records(self) -> int:
        return len(self.phases) + (self.end is not None)

    @property
    def exchange_at(self) -> int:
        """Offset of the banks in the workspace, after two blocks for parts that phases use in
        turn."""
        return aligned(STATE_BYTES) + 2 * self._parts_bytes

    @property
    def _parts_bytes(self) -> int:
        phases = (one for one in self.phases if isinstance(one, AttentionPhase))
        return max([0, *(one.parts_bytes for one in phases)])

    @property
    def workspace_bytes(self) -> int:
        """Bytes of state, counters and both banks."""
        return self.exchange_at + 2 * self.exchange.bank_bytes

    def bound(self, packets: NDArray[np.void], stop: int) -> NDArray[np.uint8]:
        """The bytes the kernel reads; ``stop`` is the address of the word that ends a step."""
        head = np.zeros(1, HEAD)
        head["phases"], head["stop"] = self._records, stop
        head["exchange_at"], head["bank_bytes"] = self.exchange_at, self.exchange.bank_bytes
        head["works_at"] = self.works_at
        table = [head]
        turn, bound = 0, Bound(packets, self.exchange)
        window: int | None = None
        for phase, slot_bits in zip(self.phases, self.slot_bits, strict=True):
            if isinstance(phase, ProductPhase):
                table.append(phase.record(bound, self.formats, slot_bits))
            else:
                record = phase.record(bound, aligned(STATE_BYTES) + turn * self._parts_bytes)
                before, window = window, int(record["window"][0])
                record["other_window"] = before not in (None, window)
                table.append(record)
                turn = 1 - turn
        if self.end is not None:
            table.append(self.end.record(bound))
        return np.concatenate([part.view(np.uint8) for part in table])


def compose(
    plan: Plan,
    ops: Sequence[Op],
    device: Device,
    choice: StepChoice,
    local: Collection[str] | None = None,
) -> Plan:
    """The plan with runs of phases joined into one launch each; ``local`` as in
    ``plan_launches``."""
    if not choice.blocks or device.capability < choice.least_capability:
        return plan
    launches: list[PlannedLaunch] = []
    together: list[tuple[int, int]] = []
    reading = readers_of(ops)
    short, long = None, None
    at, workspace = 0, plan.workspace_bytes
    while at < len(plan.launches):
        phases, count = _run(plan.launches[at:], ops, reading, choice.most_tokens, local)
        made = None
        if len(phases) >= choice.least_phases:
            end = _end(phases, ops)
            brief = _row_units(phases) < choice.least_row_units
            # The host knows the position only of steps that end here.
            if not brief or (choice.long_position and end is not None):
                made = _launch(phases, end, reading, device, choice.blocks, local, workspace)
            if made is not None and brief:
                long = LongStep(plan.launches, choice.long_position)
        if made is None:
            count = max(1, count)
            launches += plan.launches[at : at + count]
            at += count
            continue
        launches.append(made)
        assert isinstance(made.table, StepTable)
        if made.table.end is not None:
            short = short_step(made.table.end, len(launches), plan.launches[at + count :])
        workspace += aligned(made.table.workspace_bytes)
        together.append((plan.levels[made.first], plan.levels[made.first + made.count - 1]))
        at += count
    return replace(
        plan,
        launches=tuple(launches),
        workspace_bytes=workspace,
        together=tuple(together),
        short=short,
        long=long,
    )


def _row_units(phases: Sequence[Phase]) -> int:
    """Units of the longest row that is normalized."""
    normed = (one for one in phases if isinstance(one, ProductPhase) and one.norm)
    return max([0, *(phase.units for phase in normed)])


def _end(phases: Sequence[Phase], ops: Sequence[Op]) -> EndPhase | None:
    """The end of the step, if the last phase computes the logits of its only row."""
    last = phases[-1]
    if not isinstance(last, ProductPhase) or any(phase.tokens != 1 for phase in phases):
        return None
    behind = phases[0].first + sum(phase.length for phase in phases)
    return end_phase(ops, behind, last.writes[0].tensor)


def _run(
    launches: Sequence[PlannedLaunch],
    ops: Sequence[Op],
    reading: Readers,
    most_tokens: int,
    local: Collection[str] | None,
) -> tuple[list[Phase], int]:
    """As many phases as the launches begin with, and the number of those launches."""
    phases: list[Phase] = []
    at = 0
    while (
        at < len(launches)
        and (found := next_phase(launches[at : at + 2], ops, reading)) is not None
    ):
        phase, count = found
        if phase.tokens > most_tokens or (local is not None and phase.dropped - set(local)):
            break
        if not _fits(phases, phase):
            break
        phases.append(phase)
        at += count
    return phases, at


def _fits(phases: Sequence[Phase], phase: Phase) -> bool:
    """Whether one kernel can compute all phases: few formats, heads of one width."""
    every = (*phases, phase)
    formats = {dtype for one in every for dtype in one.formats}
    widths = {one.head_dim for one in every} - {0}
    return len(formats) <= MOST_FORMATS and len(widths) <= 1


@dataclass(frozen=True, slots=True)
class _Shape:
    """A block that fits: warps, ring slots of each, groups of warps with a tile each, bits of the
    tile slots of each phase, the offset of its tables, and all its shared memory."""

    warps: int
    slots: int
    groups: int
    slot_bits: tuple[int, ...]
    works_at: int
    shared_bytes: int


def _fitting(
    phases: Sequence[Phase],
    records: int,
    formats: Sequence[int],
    tokens: int,
    device: Device,
    blocks: Sequence[Block],
) -> _Shape | None:
    """The first of ``blocks`` with room for ``phases``; there are ``records`` records, the step's
    end included."""
    slot = CHUNK_UNITS * max(unit_bytes(BY_ID[dtype]) for dtype in formats)
    attentions = [phase for phase in phases if isinstance(phase, AttentionPhase)]
    for warps, slots, groups in _shapes(blocks):
        ring = warps * slots * (slot + BARRIER_BYTES) + BLOCK_BYTES
        tables = _sixteenths(records * WORK_BYTES) + RECORDS * RECORD_BYTES
        tables += (warps + 2) * BARRIER_BYTES if attentions else 0
        room = device.shared_bytes - _sixteenths(ring) - tables
        slot_bits = tuple(_slot_bits(phase, tokens, room) for phase in phases)
        needed = max(
            *(one.memory_bytes(warps, groups) for one in attentions),
            *(
                phase.memory_bytes(tokens, bits)
                for phase, bits in zip(phases, slot_bits, strict=True)
                if isinstance(phase, ProductPhase)
            ),
            0,
        )
        if needed <= room:
            works_at = _sixteenths(ring + needed)
            return _Shape(warps, slots, groups, slot_bits, works_at, works_at + tables)
    return None


def _launch(
    phases: list[Phase],
    end: EndPhase | None,
    reading: Readers,
    device: Device,
    blocks: Sequence[Block],
    local: Collection[str] | None,
    workspace: int,
) -> PlannedLaunch | None:
    products = [phase for phase in phases if isinstance(phase, ProductPhase)]
    if not products:
        return None
    formats = tuple(dict.fromkeys(dtype for phase in products for dtype in phase.formats))
    tokens = 1 if all(phase.tokens == 1 for phase in phases) else MOST_TOKENS
    shape = _fitting(phases, len(phases) + (end is not None), formats, tokens, device, blocks)
    if shape is None:
        return None
    first = phases[0].first
    count = sum(phase.length for phase in phases)
    exchange = _exchange(phases, reading, first + count, local)
    table = StepTable(tuple(phases), formats, shape.slot_bits, exchange, shape.works_at, end)
    macros = _macros(phases, table, shape, tokens)
    return PlannedLaunch(
        tuned_source("step.cu", macros),
        "step_phases",
        (device.multiprocessors, 1, 1),
        (shape.warps * 32, 1, 1),
        first,
        count,
        shape.shared_bytes,
        True,
        workspace,
        table,
    )


def _macros(
    phases: Sequence[Phase], table: StepTable, shape: _Shape, tokens: int
) -> dict[str, int]:
    """The macros of ``step.cu``."""
    formats = table.formats
    products = [phase for phase in phases if isinstance(phase, ProductPhase)]
    attentions = [phase for phase in phases if isinstance(phase, AttentionPhase)]
    normed = max([0, *(phase.row_units(shape.warps) for phase in products if phase.norm)])
    plain = max([0, *(phase.row_units(shape.warps) for phase in products if not phase.norm)])
    activations = {one.activation for one in products if one.activation is not None}
    return {
        **{f"FORMAT{i}": formats[i] if i < len(formats) else -1 for i in range(MOST_FORMATS)},
        "WARPS": shape.warps,
        "SLOTS": shape.slots,
        "TOKENS": tokens,
        "DTYPE": I12.ggml_id,
        "HEAD_DIM": max(phase.head_dim for phase in phases),
        "TILE_GROUPS": shape.groups,
        "WHOLE_TURN": int(all(one.turns_halves for one in attentions)),
        "ACTIVATION": activations.pop() if len(activations) == 1 else ABSENT,
        "BIASED": int(any(phase.biased for phase in products)),
        "READ_OUTSIDE": int(bool(table.exchange.outside)),
        "ENDS": int(table.end is not None),
        **row_macros(normed, plain, tokens),
        "PACKET_COUNT": 1,
    }


def _exchange(
    phases: Sequence[Phase], reading: Readers, end: int, local: Collection[str] | None
) -> PhaseBuffers:
    """The buffers that one phase writes and another reads. Later ops, from index ``end`` on, may
    read them too."""
    written: dict[str, int] = {}
    read: set[str] = set()
    for phase in phases:
        read |= {operand.tensor.buffer for operand in phase.reads} & written.keys()
        for y in phase.writes:
            written[y.tensor.buffer] = phase.tokens * y.tensor.stride * 4
    offsets, size = {}, 0
    for name in sorted(read):
        offsets[name] = size
        size += aligned(written[name])
    outside = {
        name
        for name in read
        if (local is not None and name not in local) or max(reading[name]) >= end
    }
    return PhaseBuffers(offsets, frozenset(outside), size)


def _slot_bits(phase: Phase, tokens: int, room: int) -> int:
    if isinstance(phase, AttentionPhase):
        return 0
    fitting = [bits for bits in phase.slot_bits() if phase.memory_bytes(tokens, bits) <= room]
    return fitting[0] if fitting else 0


def _shapes(blocks: Sequence[Block]) -> Iterator[tuple[int, int, int]]:
    """Warps, slots and tiles of attention in progress at once, to try in turn."""
    for warps, slots in blocks:
        for groups in range(warps // TILE_WARPS, 0, -1):
            yield warps, slots, groups


def _sixteenths(nbytes: int) -> int:
    return -(-nbytes // 16) * 16
