"""The base of tiers whose steps are recordings that hold the inputs of one step each."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from accel.kernels.arrange import PlaneArranger
from accel.kernels.launches import MAX_GROUPS, PlannedLaunch, launches_of
from accel.kernels.source import Module
from accel.packets.fused import fuse
from accel.packets.packet_tier import BoundStep, ExpectingMemory, PacketTier
from accel.packets.rules import ROW_PARTS, lower_graph
from accel.packets.schedule import schedule_levels
from accel.packets.step import Schedule, Step
from accel.packets.step_memory import StepAddresses
from accel.packets.submissions import RecordedSubmissions, Recordings, Slot
from accel.packets.tier import A, C
from contract.ir.nodes import Graph
from contract.shape_key import ShapeKey
from contract.tier import TierInfo


class ClosableSlot(Slot, Protocol):
    """A recording of a step."""

    def close(self) -> None:
        """Free the recording, which nothing submitted uses."""


R = TypeVar("R", bound=ClosableSlot)


class RecordedTier(PacketTier[A, Recordings[R], C]):
    """A tier that records the launches of a bucket once for each step in flight.

    ``kernels`` loads kernels, ``max_groups`` is the most work-groups of a launch.

    Hooks a tier must give in addition to those of BaseTier: ``_recording``."""

    def __init__(
        self,
        info: TierInfo,
        memory: ExpectingMemory[A],
        submissions: RecordedSubmissions[A, R, C],
        arranger: PlaneArranger[A],
        addresses: StepAddresses,
        kernels: Callable[[Sequence[Module]], Mapping[Module, Any]],
        max_groups: int = MAX_GROUPS,
    ) -> None:
        super().__init__(info, memory, submissions)
        self._arranger = arranger
        self._addresses = addresses
        self._kernels = kernels
        self._max_groups = max_groups

    @abstractmethod
    def _recording(
        self, name: str, launches: list[PlannedLaunch[Any]], packets: int, input_bytes: int
    ) -> R:
        """Hook: record the launches of graph ``name``, whose packets are at an address."""

    def _schedule(self, graph: Graph, bucket: ShapeKey) -> tuple[Step, Schedule]:
        step = fuse(lower_graph(graph, bucket, ROW_PARTS, self._info.name))
        return step, schedule_levels(step)

    def _record(self, bound: BoundStep[A]) -> Recordings[R]:
        ops, op_schedules = bound.step.ops, bound.schedule.op_schedules
        launches = launches_of(self._kernels, ops, op_schedules, self._max_groups)
        name, address, nbytes = bound.name, bound.stored.address, bound.input_bytes
        return Recordings(lambda: self._recording(name, launches, address, nbytes))

    def _discard(self, launch: Recordings[R]) -> None:
        for recording in launch.made:
            recording.close()

    def _reserve(self, shared: int, own: int, inputs: int) -> None:
        self._addresses.move(self._scratch_of(shared).address, 0)
