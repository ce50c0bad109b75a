"""Names within the native tier: systems, files of libraries, and the tier."""

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
"""Op number: arrange a matrix for the products."""
FINITE = ARRANGE + 1
"""Op number: find scales that are NaN or infinite."""
PROCESSOR = "processor"
"""The name of the library that reports the processor's features."""
ENDINGS = {"linux": ".so", "macos": ".dylib", "windows": ".dll"}
DIGEST_CHARACTERS = 16
ROOT = Path(__file__).parents[2]
TEXTS = (
    *("accel/opencl/kernels/*.h", "accel/opencl/kernels/*.cl", "accel/opencl/contents.py"),
    *("accel/native/*.c", "accel/native/*.h"),
    *("accel/native/compile.py", "accel/native/sources.py", "accel/native/variants.py"),
    *("accel/packets/accessors.py", "accel/packets/device_op.py", "accel/packets/layouts.py"),
    *("accel/packets/ops.py", "accel/packets/packet.py"),
    *("contract/arithmetic.py", "contract/dtypes.py", "contract/records.py"),
)
"""The files that determine the contents of a library."""


@dataclass(frozen=True, slots=True)
class Target:
    """A system and an architecture that libraries are built for."""

    system: str
    machine: str

    @property
    def ending(self) -> str:
        """The file suffix of its libraries."""
        return ENDINGS[self.system]


def this_target(machine: str) -> Target:
    """The target of this process. Raises TierUnavailable on a system without a native tier."""
    system = SYSTEMS.get(sys.platform)
    if system is None or not machine:
        reason = f"there is no native library for {sys.platform} on this processor"
        raise TierUnavailable(TIER, reason, "use another tier, see zinc-rt devices")
    return Target(system, machine)


def library_name(name: str, target: Target) -> str:
    """The file name of a variant; it contains ``text_digest``."""
    return f"{name}-{text_digest()}{target.ending}"


@functools.cache
def text_digest() -> str:
    """Hexadecimal digits that change with every file in TEXTS."""
    texts = digest()
    for pattern in TEXTS:
        for path in sorted(ROOT.glob(pattern)):
            texts.update(f"{path.name}\0".encode())
            texts.update(path.read_bytes())
    return texts.hexdigest()[:DIGEST_CHARACTERS]
