"""Executes a step's packets: with one persistent kernel, or with one launch per packet."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np

from accel.opencl.contents import StepPrograms, parts_of
from accel.opencl.memory import Memory
from accel.packets.footprint import op_kinds
from accel.packets.host_memory import AddressRange
from accel.packets.step import Op
from accel.packets.step_memory import WorkerScratch
from accel.packets.worker_tuner import FixedWorkers, WorkerChoice
from contract.arrays import Records
from contract.lazy_dataclass import dataclass

MEETING_BYTES = 512
FAILED_WORD = 64
"""Index of the failure word in the block that ``kernels/entry.cl`` describes."""
SPIN_LIMIT = 1 << 31
"""Most spins of a worker that waits for the others: tens of seconds."""
LAUNCH_GROUPS_PER_UNIT = 8
"""Most work-groups per compute unit when a packet is launched on a device other than a CPU."""


Kinds: TypeAlias = frozenset[tuple[str, str]]


class Mode(enum.Enum):
    """The ways of executing packets."""

    AUTO = "auto"
    """Persistent when a probe shows that all workers run at the same time."""
    PERSISTENT = "persistent"
    LAUNCH = "launch"


class WorkersLost(Exception):
    """The workers of a persistent kernel stopped waiting for one another."""


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """The objects that a launcher uses; ``program`` has all kernels that do not run steps."""

    cl: Any
    queue: Any
    program: Any
    memory: Memory
    scratch: WorkerScratch
    programs: StepPrograms | None = None
    """The programs that run steps, on devices without modules."""

    def version(self) -> tuple[int, int]:
        """Changes whenever ``leading_arguments`` does."""
        return self.memory.version, self.scratch.version

    def step_program(self, ops: Sequence[Op]) -> Any:
        """A program with the kernels of ``ops``. Raises BuildError."""
        assert self.programs is not None
        return self.programs.holding(parts_of(op_kinds(ops)))

    def expect(self, kinds: Kinds) -> None:
        if self.programs is not None:
            self.programs.expect(parts_of(kinds))

    def close(self) -> None:
        """Wait for programs that are being built."""
        if self.programs is not None:
            self.programs.close()

    def leading_arguments(self) -> tuple[Any, ...]:
        """The first arguments of every kernel, before the address of the step's inputs."""
        scratch = self.scratch
        numbers = (scratch.shared, scratch.own, scratch.own_bytes)
        return (*self.memory.arguments(), *map(np.uint64, numbers))


class Recording(Protocol):
    """Packets that can be enqueued any number of times."""

    def enqueue(self, inputs: int, tokens: int) -> Any:
        """Start the packets with the inputs at address ``inputs``, of a step of ``tokens``.

        Returns the event of the last packet."""


class Launcher(ABC):
    """One way of executing packets, by at most ``workers`` groups."""

    by_modules: ClassVar[bool] = False
    """Whether each op is a module of ``accel/kernels`` and weights are in planes."""

    def __init__(self, launch: LaunchContext, workers: int) -> None:
        self.launch = launch
        self.workers = workers

    @abstractmethod
    def record(self, packets: Records, address: int, ops: Sequence[Op]) -> Recording:
        """Prepare the ``packets`` of ``ops``, which are at ``address`` in device memory. Raises
        BuildError."""

    def expect(self, kinds: Kinds) -> None:
        """Prepare for steps with ops of these ``kinds``; see ``StepMemory``."""
        self.launch.expect(kinds)

    def check(self) -> None:  # noqa: B027
        """Raise WorkersLost when the workers of the last step stopped waiting."""

    def close(self) -> None:
        """Release the launcher's resources. Safe to call twice."""
        self.launch.close()


@dataclass(frozen=True, slots=True)
class _Started:
    """A step in flight."""

    event: Any
    tokens: int
    ops: int
    groups: int


