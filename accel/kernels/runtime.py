"""An open device whose kernels are those of this folder: queue, memory, program."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from accel.kernels.device_probe import SELF_TEST, Found, results_of, traits_of
from accel.kernels.source import Module, Traits
from accel.packets.arenas import ArenaMemory
from accel.packets.step_memory import StepAddresses
from contract.arrays import Records


@dataclass(frozen=True, slots=True)
class DeviceChoices:
    """Choices of a caller about a device; None leaves one to the device.

    ``memory_bytes`` is the most memory. ``traits`` replaces the result of the self-test, so that
    integers compute what the device could."""

    memory_bytes: int | None = None
    traits: Traits | None = None

    def capacity(self, memory_bytes: int) -> int:
        """The most memory to use of a device with ``memory_bytes``."""
        return memory_bytes if self.memory_bytes is None else min(memory_bytes, self.memory_bytes)


class Closable(Protocol):
    """A part of an open device."""

    def close(self) -> None:
        """Destroy it; nothing may be running."""


class Program(Closable, Protocol):
    """The kernels of a device, see ``launches.KernelCache``."""

    traits: Traits

    def kernel(self, module: Module, traits: Traits | None = None, /) -> Any:
        """The kernel of a module, for other ``traits`` if given."""


Q = TypeVar("Q", bound=Closable)
M = TypeVar("M", bound=ArenaMemory[Any])
P = TypeVar("P", bound=Program)


@dataclass(slots=True)
class DeviceRuntime(Generic[Q, M, P]):
    """The parts of an open device."""

    queue: Q
    memory: M
    program: P
    launch_packet: Callable[[M, Any, Records, int], None]
    """Runs a kernel with PACKET[1] and a number of work-groups outside of any step, and waits for
    it."""
    addresses: StepAddresses = field(default_factory=StepAddresses)

    def launch(self, module: Module, packet: Records, groups: int) -> None:
        """``launch_packet`` of the kernel of a module."""
        self.launch_packet(self.memory, self.program.kernel(module), packet, groups)

    def probe(self, tier: str, device: str) -> None:
        """Choose the kernels by the self-test. Raises TierUnavailable if integers do not help."""

        def answer(traits: Traits) -> Found:
            kernel = self.program.kernel(SELF_TEST, traits)
            return results_of(self.memory, partial(self.launch_packet, self.memory, kernel))

        self.program.traits = traits_of(answer, tier, device, has_dot=False)

    def close(self) -> None:
        """Close everything."""
        with ExitStack() as undo:
            undo.callback(self.queue.close)
            undo.callback(self.memory.close)
            undo.callback(self.program.close)


class DeviceHooks:
    """Hooks of a tier that has opened its device as ``_runtime``."""

    _runtime: Any
    _memory: Any

    @property
    def traits(self) -> Traits:
        """The operations that the device computes exactly itself; integers compute the others."""
        found: Traits = self._runtime.program.traits
        return found

    def _finish(self) -> None:
        self._runtime.queue.finish()

    def _translated(self, purpose: str) -> AbstractContextManager[None]:
        guarded: AbstractContextManager[None] = self._memory.guarded(purpose)
        return guarded
