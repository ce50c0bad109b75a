"""Memory that the steps of a device share because they run one after the other: scratch and
inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from accel.packets.buffers import Allocation
from contract.lazy_dataclass import dataclass

A = TypeVar("A", bound=Allocation)


class Allocator(Protocol[A]):
    """Allocates and frees device memory."""

    def allocate(self, what: str, nbytes: int, /) -> A:
        """Memory of ``nbytes`` bytes. Raises OutOfMemory naming its purpose ``what``."""

    def free(self, allocation: A, /) -> None:
        """Free memory that nothing running uses."""


@dataclass(slots=True)
class StepAddresses:
    """The addresses that all recordings of a tier share; ``version`` counts their changes."""

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
    """Addresses of scratch memory: ``shared`` by all workers, and the first worker's ``own``.

    Each worker has ``own_bytes`` of its own, one after the other; ``version`` counts the moves."""

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
    memory: Allocator[A], finish: Callable[[], object], what: str, current: A | None, nbytes: int
) -> A:
    """``current`` if it has ``nbytes``, else larger memory in its stead, after ``finish`` has
    waited for the steps that use it.

    The larger memory is allocated first: if that raises OutOfMemory, steps that are lowered already
    still have ``current``."""
    if current is not None and current.nbytes >= nbytes:
        return current
    larger = memory.allocate(what, nbytes)
    if current is not None:
        finish()
        memory.free(current)
    return larger