class PersistentLauncher(Launcher):
    """Runs one kernel per step, whose workers execute the packets and meet at barriers.

    There are at most ``workers``, each a group of one item. ``choice`` chooses how many a step gets
    and receives its time, for which the queue must measure times; without it a step gets all."""

    def __init__(
        self,
        launch: LaunchContext,
        workers: int,
        spin_limit: int = SPIN_LIMIT,
        choice: WorkerChoice | None = None,
    ) -> None:
        super().__init__(launch, workers)
        self.choice = choice or FixedWorkers(workers)
        self._timed = choice is not None
        self._started: deque[_Started] = deque()
        self._spin_limit = spin_limit
        meeting = launch.memory.allocate("opencl.meeting", MEETING_BYTES)
        self._meeting: AddressRange | None = meeting
        self._address = np.uint64(meeting.address)
        self._words = launch.memory.map(meeting).view(np.uint32)

    def record(self, packets: Records, address: int, ops: Sequence[Op] = ()) -> Recording:
        """See Launcher. Without ``ops`` the packets are of BASE_OPS."""
        trailing = (
            np.uint64(address),
            np.uint32(len(packets)),
            self._address,
            np.uint32(self._spin_limit),
        )
        program = self.launch.step_program(ops) if ops else self.launch.program
        return _PersistentRecording(self, program, trailing)

    def groups_for(self, tokens: int, ops: int) -> int:
        """The number of work-groups for the next step."""
        self._note_ended()
        return self.choice.choose(tokens, ops)

    def started(self, event: Any, tokens: int, ops: int, groups: int) -> None:
        """Note that a step was enqueued."""
        if self._timed:
            self._started.append(_Started(event, tokens, ops, groups))

    def close(self) -> None:
        super().close()
        self._started.clear()
        if self._meeting is not None:
            self.launch.memory.free(self._meeting)
            self._meeting = None

    def check(self) -> None:
        """See Launcher. Clears the failure, so that the next step can run."""
        if self._words[FAILED_WORD]:
            self._words[:] = 0
            raise WorkersLost

    def _note_ended(self) -> None:
        """Note the device's times of steps, which do not include the wait in the queue."""
        complete = self.launch.cl.COMPLETE
        while self._started and self._started[0].event.command_execution_status <= complete:
            step = self._started.popleft()
            if step.event.command_execution_status == complete:
                times = step.event.profile
                seconds = (times.end - times.start) * 1e-9
                self.choice.note(step.tokens, step.ops, step.groups, seconds)


class _PersistentRecording:
    def __init__(
        self, launcher: PersistentLauncher, program: Any, trailing: tuple[Any, ...]
    ) -> None:
        self._launcher = launcher
        self._trailing = trailing
        self._ops = int(trailing[1])
        self._kernel = launcher.launch.cl.Kernel(program, "run_packets")
        self._bound: tuple[int, int] | None = None
        self._inputs = 0
        self._inputs_index = 0

    def enqueue(self, inputs: int, tokens: int) -> Any:
        launcher, launch = self._launcher, self._launcher.launch
        if self._bound != launch.version():
            leading = launch.leading_arguments()
            self._kernel.set_args(*leading, np.uint64(inputs), *self._trailing)
            self._bound = launch.version()
            self._inputs_index = len(leading)
        elif inputs != self._inputs:
            self._kernel.set_arg(self._inputs_index, np.uint64(inputs))
        self._inputs = inputs
        groups = launcher.groups_for(tokens, self._ops)
        event = launch.cl.enqueue_nd_range_kernel(launch.queue, self._kernel, (groups,), (1,))
        launcher.started(event, tokens, self._ops, groups)
        return event


class PacketLauncher(Launcher):
    """Launches each packet by itself, so that no two workers need to run at the same time."""

    def record(self, packets: Records, address: int, ops: Sequence[Op]) -> Recording:
        program = self.launch.step_program(ops)
        kernels = [self.launch.cl.Kernel(program, f"launch_{op.name}") for op in ops]
        return LaunchRecording(
            self.launch,
            [(kernel, self.workers, None) for kernel in kernels],
            self.launch.leading_arguments,
            address,
        )


class LaunchRecording:
    """Launches a list of kernels.

    Each of ``launches`` has its own kernel object, because binding arguments costs as much as a
    launch, its number of work-items, and the size of a group. ``leading`` returns the arguments
    before the addresses of inputs and packets."""

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
