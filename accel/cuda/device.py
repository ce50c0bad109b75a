"""What the tier has to know of a CUDA device."""

from __future__ import annotations

from dataclasses import dataclass

TIER = "cuda"


@dataclass(frozen=True, slots=True)
class Device:
    """One CUDA device. Sizes in bytes.

    ``capability`` is major and minor, ``shared_bytes`` the most shared memory of a block that asks
    for it, ``driver`` the CUDA version of the driver, times 1000.
    """

    ordinal: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int
    shared_bytes: int
    l2_bytes: int
    driver: int

    @property
    def architecture(self) -> str:
        """What kernels are compiled for: the features of sm_90 need its own binaries."""
        major, minor = self.capability
        return f"sm_{major}{minor}{'a' if self.capability == (9, 0) else ''}"
