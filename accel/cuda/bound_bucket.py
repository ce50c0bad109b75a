"""A lowered shape bucket with addresses: packets, and memory that belongs to its launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from accel.cuda.arrange import group_rows
from accel.cuda.launcher import Branch
from accel.cuda.memory import Allocation
from accel.cuda.plan import PLAIN_LAYOUTS, Plan, PlannedLaunch, plain_ops
from accel.cuda.planning import LoweredBucket
from accel.packets.layouts import WeightLayout
from accel.packets.step import Step
from contract.arrays import Records
from contract.ir.nodes import BufferDecl
from contract.shape_key import ShapeKey


@dataclass(frozen=True, slots=True)
class BoundBucket:
    """A shape bucket with addresses, from which its launches are recorded.

    It owns the memory in ``allocations``. ``workspace`` is the address of memory that launches use
    from step to step, ``transient`` of the workspaces whose contents no later step needs.
    ``sampling`` is the offset in the inputs of the record that says how the row of a short step is
    sampled. ``branch`` copies streamed weights."""

    name: str
    bucket: ShapeKey
    plan: Plan
    packets: Records
    allocations: list[Allocation]
    workspace: int
    input_bytes: int
    outputs: Mapping[str, tuple[BufferDecl, Allocation]]
    sampling: int = 0
    transient: int = 0
    branch: Branch | None = None

    def workspace_of(self, launch: PlannedLaunch) -> int:
        """The address of the workspace of a launch."""
        offset = launch.workspace or 0
        if offset < self.plan.transient_bytes:
            return self.transient + offset
        return self.workspace + offset - self.plan.lasting_start

    def barrier_of(self, launch: PlannedLaunch) -> int:
        """The address of the words by which devices meet in a launch that gathers."""
        return self.workspace + launch.barrier - self.plan.lasting_start

    @property
    def gathers(self) -> list[PlannedLaunch]:
        """Launches that write to the memory of other devices, in order."""
        return [launch for launch in self.plan.launches if launch.gathers]


def check_layouts(step: Step, packets: Records, plan: Plan) -> None:
    """Raise AssertionError if a plain kernel would read a tuned layout, which it cannot."""
    for index in plain_ops(plan):
        layout = WeightLayout(packets["layout"][index])
        name = step.ops[index].name
        assert layout in PLAIN_LAYOUTS, f"no rule for {name} of weights arranged as {layout.name}"


def move_to_first_rows(lowered: LoweredBucket, packets: Records) -> None:
    """Point products of a share of the rows at their first row in weights that are whole."""
    for number, row in lowered.first_rows.items():
        matrix = lowered.step.ops[number].matrix
        layout = WeightLayout(packets["layout"][number])
        together = 1 if layout is WeightLayout.STORED else group_rows(layout)
        assert row % together == 0, f"row {row} is inside a group of {layout.name}"
        stride = int(packets["stride"][number][matrix])
        packets["operand"][number][matrix] += np.uint64(row // together * stride)
