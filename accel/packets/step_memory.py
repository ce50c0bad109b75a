"""Memory that steps of a device share, since they run one after the other: scratch and inputs."""

from __future__ import annotations

from contract.lazy_dataclass import dataclass


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
