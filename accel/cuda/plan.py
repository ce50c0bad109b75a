"""Chooses the launches of a step: tuned kernels where a rule applies, else the plain kernel of each
op."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from accel.cuda.device import Device
from accel.cuda.gathers import barrier_bytes, with_gathers
from accel.cuda.program import Source, plain_source, tuned_source
from accel.cuda.registered import LAYOUT_RULES, RULES
from accel.cuda.runs import OPERANDS_OF_A_PACKET
from accel.cuda.step_table import PeerWorkspaces
from accel.cuda.tuned import Extent, KernelLaunch, Remaining, Replacement, last_reads
from accel.kernels.source import module_of
from accel.packets.layouts import WeightLayout
from accel.packets.packet import aligned
from accel.packets.step import Op, Tensor
from contract.arrays import Bytes, Records
from contract.ir.nodes import BufferDecl

GROUPS_PER_MULTIPROCESSOR = 8
"""Most work-groups for each multiprocessor in a launch of a plain kernel."""
STACK_KERNELS = frozenset(
    (
        *("expert_router", "expert_gates", "expert_down", "expert_product", "expert_order"),
        "expert_token",
        *("expert_group_gates", "expert_group_downs", "expert_total"),
        *("expert_logits", "expert_choice", "expert_gather"),
    )
)
"""Entries of kernels that look up an expert's matrix in a list of addresses
(``kernels/stack_matrices.h``). Only for them may experts be outside of the device's memory."""
PLAIN_LAYOUTS = (WeightLayout.STORED, WeightLayout.PLANES)
"""The layouts that plain kernels read."""


class LaunchTable(Protocol):
    """Tables that a persistent launch reads instead of packets."""

    @property
    def nbytes(self) -> int:
        """Size of the table on the device, in bytes."""

    @property
    def layout(self) -> object:
        """What is equal for tables of launches that several devices can execute together."""

    def bound(self, packets: Records, stop: int, peers: PeerWorkspaces | None = None) -> Bytes:
        """The table with addresses; ``stop`` is the address of the word that ends a step, ``peers``
        the workspaces of devices that execute the launch too."""


@dataclass(frozen=True, slots=True)
class PlannedLaunch:
    """One launch, for ``count`` ops from index ``first`` on.

    ``workspace`` is its offset in the workspaces of the step, None for a plain kernel, which has
    none. Blocks of a ``cooperative`` one all run at the same time, and wait for each other until
    the host ends them. A persistent launch has a ``table`` instead of packets. A launch that
    ``gathers`` accesses the memory of other devices: ``barrier`` is the offset in the workspaces of
    the words by which they meet, ``sends`` are the operands it writes there, as packet times
    OPERANDS_OF_A_PACKET plus operand."""

    source: Source
    entry: str
    grid: Extent
    threads: int
    first: int
    count: int = 1
    shared_bytes: int = 0
    cooperative: bool = False
    workspace: int | None = None
    table: LaunchTable | None = None
    gathers: bool = False
    barrier: int = 0
    sends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ShortStep:
    """The launches that suffice for a step of one row whose logits are sampled as they are, without
    penalties, biases or masks.

    A greedy row needs the first ``launches`` and the ``last`` ones of the step; one sampled with a
    temperature needs ``drawn`` between them. ``sampling`` is the row's sampling record."""

    launches: int
    drawn: tuple[PlannedLaunch, ...]
    sampling: Tensor
    last: int = 0


