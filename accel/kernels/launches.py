"""Plans the launches of a step for the tiers whose devices run the kernels of this folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from accel.kernels.source import Module, Traits, module_of
from accel.packets.device_op import DeviceOp
from accel.packets.step import Op, OpSchedule
from accel.packets.work import work_of

MAX_GROUPS = 4096
"""Most work-groups of a launch, more than any device runs at a time."""
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class PlannedLaunch(Generic[K]):
    """The dispatch of one packet of ``op``; ``wait`` puts a barrier before it.

    ``work`` is in multiplications."""

    kernel: K
    op: DeviceOp
    groups: int
    wait: bool
    work: int


def launches_of(
    kernels: Callable[[Sequence[Module]], Mapping[Module, K]],
    ops: Sequence[Op],
    op_schedules: Sequence[OpSchedule],
    max_groups: int = MAX_GROUPS,
) -> list[PlannedLaunch[K]]:
    """The dispatch of each op of a step; ``kernels`` loads the kernels of modules."""
    modules = [module_of(op) for op in ops]
    loaded = kernels(modules)
    return [
        PlannedLaunch(
            loaded[module],
            op.device,
            op.launch_groups(module.group_size, max_groups),
            op_schedule.wait,
            work_of(op),
        )
        for module, op, op_schedule in zip(modules, ops, op_schedules, strict=True)
    ]


class KernelCache(ABC, Generic[K]):
    """The kernels of one device, made at their first use for the ``traits`` of the device.

    Hook a tier must give: ``_build_kernel``."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits
        self._kernels: dict[tuple[Module, Traits], K] = {}

    def kernels(self, modules: Iterable[Module]) -> dict[Module, K]:
        """The kernels of ``modules``."""
        return {module: self.kernel(module) for module in dict.fromkeys(modules)}

    def kernel(self, module: Module, traits: Traits | None = None) -> K:
        """The kernel of a module, for the device's traits or for other ``traits``."""
        key = module, traits or self.traits
        if key not in self._kernels:
            self._kernels[key] = self._build_kernel(*key)
        return self._kernels[key]

    @abstractmethod
    def _build_kernel(self, module: Module, traits: Traits) -> K:
        """Hook: a kernel that is not cached."""
