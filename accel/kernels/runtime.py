"""An open device whose kernels are those of this folder: queue, memory, program."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from accel.kernels.source import Traits
from accel.packets.step_memory import StepAddresses


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


Q = TypeVar("Q", bound=Closable)
M = TypeVar("M", bound=Closable)
P = TypeVar("P", bound=Closable)


@dataclass(slots=True)
class DeviceRuntime(Generic[Q, M, P]):
    """The parts of an open device."""

    queue: Q
    memory: M
    program: P
    addresses: StepAddresses = field(default_factory=StepAddresses)

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
