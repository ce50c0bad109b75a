"""Names that the modules of the native tier share: the tier, its libraries and their targets."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from accel.digests import digest
from accel.packets.ops import OPS
from accel.wheel_parts import SYSTEMS
from contract.errors import TierUnavailable
from contract.lazy_dataclass import dataclass

TIER = "native"
ARRANGE = len(OPS)
"""Number of the op that arranges a matrix for the products; packets of steps do not have it."""
FINITE = ARRANGE + 1
"""Number of the op that finds scales that are NaN or infinite."""
PROCESSOR = "processor"
"""The name of the library that reports the processor's features."""
SUFFIXES = {"linux": ".so", "macos": ".dylib", "windows": ".dll"}
DIGEST_CHARACTERS = 16
ROOT = Path(__file__).parents[2]
SOURCES = (
    *("accel/opencl/kernels/*.h", "accel/opencl/kernels/*.cl", "accel/opencl/contents.py"),
    *("accel/native/*.c", "accel/native/*.h"),
    *("accel/native/compile.py", "accel/native/sources.py", "accel/native/variants.py"),
    *("accel/packets/accessors.py", "accel/packets/device_op.py", "accel/packets/layouts.py"),
    *("accel/packets/ops.py", "accel/packets/packet.py"),
    *("contract/arithmetic.py", "contract/dtypes.py", "contract/records.py"),
)
"""Patterns, relative to ROOT, of the files that determine the contents of a library."""


@dataclass(frozen=True, slots=True)
class Target:
    """What libraries are built for: a ``system``, one of SUFFIXES, and the architecture
    ``machine``, such as x86_64."""

    system: str
    machine: str

    @property
    def suffix(self) -> str:
        """The file suffix of its libraries."""
        return SUFFIXES[self.system]


def this_target(machine: str) -> Target:
    """The target of this process on architecture ``machine``. Raises TierUnavailable on a system
    without a native tier, and for an empty ``machine``, an unknown one."""
    system = SYSTEMS.get(sys.platform)
    if system is None or not machine:
        reason = f"there is no native library for {sys.platform} on this processor"
        raise TierUnavailable(TIER, reason, "use another tier, see zinc-rt devices")
    return Target(system, machine)


def library_name(name: str, target: Target) -> str:
    """The file name of library ``name``, a variant or PROCESSOR; it has ``sources_digest``."""
    return f"{name}-{sources_digest()}{target.suffix}"


@functools.cache
def sources_digest() -> str:
    """A digest in DIGEST_CHARACTERS hexadecimal digits of all files of SOURCES and their names."""
    contents = digest()
    for pattern in SOURCES:
        for path in sorted(ROOT.glob(pattern)):
            contents.update(f"{path.name}\0".encode())
            contents.update(path.read_bytes())
    return contents.hexdigest()[:DIGEST_CHARACTERS]
