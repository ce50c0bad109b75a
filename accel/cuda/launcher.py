"""A step's launches, recorded once as a CUDA graph and replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import addressof, c_uint64, sizeof
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from accel.cuda.driver import Context, Handle
from accel.cuda.tuned import Extent
from accel.kernels.source import GROUP_SIZE
from accel.packets.step_memory import StepAddresses
from contract.arrays import Records
from contract.garbage import garbage_collection_off

NUMBER_BYTES = sizeof(c_uint64)
PROGRAMMATIC_CAPABILITY = (9, 0)
"""The lowest compute capability with programmatic launches: a kernel starts before the one before
it has ended."""


COOPERATIVE = ("COOPERATIVE", "cooperative")
PROGRAMMATIC = ("PROGRAMMATIC_STREAM_SERIALIZATION", "programmaticStreamSerializationAllowed")
"""Attributes of a launch: the driver's name, and the name of the value."""


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """A kernel with its grid, the threads of a block and its dynamic shared memory in bytes."""

    function: Any
    grid: Extent
    threads: int
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BoundLaunch:
    """One launch. ``own`` are the kernel's arguments after the addresses of the step's memory, or
    functions that return them at the launch. One that ``overlaps`` may start before the launch in
    front of it has ended."""

    kernel: LaunchShape
    cooperative: bool
    own: tuple[np.generic | Callable[[], np.generic], ...]
    overlaps: bool = True


class Branch(Protocol):
    """Work on another stream that launches of a step wait for, and that waits for launches.
    ``steps`` is the stream of the launches."""

    def begin(self, steps: Any, /) -> None:
        """Enqueue what waits for no launch of the step."""

    def before(self, number: int, steps: Any, /) -> bool:
        """Have launch ``number``, which is enqueued next, wait for what it needs; False if that
        is nothing."""

    def behind(self, number: int, steps: Any, /) -> None:
        """Enqueue what waits for launch ``number``, which was enqueued last."""


MAX_BRIEF_LAUNCHES = 512
"""Most launches of a brief recording. Making another graph of this many takes some ten
milliseconds, as long as a thousand copies of inputs in the stream of steps."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Recording:
    """Launches in order.

    They run as one CUDA graph for each input address, which is made again when the memory of the
    step has moved, here or on one of the ``peers``. The ``branch`` is part of it."""

    context: Context
    launches: Sequence[BoundLaunch]
    addresses: StepAddresses
    programmatic: bool
    graphs: bool = True
    peers: Sequence[StepAddresses] = ()
    branch: Branch | None = None
    _executables: dict[int, Handle] = field(default_factory=dict)
    _made_for: tuple[int, ...] = ()

    @property
    def is_brief(self) -> bool:
        """Whether the time between two steps matters more than that of making a graph for each
        input buffer."""
        return len(self.launches) <= MAX_BRIEF_LAUNCHES

    def with_launches(self, launches: Sequence[BoundLaunch]) -> Recording:
        """A recording of other launches for the same memory."""
        return replace(self, launches=launches, _executables={}, _made_for=())

    def prepare(self, stream: Any, inputs: int) -> None:
        """Make the graph for the input address ``inputs``, unless it exists for the current
        memory."""
        now = (self.addresses.version, *[peer.version for peer in self.peers])
        if self._made_for != now:
            self._executables.clear()
            self._made_for = now
        if self.graphs and self.launches and inputs not in self._executables:
            self._executables[inputs] = self._captured(stream, inputs)

    def enqueue(self, stream: Any, inputs: int) -> None:
        """Launch everything in the order of ``stream``, for a step whose inputs are at address
        ``inputs``."""
        self.prepare(stream, inputs)
        if not self.graphs:
            self._launch_all(stream, inputs)
        elif self.launches:
            self.context.quick("cuGraphLaunch", self._executables[inputs].value, stream)

    def _captured(self, stream: Any, inputs: int) -> Handle:
        context = self.context
        mode = context.binding.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        # A finalizer that waits for a device, of any context, breaks its thread's capture.
        with garbage_collection_off():
            context.call("cuStreamBeginCapture", stream, mode)
            try:
                self._launch_all(stream, inputs)
            finally:
                graph = context.call("cuStreamEndCapture", stream)
        try:
            executable = context.call("cuGraphInstantiate", graph, 0)
            return Handle(context, executable, "cuGraphExecDestroy")
        finally:
            context.call("cuGraphDestroy", graph)

    def _launch_all(self, stream: Any, inputs: int) -> None:
        branch = self.branch
        if branch is not None:
            branch.begin(stream)
        for number, launch in enumerate(self.launches):
            waits = branch is not None and branch.before(number, stream)
            # A launch that starts early would not wait for the other stream.
            early = self.programmatic and number > 0 and not waits
            self._launch(launch, stream, inputs, early)
            if branch is not None:
                branch.behind(number, stream)

    def _launch(self, launch: BoundLaunch, stream: Any, inputs: int, programmatic: bool) -> None:
        step = np.uint64(self.addresses.scratch), np.uint64(inputs)
        own = (one() if callable(one) else one for one in launch.own)
        arguments = Arguments(*step, *own)
        flags = (COOPERATIVE, launch.cooperative), (PROGRAMMATIC, programmatic and launch.overlaps)
        attributes = tuple(attribute for attribute, wanted in flags if wanted)
        start_kernel(self.context, stream, launch.kernel, arguments, attributes)


class Arguments:
    """The arguments of a kernel. The driver reads them at the launch: ``address`` is that of the
    list of their addresses, valid as long as this object."""

    def __init__(self, *values: np.generic) -> None:
        # Numbers lie in one array, since asking numpy for the address of each is slow.
        self._numbers = (c_uint64 * len(values))()
        self._blocks = []
        first = addressof(self._numbers)
        addresses = (c_uint64 * len(values))()
        for i, value in enumerate(values):
            if isinstance(value, np.unsignedinteger):
                self._numbers[i] = int(value)
                addresses[i] = first + i * NUMBER_BYTES
            else:
                self._blocks.append(np.array([value]))
                addresses[i] = self._blocks[-1].ctypes.data
        self._addresses = addresses
        self.address = addressof(addresses)


def start_packet(
    context: Context, stream: Any, function: Any, packet: Records, groups: int
) -> None:
    """Enqueue ``groups`` work-groups of a plain kernel with PACKET[1] outside of any step."""
    shape = LaunchShape(function, (groups, 1, 1), GROUP_SIZE)
    start_kernel(context, stream, shape, Arguments(np.uint64(0), np.uint64(0), packet[0]))


def start_kernel(
    context: Context,
    stream: Any,
    shape: LaunchShape,
    arguments: Arguments,
    attributes: tuple[tuple[str, str], ...] = (),
) -> None:
    """Enqueue one launch."""
    function, address, block = shape.function, arguments.address, (shape.threads, 1, 1)
    if not attributes:
        # This call costs the host less than one with a configuration.
        sizes = *shape.grid, *block, shape.shared_bytes
        context.call("cuLaunchKernel", function, *sizes, stream, address, 0)
        return
    binding = context.binding
    config = binding.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = shape.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = shape.shared_bytes
    config.hStream = stream
    config.attrs = [_attribute(binding, *names) for names in attributes]
    config.numAttrs = len(attributes)
    context.call("cuLaunchKernelEx", config, function, address, 0)


def _attribute(binding: Any, name: str, field_name: str) -> Any:
    attribute = binding.CUlaunchAttribute()
    attribute.id = getattr(binding.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
    setattr(attribute.value, field_name, 1)
    return attribute
