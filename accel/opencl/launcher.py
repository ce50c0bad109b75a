"""Getting a step's packets executed: one persistent kernel, or one launch per packet."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from accel.opencl.contents import StepPrograms, parts_of
from accel.opencl.memory import Memory
from accel.packets.footprint import kinds_of
from accel.packets.host_memory import AddressRange
from accel.packets.step import Op
from accel.packets.worker_tuner import Choice, FixedWorkers
from contract.lazy_dataclass import dataclass

MEETING_BYTES = 512
FAILED_WORD = 64
"""Of the block ``kernels/entry.cl`` describes."""
SPIN_LIMIT = 1 << 31
"""Spins of a worker that waits for the others: tens of seconds."""
LAUNCH_GROUPS_PER_UNIT = 8
"""Most work-groups a compute unit gets at the launch of a packet on a device that is no CPU."""


Kinds: TypeAlias = frozenset[tuple[str, str]]


class Mode(enum.Enum):
    """How packets get executed."""

    AUTO = "auto"
    """Persistent where a start-up probe shows that all workers run at once."""
    PERSISTENT = "persistent"
    LAUNCH = "launch"


class WorkersLost(Exception):
    """Workers of a persistent kernel gave up waiting for one another."""


@dataclass(slots=True)
class ScratchAddress:
    """Where scratch memory lies: addresses of the shared part and of the first worker's own."""

    shared: int = 0
    own: int = 0
    own_bytes: int = 0
    version: int = 0
    """Counts the moves, so that bound arguments can be renewed."""

    def move(self, shared: int, own: int, own_bytes: int) -> None:
        """Note where it lies now."""
        if (shared, own, own_bytes) != (self.shared, self.own, self.own_bytes):
            self.shared, self.own, self.own_bytes = shared, own, own_bytes
            self.version += 1


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """What a launcher works with: ``program`` has the kernels beside those of steps."""

    cl: Any
    queue: Any
    program: Any
    memory: Memory
    scratch: ScratchAddress
    programs: StepPrograms | None = None
    """Those of steps, where ops are no modules."""

    def version(self) -> tuple[int, int]:
        """Changes whenever ``leading_arguments`` does."""
        return self.memory.version, self.scratch.version

    def step_program(self, ops: Sequence[Op]) -> Any:
        """A program with the kernels of ``ops``. Raises BuildError."""
        assert self.programs is not None
        return self.programs.holding(parts_of(kinds_of(ops)))

    def expect(self, kinds: Kinds) -> None:
        """See ``Launcher.expect``."""
        if self.programs is not None:
            self.programs.expect(parts_of(kinds))

    def close(self) -> None:
        """Wait for programs that are being made."""
        if self.programs is not None:
            self.programs.close()

    def leading_arguments(self) -> tuple[Any, ...]:
        """The arguments every kernel begins with; the address of the step's inputs follows."""
        place = self.scratch
        numbers = (place.shared, place.own, place.own_bytes)
        return (*self.memory.arguments(), *map(np.uint64, numbers))


class Recording(Protocol):
    """Packets ready to be enqueued any number of times."""

    def enqueue(self, inputs: int, tokens: int) -> Any:
        """Start them with the inputs at address ``inputs``, those of a step of ``tokens``.

        Returns the event of the last one.
        """


class Launcher(Protocol):
    """One way of executing packets."""

    workers: int
    by_modules: ClassVar[bool]
    """Whether every op is a module of ``accel/kernels``, on weights in planes."""

    def record(self, packets: NDArray[np.void], address: int, ops: Sequence[Op]) -> Recording:
        """Prepare the ``packets`` of ``ops``, which lie at ``address`` in device memory.

        Raises BuildError.
        """

    def expect(self, kinds: Kinds) -> None:
        """Steps with ops of these ``kinds``, see ``StepMemory``, are about to be recorded."""

    def check(self) -> None:
        """Raise WorkersLost when the step that just ended was given up."""

    def close(self) -> None:
        """Give back what the launcher holds. Safe to call twice."""


@dataclass(frozen=True, slots=True)
class _Started:
    """A step under way."""

    event: Any
    tokens: int
    groups: int


