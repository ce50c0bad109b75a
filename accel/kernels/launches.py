"""Plans the launches of a step for the tiers whose devices run the kernels of this folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from accel.kernels.source import Module, module_of
from accel.packets.device_op import DeviceOp
from accel.packets.step import Op, Placement
from accel.packets.work import work_of

MOST_GROUPS = 4096
"""Most work-groups of a launch, more than any device runs at a time."""
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class PlannedLaunch(Generic[K]):
    """The dispatch of one packet of ``op``; ``wait`` puts a barrier before it.

    ``work`` is in multiplications.
    """

    kernel: K
    op: DeviceOp
    groups: int
    wait: bool
    work: int


def launches_of(
    kernels: Callable[[Sequence[Module]], Mapping[Module, K]],
    ops: Sequence[Op],
    placements: Sequence[Placement],
    most_groups: int = MOST_GROUPS,
) -> list[PlannedLaunch[K]]:
    """The dispatch of each op of a step; ``kernels`` loads the kernels of modules."""
    modules = [module_of(op) for op in ops]
    loaded = kernels(modules)
    return [
        PlannedLaunch(
            loaded[module],
            op.device,
            op.launch_groups(module.group_size, most_groups),
            placement.wait,
            work_of(op),
        )
        for module, op, placement in zip(modules, ops, placements, strict=True)
    ]
