"""Chooses the launches of a step: tuned kernels where a rule applies, else the plain kernel of each
op."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from accel.cuda.device import Device
from accel.cuda.gathers import with_gathers, word_bytes
from accel.cuda.program import Source, plain_source, tuned_source
from accel.cuda.registered import LAYOUT_RULES, RULES
from accel.cuda.runs import OPERANDS_OF_A_PACKET
from accel.cuda.step_table import PeerWorkspaces
from accel.cuda.tuned import Extent, KernelLaunch, Remaining, Replacement, last_reads
from accel.kernels.source import module_of
from accel.packets.layouts import WeightLayout
from accel.packets.packet import aligned
from accel.packets.step import Op, Tensor
from contract.ir.nodes import BufferDecl

GROUPS_PER_MULTIPROCESSOR = 8
"""Most work-groups for each multiprocessor in a launch of a plain kernel."""
WITH_LISTS = frozenset(
    (
        *("expert_router", "expert_gates", "expert_down", "expert_product", "expert_order"),
        *("expert_group_gates", "expert_group_downs", "expert_total"),
        *("expert_logits", "expert_choice", "expert_gather"),
    )
)
"""Kernels of blocks of experts, all of which find matrices by ``kernels/stack_matrices.h``."""
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

    def bound(
        self, packets: NDArray[np.void], stop: int, peers: PeerWorkspaces | None = None
    ) -> NDArray[np.uint8]:
        """The table with addresses; ``stop`` is the address of the word that ends a step, ``peers``
        the workspaces of devices that execute the launch too."""


@dataclass(frozen=True, slots=True)
class PlannedLaunch:
    """One launch, for ``count`` ops from index ``first`` on.

    ``workspace`` is its offset in the workspaces of the step, None for a plain kernel, which has
    none. A persistent launch has a ``table`` instead of packets. A launch that ``gathers`` accesses
    other devices; ``words`` is the offset in the workspaces of the words by which they meet."""

    source: Source
    entry: str
    grid: Extent
    block: Extent
    first: int
    count: int = 1
    shared_bytes: int = 0
    cooperative: bool = False
    workspace: int | None = None
    table: LaunchTable | None = None
    gathers: bool = False
    words: int = 0
    sends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ShortStep:
    """The launches that suffice where nothing changes the logits of a step's only row.

    The first ``launches`` and the ``last`` ones of the step suffice for a greedy row; a drawn row
    takes ``drawn`` as well. ``sampling`` is the record that says how the row is sampled."""

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
    of one replacement may access their operands in any order. ``together`` are the first and last
    levels that one launch executes: buffers used outside as well share no memory with anything in
    it. The first ``passing_bytes`` of the workspaces belong to replacements that store nothing from
    step to step. Steps of kind ``short`` need only some of the launches; those of kind ``long``
    have others."""

    launches: tuple[PlannedLaunch, ...]
    workspace_bytes: int
    levels: tuple[int, ...]
    together: tuple[tuple[int, int], ...] = ()
    passing_bytes: int = 0
    short: ShortStep | None = None
    long: LongStep | None = None

    @property
    def own_bytes(self) -> int:
        """Bytes of the workspaces that last from step to step."""
        return self.workspace_bytes - self.own_start

    @property
    def own_start(self) -> int:
        """Offset of those workspaces."""
        return aligned(self.passing_bytes) if self.passing_bytes else 0

    @property
    def memory_bytes(self) -> int:
        """Device memory in addition to that of the step: workspaces and tables."""
        tables = sum(aligned(one.table.nbytes) for one in self.launches if one.table is not None)
        return tables + (aligned(self.own_bytes) if self.own_bytes else 0)


def plan_launches(
    ops: Sequence[Op], device: Device, local: Collection[str] | None = None, sends: bool = False
) -> Plan:
    """The launches of all ops; each op has one launch, alone or in a replacement.

    Results that no later op reads need not be written if their buffer is ``local`` to the step;
    without ``local`` every buffer counts as local. If a launch ``sends``, kernels store what other
    devices need there, as far as they can."""
    last_read = last_reads(ops, local)
    found: list[tuple[int, Replacement | None]] = []
    index = 0
    while index < len(ops):
        left = Remaining(ops, index, last_read)
        replacement = _replacement(left, device)
        if replacement is not None and sends:
            replacement = with_gathers(replacement, left)
        found.append((index, replacement))
        index += 1 if replacement is None else replacement.ops
    passing = max((one.passing_bytes for _, one in found if one is not None), default=0)
    workspace = aligned(passing) if passing else 0
    launches: list[PlannedLaunch] = []
    levels: list[int] = []
    for level, (index, replacement) in enumerate(found):
        if replacement is None:
            launches.append(_plain(ops[index], index, device))
            levels.append(level)
            continue
        words_at = workspace
        if replacement.workspace_bytes:
            words_at += aligned(replacement.workspace_bytes)
        for launch in replacement.launches:
            offset = 0 if replacement.passing_bytes else workspace
            made = _tuned(launch, index, replacement.ops, offset)
            if launch.gathers:
                made = replace(made, words=words_at)
                words_at += aligned(word_bytes(launch.macros["PEERS"] + 1))
            launches.append(made)
        workspace = words_at
        levels += [level] * replacement.ops
    return Plan(tuple(launches), workspace, tuple(levels), passing_bytes=passing)


def sent_since(plan: Plan, ops: Sequence[Op]) -> dict[str, int]:
    """For each buffer that launches send to other devices, the level from which on others may write
    it here: that of the launch before in which devices met."""
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
    return PlannedLaunch(source, module.entry, (groups, 1, 1), (module.group_size, 1, 1), index)


def _tuned(launch: KernelLaunch, index: int, count: int, workspace: int) -> PlannedLaunch:
    x, y, z = launch.grid
    return PlannedLaunch(
        tuned_source(launch.file, {**launch.macros, "PACKET_COUNT": count}, launch.op),
        launch.entry,
        # A launch has at least one block; in a bucket of no tokens its kernel finds nothing to do.
        (max(1, x), max(1, y), max(1, z)),
        launch.block,
        index,
        count,
        launch.shared_bytes,
        workspace=workspace,
        gathers=launch.gathers,
        sends=launch.sends,
    )