class PersistentLauncher:
    """One kernel a step: workers walk the packets and meet at barriers.

    There are ``workers`` at most, each a group of one item; ``choice`` says how many a step gets,
    and is told how long it took, for which the queue must keep times. Without it a step gets all.
    """

    by_modules: ClassVar[bool] = False

    def __init__(
        self,
        launch: LaunchContext,
        workers: int,
        spin_limit: int = SPIN_LIMIT,
        choice: Choice | None = None,
    ) -> None:
        self.launch = launch
        self.workers = workers
        self.choice = choice or FixedWorkers(workers)
        self._timed = choice is not None
        self._started: deque[_Started] = deque()
        self._spin_limit = spin_limit
        meeting = launch.memory.allocate("opencl.meeting", MEETING_BYTES)
        self._meeting: AddressRange | None = meeting
        self._address = np.uint64(meeting.address)
        self._words = launch.memory.map(meeting).view(np.uint32)

    def record(self, packets: NDArray[np.void], address: int, ops: Sequence[Op] = ()) -> Recording:
        """See Launcher. Without ``ops`` the packets are of those of BASE_OPS."""
        trailing = (
            np.uint64(address),
            np.uint32(len(packets)),
            self._address,
            np.uint32(self._spin_limit),
        )
        program = self.launch.step_program(ops) if ops else self.launch.program
        return _PersistentRecording(self, program, trailing)

    def expect(self, kinds: Kinds) -> None:
        """See Launcher."""
        self.launch.expect(kinds)

    def groups_for(self, tokens: int) -> int:
        """Work-groups of a step that is about to be enqueued."""
        self._note_ended()
        return self.choice.choose(tokens)

    def started(self, event: Any, tokens: int, groups: int) -> None:
        """A step was enqueued."""
        if self._timed:
            self._started.append(_Started(event, tokens, groups))

    def close(self) -> None:
        """See Launcher."""
        self.launch.close()
        self._started.clear()
        if self._meeting is not None:
            self.launch.memory.free(self._meeting)
            self._meeting = None

    def check(self) -> None:
        """See Launcher. The next step starts afresh."""
        if self._words[FAILED_WORD]:
            self._words[:] = 0
            raise WorkersLost

    def _note_ended(self) -> None:
        """The device's own times of steps: those of queued ones leave out the wait for others."""
        complete = self.launch.cl.COMPLETE
        while self._started and self._started[0].event.command_execution_status <= complete:
            step = self._started.popleft()
            if step.event.command_execution_status == complete:
                times = step.event.profile
                seconds = (times.end - times.start) * 1e-9
                self.choice.note(step.tokens, step.groups, seconds)


class _PersistentRecording:
    def __init__(
        self, launcher: PersistentLauncher, program: Any, trailing: tuple[Any, ...]
    ) -> None:
        self._launcher = launcher
        self._trailing = trailing
        self._kernel = launcher.launch.cl.Kernel(program, "run_packets")
        self._bound: tuple[int, int] | None = None
        self._inputs = 0
        self._place = 0

    def enqueue(self, inputs: int, tokens: int) -> Any:
        """See Recording."""
        launcher, launch = self._launcher, self._launcher.launch
        if self._bound != launch.version():
            leading = launch.leading_arguments()
            self._kernel.set_args(*leading, np.uint64(inputs), *self._trailing)
            self._bound = launch.version()
            self._place = len(leading)
        elif inputs != self._inputs:
            self._kernel.set_arg(self._place, np.uint64(inputs))
        self._inputs = inputs
        groups = launcher.groups_for(tokens)
        event = launch.cl.enqueue_nd_range_kernel(launch.queue, self._kernel, (groups,), (1,))
        launcher.started(event, tokens, groups)
        return event


class PacketLauncher:
    """One launch a packet, every work-item a worker: needs nothing to run at the same time."""

    by_modules: ClassVar[bool] = False

    def __init__(self, launch: LaunchContext, workers: int) -> None:
        self.launch = launch
        self.workers = workers

    def record(self, packets: NDArray[np.void], address: int, ops: Sequence[Op]) -> Recording:
        """See Launcher."""
        program = self.launch.step_program(ops)
        kernels = [self.launch.cl.Kernel(program, f"launch_{op.name}") for op in ops]
        return LaunchRecording(
            self.launch,
            [(kernel, self.workers, None) for kernel in kernels],
            self.launch.leading_arguments,
            address,
        )

    def expect(self, kinds: Kinds) -> None:
        """See Launcher."""
        self.launch.expect(kinds)

    def check(self) -> None:
        """See Launcher: there is nobody to lose."""

    def close(self) -> None:
        """See Launcher."""
        self.launch.close()


class LaunchRecording:
    """A launch of each of ``launches``: a kernel object of its own, because binding arguments costs
    as much as a launch, its work-items and how many of them are a group. ``leading`` gives the
    arguments before the addresses of inputs and packets."""

    def __init__(
        self,
        launch: LaunchContext,
        launches: Sequence[tuple[Any, int, int | None]],
        leading: Callable[[], tuple[Any, ...]],
        address: int,
    ) -> None:
        self._launch = launch
        self._launches = launches
        self._leading = leading
        self._address = np.uint64(address)
        self._bound: tuple[tuple[int, int], int] | None = None
        prepared = launch.cl.prepared_launch
        self._starts = [prepared(launch.queue, *each) for each in launches[:-1]]

    def enqueue(self, inputs: int, tokens: int) -> Any:
        """See Recording."""
        launch = self._launch
        bound = launch.version(), inputs
        if self._bound != bound:
            arguments = (*self._leading(), np.uint64(inputs), self._address)
            for index, (kernel, _, _) in enumerate(self._launches):
                kernel.set_args(*arguments, np.uint32(index))
            self._bound = bound
        for start in self._starts:
            start()
        if not self._launches:
            return launch.cl.enqueue_marker(launch.queue)
        kernel, items, group = self._launches[-1]
        local = None if group is None else (group,)
        return launch.cl.enqueue_nd_range_kernel(launch.queue, kernel, (items,), local)
