"""Joins consecutive launches of a plan into one persistent launch of ``kernels/step.cu``.

Phases are made from the launches that rules chose, in whatever family; launches that are no phases
stay. ``step_choice.py`` decides when launches are joined. Several devices join all phases of a step
or none: their launches then exchange floats themselves, and the step has no ALL_GATHER."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from accel.cuda.attention import TILE_WARPS
from accel.cuda.device import Device
from accel.cuda.packed_tiles import unit_bytes
from accel.cuda.phase_runs import MAX_FORMATS, PhaseRun, only_synchronizes, phase_run
from accel.cuda.phases import AttentionPhase, Phase, ProductPhase, Readers, readers_of
from accel.cuda.plan import LongStep, Plan, PlannedLaunch
from accel.cuda.products import BARRIER_BYTES, BLOCK_BYTES, CHUNK_UNITS, row_macros
from accel.cuda.program import tuned_source
from accel.cuda.row_end import EndPhase, short_step
from accel.cuda.runs import ABSENT
from accel.cuda.step_choice import MAX_TOKENS, Block, StepChoice
from accel.cuda.step_table import (
    HEAD,
    HEAD_BYTES,
    MAX_PEERS,
    PEER_DEVICES,
    RECORD_BYTES,
    WORK_BYTES,
    Bound,
    PeerWorkspaces,
    PhaseBuffers,
)
from accel.packets.packet import aligned
from accel.packets.step import Op
from contract.arrays import Bytes, Records
from contract.dtypes import I12, WEIGHT_DTYPES

STATE_BYTES = 256
"""Workspace before the parts: count of steps, count of finished blocks, the largest logit, and the
steps that devices have begun."""
BANKS, SHARED_BANKS = 2, 4
"""Banks of exchanged floats on one device, and on each of several, see ``kernels/exchange.h``."""
RECORDS = 3
BY_ID = {dtype.ggml_id: dtype for dtype in WEIGHT_DTYPES}


@dataclass(frozen=True, slots=True)
class StepTable:
    """A LaunchTable: the phases of a launch before they have addresses. ``works_at`` is the offset
    in shared memory at which the ring's records of them begin. The launch is ``shared`` if several
    devices execute it together."""

    phases: tuple[Phase, ...]
    formats: tuple[int, ...]
    slot_bits: tuple[int, ...]
    exchange: PhaseBuffers
    works_at: int
    end: EndPhase | None = None
    shared: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of ``bound``'s result."""
        return self._peers_at + (PEER_DEVICES.itemsize if self.shared else 0)

    @property
    def layout(self) -> tuple[object, ...]:
        exchange = self.exchange
        return self.exchange_at, exchange.bank_bytes, dict(exchange.offsets), self._records

    @property
    def _peers_at(self) -> int:
        return HEAD_BYTES + self._records * RECORD_BYTES

    @property
    def banks(self) -> int:
        """Banks of exchanged floats."""
        return SHARED_BANKS if self.shared else BANKS

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
        """Bytes of state, counters and all banks."""
        return self.exchange_at + self.banks * self.exchange.bank_bytes

    def bound(self, packets: Records, stop: int, peers: PeerWorkspaces | None = None) -> Bytes:
        assert (peers is not None) == self.shared
        head = np.zeros(1, HEAD)
        head["phases"], head["stop"] = self._records, stop
        head["exchange_at"], head["bank_bytes"] = self.exchange_at, self.exchange.bank_bytes
        head["works_at"], head["banks"] = self.works_at, self.banks
        head["peers_at"] = self._peers_at
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
        if peers is not None:
            table.append(peers.record())
        return np.concatenate([part.view(np.uint8) for part in table])


def compose(
    plan: Plan,
    ops: Sequence[Op],
    device: Device,
    choice: StepChoice,
    local: Collection[str] | None = None,
    devices: int = 1,
) -> Plan:
    """The plan with runs of phases joined into one launch each; ``local`` as in
    ``plan_launches``. Of a step that ``devices`` devices share it joins all phases or none."""
    if not choice.blocks or device.capability < choice.min_capability:
        return plan
    if device.mps_enabled and not choice.with_mps:
        return plan
    if devices > 1:
        return plan if devices > MAX_PEERS + 1 else _shared(plan, ops, device, choice, local)
    reading = readers_of(ops)
    launches: list[PlannedLaunch] = []
    together: list[tuple[int, int]] = []
    short, long = None, None
    at, workspace = 0, plan.workspace_bytes
    while at < len(plan.launches):
        run = phase_run(plan.launches[at:], ops, reading, choice.max_tokens, local)
        made = None
        if len(run.phases) >= choice.min_phases:
            brief = run.longest_row < choice.min_row_units
            # The host knows the position only of steps that end here.
            if not brief or (choice.long_position and run.end is not None):
                made = _launch(run, reading, device, choice.blocks, local, workspace)
            if made is not None and brief:
                long = LongStep(plan.launches, choice.long_position)
        if made is None:
            count = max(1, run.launches)
            launches += plan.launches[at : at + count]
            at += count
            continue
        launches.append(made)
        assert isinstance(made.table, StepTable)
        at += run.launches
        if made.table.end is not None:
            short = short_step(made.table.end, len(launches), plan.launches[at:])
        workspace += aligned(made.table.workspace_bytes)
        together.append((plan.levels[made.first], plan.levels[made.first + made.count - 1]))
    return replace(
        plan,
        launches=tuple(launches),
        workspace_bytes=workspace,
        joined_levels=tuple(together),
        short=short,
        long=long,
    )


