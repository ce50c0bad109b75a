"""Memory that the steps of a device use one after the other: scratch, and the place of inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from accel.packets.buffers import Allocation
from contract.lazy_dataclass import dataclass

A = TypeVar("A", bound=Allocation)


class Allocator(Protocol[A]):
    """Gives device memory and takes it back."""

    def allocate(self, what: str, nbytes: int, /) -> A:
        """Raises OutOfMemory naming ``what`` it is for."""

    def free(self, allocation: A, /) -> None:
        """Take it back; nothing that runs uses it."""


@dataclass(slots=True)
class StepAddresses:
    """Addresses all recordings of a tier share; ``version`` counts their moves."""

    scratch: int = 0
    inputs: int = 0
    version: int = 0

    def move(self, scratch: int, inputs: int) -> None:
        """Note where the two lie now."""
        if (scratch, inputs) != (self.scratch, self.inputs):
            self.scratch, self.inputs = scratch, inputs
            self.version += 1


def grown(
    memory: Allocator[A],
    finish: Callable[[], object],
    what: str,
    current: A | None,
    nbytes: int,
) -> A:
    """``current`` if it has ``nbytes``, else larger memory instead of it, once ``finish`` has
    waited for the steps that use it.

    The larger one is taken first: where there is no memory for it, OutOfMemory leaves ``current``
    to the steps that are lowered already.
    """
    if current is not None and current.nbytes >= nbytes:
        return current
    larger = memory.allocate(what, nbytes)
    if current is not None:
        finish()
        memory.free(current)
    return larger
