"""Memory that steps of a device share, since they run one after the other: scratch and inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from accel.packets.buffers import Allocation
from contract.lazy_dataclass import dataclass

A = TypeVar("A", bound=Allocation)


class Allocator(Protocol[A]):
    """Allocates and frees device memory."""

    def allocate(self, purpose: str, nbytes: int, /) -> A:
        """Memory of ``nbytes`` bytes. Raises OutOfMemory naming its purpose ``purpose``."""

    def free(self, allocation: A, /) -> None:
        """Free memory that nothing running uses."""


@dataclass(slots=True)
class StepAddresses:
    """The addresses that all recordings of a tier use; ``version`` counts their changes."""

    scratch: int = 0
    inputs: int = 0
    version: int = 0

    def move(self, scratch: int, inputs: int) -> None:
        """Record the addresses of scratch and inputs."""
        if (scratch, inputs) != (self.scratch, self.inputs):
            self.scratch, self.inputs = scratch, inputs
            self.version += 1


@dataclass(slots=True)
class WorkerScratch:
    """Addresses of scratch memory: that of all workers, ``shared``, and that of the first worker,
    ``own``.

    Each worker has ``own_bytes``, one after the other; ``version`` counts the changes."""

    shared: int = 0
    own: int = 0
    own_bytes: int = 0
    version: int = 0

    def move(self, shared: int, own: int, own_bytes: int) -> None:
        """Set the addresses."""
        if (shared, own, own_bytes) != (self.shared, self.own, self.own_bytes):
            self.shared, self.own, self.own_bytes = shared, own, own_bytes
            self.version += 1


def grown(
    memory: Allocator[A], finish: Callable[[], object], purpose: str, current: A | None, nbytes: int
) -> A:
    """``current`` if it has ``nbytes``, else larger memory instead, after ``finish`` has waited for
    the steps that use it.

    The larger memory is allocated first: after OutOfMemory, lowered steps still have
    ``current``."""
    if current is not None and current.nbytes >= nbytes:
        return current
    larger = memory.allocate(purpose, nbytes)
    if current is not None:
        finish()
        memory.free(current)
    return larger
