"""A form of a graph with addresses: packets, and the memory its launches have to themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accel.cuda.arrange import group_rows
from accel.cuda.memory import Allocation
from accel.cuda.plan import PLAIN_LAYOUTS, Plan, PlannedLaunch, plain_ops
from accel.cuda.planning import LoweredBucket
from accel.packets.layouts import WeightLayout
from accel.packets.step import Step
from contract.ir.nodes import BufferDecl
from contract.shape_key import ShapeKey


@dataclass(frozen=True, slots=True)
class BoundBucket:
    """A form with addresses: what its launches are recorded from. Memory in ``kept`` is its own,
    ``workspace`` the address of what launches have from step to step, ``passing`` that of what they
    pass on within one. ``sampling`` is where among the inputs a step that may be short says how its
    row is sampled."""

    name: str
    bucket: ShapeKey
    plan: Plan
    packets: NDArray[np.void]
    kept: list[Allocation]
    workspace: int
    input_bytes: int
    outputs: Mapping[str, tuple[BufferDecl, Allocation]]
    sampling: int = 0
    passing: int = 0

    def workspace_of(self, launch: PlannedLaunch) -> int:
        """The address of the memory of a launch."""
        place = launch.workspace or 0
        if place < self.plan.passing_bytes:
            return self.passing + place
        return self.workspace + place - self.plan.own_start

    @property
    def gathers(self) -> list[PlannedLaunch]:
        """Launches that write to the memory of other devices."""
        return [launch for launch in self.plan.launches if launch.gathers]


def check_layouts(step: Step, packets: NDArray[np.void], plan: Plan) -> None:
    """Raise AssertionError for a tuned layout without a tuned kernel: it would be read wrongly."""
    for index in plain_ops(plan):
        layout = WeightLayout(packets["layout"][index])
        name = step.ops[index].name
        assert layout in PLAIN_LAYOUTS, f"no rule for {name} of weights arranged as {layout.name}"


def move_to_first_rows(lowered: LoweredBucket, packets: NDArray[np.void]) -> None:
    """Have products of a share of the rows begin there in weights that are whole."""
    for number, row in lowered.first_rows.items():
        place = lowered.step.ops[number].matrix
        layout = WeightLayout(packets["layout"][number])
        together = 1 if layout is WeightLayout.STORED else group_rows(layout)
        assert row % together == 0, f"row {row} is inside a group of {layout.name}"
        stride = int(packets["stride"][number][place])
        packets["operand"][number][place] += np.uint64(row // together * stride)
