"""Records a bucket's launches with their arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from accel.cuda.bound_bucket import BoundBucket
from accel.cuda.gathers import addresses_of, others_argument
from accel.cuda.launcher import BoundLaunch, LaunchShape, Recording
from accel.cuda.memory import Allocation, Memory
from accel.cuda.plan import PlannedLaunch
from accel.cuda.runtime import Runtime
from accel.cuda.step_table import PeerWorkspaces
from accel.cuda.submissions import RecordedBucket, ShortRecordings
from accel.packets.step_memory import StepAddresses

PeerBucket = tuple[StepAddresses, BoundBucket]
"""The addresses of another device's step memory, and the same bucket there."""


def recorded_bucket(
    runtime: Runtime,
    bound: BoundBucket,
    addresses: StepAddresses,
    device: int,
    peers: Sequence[PeerBucket] = (),
) -> RecordedBucket:
    """The launches of ``bound`` on device number ``device`` of those that share a step.

    The bucket's own memory is freed with the recording. Raises OutOfMemory and CudaError."""
    memory, packets = runtime.memory, bound.packets
    launches = []
    number = -1
    plan = bound.plan
    short, long = plan.short, plan.long
    drawn = () if short is None else short.drawn
    later = () if long is None else long.launches
    for launch in (*plan.launches, *drawn, *later):
        replaced = packets[launch.first : launch.first + launch.count]
        own: tuple[np.generic | Callable[[], np.generic], ...] = (np.void(replaced.tobytes()),)
        if launch.gathers or launch.sends:
            # What sends and does not gather belongs to the next launch that does.
            next_one = number + 1
            own = (
                partial(_packets_with_others, runtime, (addresses, bound), next_one, device, peers),
            )
        number += launch.gathers
        if launch.table is not None:
            workspaces = _peer_workspaces(bound, number, device, peers) if launch.gathers else None
            table = launch.table.bound(packets, runtime.stop.address, workspaces)
            bound.allocations.append(memory.adopt(f"phases of {bound.name}", table))
            own = (np.uint64(bound.allocations[-1].address),)
        if launch.workspace is not None:
            own = (*own, np.uint64(bound.workspace_of(launch)))
        if launch.cooperative and launch.table is None:
            own = (*own, np.uint64(runtime.stop.address))
        shape, overlaps = _shape(runtime, launch), launch.table is None
        launches.append(BoundLaunch(shape, launch.cooperative, own, overlaps))
    count, behind = len(plan.launches), len(plan.launches) + len(drawn)
    recording = Recording(
        runtime.context,
        launches[:count],
        addresses,
        runtime.programmatic,
        runtime.graphs,
        [theirs for theirs, _ in peers],
        bound.branch,
    )
    memory.context.when_gone(recording, _give_back, memory, bound.allocations)
    if short is None:
        return RecordedBucket(recording, None)
    first, last = launches[: short.launches], launches[count - short.last : count]
    found = ShortRecordings(
        recording.with_launches(first + last),
        recording.with_launches(first + launches[count:behind] + last),
        bound.sampling,
        None if long is None else recording.with_launches(launches[behind:]),
        0 if long is None else long.position,
    )
    return RecordedBucket(recording, found)


def _packets_with_others(
    runtime: Runtime, own: PeerBucket, number: int, device: int, peers: Sequence[PeerBucket]
) -> np.generic:
    """The packets of gathering launch ``number``, and what it needs to know of other devices."""
    (barrier, sent), *others = (_addresses_of(one, number) for one in (own, *peers))
    launch = own[1].gathers[number]
    packets = own[1].packets[launch.first : launch.first + launch.count]
    behind = others_argument(runtime.stop.address, device, barrier, sent, others)
    return np.void(packets.tobytes() + behind)


def _addresses_of(of: PeerBucket, number: int) -> tuple[int, tuple[int, ...]]:
    """Addresses of the barrier of gathering launch ``number``, and of the operands it sends."""
    addresses, bound = of
    launch = bound.gathers[number]
    packets = bound.packets[launch.first : launch.first + launch.count]
    return bound.barrier_of(launch), addresses_of(launch.sends, packets, addresses.scratch)


def _peer_workspaces(
    bound: BoundBucket, number: int, device: int, peers: Sequence[PeerBucket]
) -> PeerWorkspaces:
    """Addresses on the other devices of the workspace of launch ``number`` of those that gather."""
    own = bound.gathers[number]
    apart = []
    for _, other in peers:
        launch = other.gathers[number]
        assert own.table is not None
        assert launch.table is not None
        assert launch.table.layout == own.table.layout, "devices have different phases"
        apart.append(other.workspace_of(launch) - bound.workspace_of(own))
    return PeerWorkspaces(device, tuple(apart))


def _shape(runtime: Runtime, launch: PlannedLaunch) -> LaunchShape:
    function = runtime.modules.function(launch.source, launch.entry)
    if launch.shared_bytes:
        attributes = runtime.context.binding.CUfunction_attribute
        attribute = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        # All launches of a kernel share one limit.
        limit = runtime.device.shared_bytes
        runtime.context.call("cuFuncSetAttribute", function, attribute, limit)
    return LaunchShape(function, launch.grid, launch.threads, launch.shared_bytes)


def _give_back(memory: Memory, allocations: list[Allocation]) -> None:
    for allocation in allocations:
        memory.free(allocation)