def _shared(
    plan: Plan, ops: Sequence[Op], device: Device, choice: StepChoice, local: Collection[str] | None
) -> Plan:
    """The plan with one launch that several devices execute together, if nothing else is gathered:
    they then wait for each other nowhere else."""
    reading = readers_of(ops)
    starts = (
        (at, phase_run(plan.launches[at:], ops, reading, choice.max_tokens, local))
        for at in range(len(plan.launches))
    )
    front, run = next((found for found in starts if found[1].phases), (0, PhaseRun()))
    behind = plan.launches[front + run.launches :]
    before = tuple(one for one in plan.launches[:front] if not only_synchronizes(one, ops))
    if any(one.gathers for one in (*before, *behind)):
        return plan
    if len(run.phases) < choice.min_phases or not run.is_shared(reading):
        return plan
    made = _launch(run, reading, device, choice.blocks, local, plan.workspace_bytes, shared=True)
    if made is None or run.end is None:
        return plan
    assert isinstance(made.table, StepTable)
    return replace(
        plan,
        launches=(*before, made, *behind),
        workspace_bytes=plan.workspace_bytes + aligned(made.table.workspace_bytes),
        joined_levels=((plan.levels[run.first], plan.levels[run.stop - 1]),),
        short=short_step(run.end, len(before) + 1, behind),
    )


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
    shared: bool,
) -> _Shape | None:
    """The first of ``blocks`` with room for ``phases``; there are ``records`` records, the step's
    end included, and of a ``shared`` launch the other devices' addresses."""
    slot = CHUNK_UNITS * max(unit_bytes(BY_ID[dtype]) for dtype in formats)
    attentions = [phase for phase in phases if isinstance(phase, AttentionPhase)]
    for warps, slots, groups in _shapes(blocks):
        ring = warps * slots * (slot + BARRIER_BYTES) + BLOCK_BYTES
        tables = _sixteenths(records * WORK_BYTES) + RECORDS * RECORD_BYTES
        tables += (warps + 2) * BARRIER_BYTES if attentions else 0
        tables += PEER_DEVICES.itemsize if shared else 0
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
    run: PhaseRun,
    reading: Readers,
    device: Device,
    blocks: Sequence[Block],
    local: Collection[str] | None,
    workspace: int,
    shared: bool = False,
) -> PlannedLaunch | None:
    phases, end = run.phases, run.end
    products = [phase for phase in phases if isinstance(phase, ProductPhase)]
    if not products:
        return None
    formats = tuple(dict.fromkeys(dtype for phase in products for dtype in phase.formats))
    tokens = 1 if all(phase.tokens == 1 for phase in phases) else MAX_TOKENS
    records = len(phases) + (end is not None)
    shape = _fitting(phases, records, formats, tokens, device, blocks, shared)
    if shape is None:
        return None
    whole = bool(_row_macros(products, shape.warps, tokens)["WHOLE_ROWS"])
    if any(phase.turned for phase in products) and not whole:
        return None
    exchange = run.exchange(reading, local)
    table = StepTable(phases, formats, shape.slot_bits, exchange, shape.works_at, end, shared)
    return PlannedLaunch(
        tuned_source("step.cu", _macros(phases, table, shape, tokens)),
        "step_phases",
        (device.multiprocessors, 1, 1),
        shape.warps * 32,
        run.first,
        run.stop - run.first,
        shape.shared_bytes,
        True,
        workspace,
        table,
        shared,
    )


def _macros(
    phases: Sequence[Phase], table: StepTable, shape: _Shape, tokens: int
) -> dict[str, int]:
    """The macros of ``step.cu``."""
    formats = table.formats
    products = [phase for phase in phases if isinstance(phase, ProductPhase)]
    attentions = [phase for phase in phases if isinstance(phase, AttentionPhase)]
    activations = {one.activation for one in products if one.activation is not None}
    return {
        **{f"FORMAT{i}": formats[i] if i < len(formats) else -1 for i in range(MAX_FORMATS)},
        "WARPS": shape.warps,
        "SLOTS": shape.slots,
        "TOKENS": tokens,
        "DTYPE": (attentions[0].dtype if attentions else I12).ggml_id,
        "HEAD_DIM": max(phase.head_dim for phase in phases),
        "TILE_GROUPS": shape.groups,
        "WHOLE_TURN": int(all(one.turns_halves for one in attentions)),
        "ACTIVATION": activations.pop() if len(activations) == 1 else ABSENT,
        "BIASED": int(any(phase.biased for phase in products)),
        "READ_OUTSIDE": int(bool(table.exchange.outside)),
        "ENDS": int(table.end is not None),
        "SHARED_STEP": int(table.shared),
        **_row_macros(products, shape.warps, tokens),
        "PACKET_COUNT": 1,
    }


def _row_macros(products: Sequence[ProductPhase], warps: int, tokens: int) -> dict[str, int]:
    normed = max([0, *(phase.row_units(warps) for phase in products if phase.norm)])
    plain = max([0, *(phase.row_units(warps) for phase in products if not phase.norm)])
    return row_macros(normed, plain, tokens)


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
