"""A step's launches, recorded once as a CUDA graph and replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import addressof, c_uint64, sizeof
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from accel.cuda.driver import Context, Handle
from accel.cuda.garbage import nothing_collected
from accel.cuda.tuned import Extent
from accel.packets.step_memory import StepAddresses

NUMBER_BYTES = sizeof(c_uint64)
PROGRAMMATIC_CAPABILITY = (9, 0)
"""From here on a kernel may be launched before the one in front of it has ended."""


COOPERATIVE = ("COOPERATIVE", "cooperative")
PROGRAMMATIC = ("PROGRAMMATIC_STREAM_SERIALIZATION", "programmaticStreamSerializationAllowed")
"""Attributes of a launch: what the driver calls them, and their values."""


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """A kernel and in how many blocks of how many threads it runs, with how much shared memory that
    it does not declare itself."""

    function: Any
    grid: Extent
    block: Extent
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BoundLaunch:
    """One launch. ``own`` are the kernel's arguments behind the addresses of the step's memory;
    ``others`` makes one more, of the memory of other devices."""

    kernel: LaunchShape
    cooperative: bool
    own: tuple[np.generic, ...]
    others: Callable[[], np.generic] | None = None


MOST_BRIEF_LAUNCHES = 512
"""Of so many it takes some ten milliseconds to make another graph, as many as copies of inputs in
the stream of the steps take away in a thousand of them."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Recording:
    """Launches in order. Enqueued, they run as one graph for each place of inputs, which is made
    anew when the memory of the step has moved, here or on one of the ``peers``."""

    context: Context
    launches: Sequence[BoundLaunch]
    places: StepAddresses
    programmatic: bool
    graphs: bool = True
    peers: Sequence[StepAddresses] = ()
    _executables: dict[int, Handle] = field(default_factory=dict)
    _made_for: tuple[int, ...] = ()

    @property
    def is_brief(self) -> bool:
        """Whether what lies between two steps counts, and a graph for another place does not."""
        return len(self.launches) <= MOST_BRIEF_LAUNCHES

    def with_launches(self, launches: Sequence[BoundLaunch]) -> Recording:
        """Another one, of other launches."""
        return replace(self, launches=launches, _executables={}, _made_for=())

    def prepare(self, stream: Any, inputs: int) -> None:
        """Make the graph for a place of inputs, unless there is one for the memory of now."""
        now = tuple(places.version for places in (self.places, *self.peers))
        if self._made_for != now:
            self._executables.clear()
            self._made_for = now
        if self.graphs and self.launches and inputs not in self._executables:
            self._executables[inputs] = self._captured(stream, inputs)

    def enqueue(self, stream: Any, inputs: int) -> None:
        """Launch everything, in the order of ``stream``, for a step whose inputs are there."""
        self.prepare(stream, inputs)
        if not self.graphs:
            self._launch_all(stream, inputs)
        elif self.launches:
            self.context.call("cuGraphLaunch", self._executables[inputs].value, stream)

    def _captured(self, stream: Any, inputs: int) -> Handle:
        context = self.context
        mode = context.binding.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        # A finalizer that waits for a device, of any context, breaks its thread's capture.
        with nothing_collected():
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
        for number, launch in enumerate(self.launches):
            self._launch(launch, stream, inputs, self.programmatic and number > 0)

    def _launch(self, launch: BoundLaunch, stream: Any, inputs: int, programmatic: bool) -> None:
        step = np.uint64(self.places.scratch), np.uint64(inputs)
        others = () if launch.others is None else (launch.others(),)
        arguments = Arguments(*step, *launch.own, *others)
        attributes: tuple[tuple[str, str], ...] = ()
        if launch.cooperative:
            attributes = (COOPERATIVE,)
        elif programmatic:
            attributes = (PROGRAMMATIC,)
        start_kernel(self.context, stream, launch.kernel, arguments, attributes)


class Arguments:
    """Arguments of a kernel, each of the size it has. The driver reads them when it is launched:
    ``address`` is that of the list of their addresses, valid as long as this object."""

    def __init__(self, *values: np.generic) -> None:
        # A number is where it is least work: to ask an array where it lies is a good deal.
        self._numbers = (c_uint64 * len(values))()
        self._blocks = []
        first = addressof(self._numbers)
        places = (c_uint64 * len(values))()
        for i, value in enumerate(values):
            if isinstance(value, np.unsignedinteger):
                self._numbers[i] = int(value)
                places[i] = first + i * NUMBER_BYTES
            else:
                self._blocks.append(np.array([value]))
                places[i] = self._blocks[-1].ctypes.data
        self._places = places
        self.address = addressof(places)


def start_kernel(
    context: Context,
    stream: Any,
    shape: LaunchShape,
    arguments: Arguments,
    attributes: tuple[tuple[str, str], ...] = (),
) -> None:
    """Enqueue one launch."""
    function, place = shape.function, arguments.address
    if not attributes:
        # Less work for the host than a configuration.
        sizes = *shape.grid, *shape.block, shape.shared_bytes
        context.call("cuLaunchKernel", function, *sizes, stream, place, 0)
        return
    binding = context.binding
    config = binding.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = shape.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = shape.block
    config.sharedMemBytes = shape.shared_bytes
    config.hStream = stream
    config.attrs = [_attribute(binding, *names) for names in attributes]
    config.numAttrs = len(attributes)
    context.call("cuLaunchKernelEx", config, function, place, 0)


def _attribute(binding: Any, name: str, field_name: str) -> Any:
    attribute = binding.CUlaunchAttribute()
    attribute.id = getattr(binding.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
    setattr(attribute.value, field_name, 1)
    return attribute