@dataclass(frozen=True, slots=True)
class LongStep:
    """All ``launches`` of a step that samples this ``position`` or a later one."""

    launches: tuple[PlannedLaunch, ...]
    position: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The launches of a step in order, and the bytes of all workspaces together.

    ``levels`` has, for each op, the number of the plain kernel or replacement that executes it: ops
    of one replacement may access their operands in any order. ``joined_levels`` has, for each
    persistent launch, its first and its last level: buffers used outside as well share no memory
    with anything in it. The contents of the first ``transient_bytes`` of the workspaces are not
    needed by later steps. Steps of kind ``short`` need only some of the launches; those of kind
    ``long`` have others."""

    launches: tuple[PlannedLaunch, ...]
    workspace_bytes: int
    levels: tuple[int, ...]
    joined_levels: tuple[tuple[int, int], ...] = ()
    transient_bytes: int = 0
    short: ShortStep | None = None
    long: LongStep | None = None

    @property
    def lasting_bytes(self) -> int:
        """Bytes of the workspaces whose contents last from step to step."""
        return self.workspace_bytes - self.lasting_start

    @property
    def lasting_start(self) -> int:
        """Offset of those workspaces."""
        return aligned(self.transient_bytes) if self.transient_bytes else 0

    @property
    def memory_bytes(self) -> int:
        """Device memory in addition to that of the step: workspaces and tables."""
        tables = sum(aligned(one.table.nbytes) for one in self.launches if one.table is not None)
        return tables + (aligned(self.lasting_bytes) if self.lasting_bytes else 0)


def plan_launches(
    ops: Sequence[Op], device: Device, local: Collection[str] | None = None, sends: bool = False
) -> Plan:
    """The launches of all ops; each op has one launch, alone or in a replacement.

    Results that no later op reads need not be written if their buffer is ``local`` to the step;
    without ``local`` every buffer counts as local. With ``sends`` kernels that can also store the
    results that other devices need in the memory of those devices."""
    last_read = last_reads(ops, local)
    chosen: list[tuple[int, Replacement | None]] = []
    index = 0
    while index < len(ops):
        remaining = Remaining(ops, index, last_read)
        replacement = _replacement(remaining, device)
        if replacement is not None and sends:
            replacement = with_gathers(replacement, remaining)
        chosen.append((index, replacement))
        index += 1 if replacement is None else replacement.ops
    transient = max((one.transient_bytes for _, one in chosen if one is not None), default=0)
    workspace = aligned(transient) if transient else 0
    launches: list[PlannedLaunch] = []
    levels: list[int] = []
    for level, (index, replacement) in enumerate(chosen):
        if replacement is None:
            launches.append(_plain(ops[index], index, device))
            levels.append(level)
            continue
        barrier_at = workspace
        if replacement.workspace_bytes:
            barrier_at += aligned(replacement.workspace_bytes)
        for launch in replacement.launches:
            offset = 0 if replacement.transient_bytes else workspace
            made = _tuned(launch, index, replacement.ops, offset)
            if launch.gathers:
                made = replace(made, barrier=barrier_at)
                barrier_at += aligned(barrier_bytes(launch.macros["PEERS"] + 1))
            launches.append(made)
        workspace = barrier_at
        levels += [level] * replacement.ops
    return Plan(tuple(launches), workspace, tuple(levels), transient_bytes=transient)


def sent_since(plan: Plan, ops: Sequence[Op]) -> dict[str, int]:
    """For each buffer that launches send, the first level at which other devices may write it in
    this device's memory: that of the last launch before in which the devices met."""
    since: dict[str, int] = {}
    before = 0
    for launch in plan.launches:
        if launch.gathers and launch.table is None:
            for send in launch.sends:
                number, index = divmod(send, OPERANDS_OF_A_PACKET)
                tensor = ops[launch.first + number].operands[index]
                assert tensor is not None
                since.setdefault(tensor.buffer, before)
            before = plan.levels[launch.first]
    return since


def plain_ops(plan: Plan) -> list[int]:
    """Indices of the ops that plain kernels execute."""
    return [launch.first for launch in plan.launches if launch.workspace is None]


def layout_of(decl: BufferDecl, device: Device) -> WeightLayout:
    """The layout of a quantized matrix on ``device``."""
    found = (rule(decl, device) for rule in LAYOUT_RULES)
    return next((layout for layout in found if layout is not None), WeightLayout.PLANES)


def sources_of(plan: Plan) -> Iterable[Source]:
    """Every source that has to be compiled."""
    drawn = () if plan.short is None else plan.short.drawn
    others = () if plan.long is None else plan.long.launches
    return (launch.source for launch in (*plan.launches, *drawn, *others))


def _replacement(ops: Remaining, device: Device) -> Replacement | None:
    for rule in RULES:
        if (replacement := rule(ops, device)) is not None:
            assert 0 < replacement.ops <= len(ops)
            return replacement
    return None


def _plain(op: Op, index: int, device: Device) -> PlannedLaunch:
    module = module_of(op)
    groups = op.launch_groups(module.group_size, device.multiprocessors * GROUPS_PER_MULTIPROCESSOR)
    source = plain_source(module)
    return PlannedLaunch(source, module.entry, (groups, 1, 1), module.group_size, index)


def _tuned(launch: KernelLaunch, index: int, count: int, workspace: int) -> PlannedLaunch:
    # A launch has at least one block; in a bucket of no tokens its kernel finds nothing to do.
    x, y, z = (max(1, blocks) for blocks in (*launch.grid, 1, 1)[:3])
    return PlannedLaunch(
        tuned_source(launch.file, {**launch.macros, "PACKET_COUNT": count}, launch.op),
        launch.entry,
        (x, y, z),
        launch.threads,
        index,
        count,
        launch.shared_bytes,
        launch.waits,
        workspace,
        gathers=launch.gathers,
        sends=launch.sends,
    )
