"""Lowered steps that the tiers of a process share."""

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from accel.native.stored_steps import StepCache, StoredStep
from accel.packets.step import Schedule, Step
from contract.ir.inputs import InputLayout
from contract.ir.nodes import Graph
from contract.shape_key import ShapeKey


class StepsOfProcess(StepCache):
    """The cache of lowered steps, in memory. Most servers and engines of tests have the same few
    graphs, and lowering them would take most of their start."""

    steps: ClassVar[dict[Path | None, StoredStep]] = {}

    def of(
        self, graph: Graph, bucket: ShapeKey, inputs: InputLayout,
        lower: Callable[[], tuple[Step, Schedule]],
    ) -> StoredStep:  # fmt: skip
        """See ``StepCache``."""
        path = self._path(graph, bucket, inputs)
        if path not in self.steps:
            self.steps[path] = StoredStep.of(*lower(), inputs)
        return self.steps[path]

    def store(
        self, graph: Graph, bucket: ShapeKey, inputs: InputLayout, lowered: tuple[Step, Schedule]
    ) -> bool:
        """See ``StepCache``."""
        self.of(graph, bucket, inputs, lambda: lowered)
        return True
