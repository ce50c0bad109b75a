"""What code is refused for before anything runs it."""

from __future__ import annotations

from accel.amd.blocks import blocks_of
from accel.amd.isa import instructions
from accel.amd.translate import block_function
from accel.amd.waits import missing_waits
from contract.errors import CodecError
from contract.kernel import GpuTarget, KernelHeader

NOTED = 3
"""Missing waits an error names."""


def check_code(kernel: KernelHeader) -> None:
    """Raises CodecError for code that is of another GPU, that has an instruction the table of
    semantics lacks, that leaves itself, or that does not wait for what it loads."""
    if kernel.target is not GpuTarget.GFX1201:
        raise CodecError(f"{kernel.name}: target {kernel.target.name}, not GFX1201")
    if kernel.scratch_bytes:
        raise CodecError(f"{kernel.name}: {kernel.scratch_bytes} bytes of scratch memory a lane")
    try:
        _check(kernel)
    except CodecError as error:
        raise CodecError(f"{kernel.name}: {error}") from None


def _check(kernel: KernelHeader) -> None:
    addresses = {instruction.address for instruction in instructions(kernel.code)}
    blocks = blocks_of(kernel.code)
    for block in blocks.values():
        for address in block.successors:
            if address not in addresses:
                raise CodecError(f"{block.last.name} leads to {address:#x}, no code")
        for partial in (True, False):
            block_function(block, partial, subset=False)
    missing = missing_waits(kernel.code)
    if missing:
        named = "; ".join(str(found) for found in missing[:NOTED])
        raise CodecError(f"{len(missing)} waits are missing: {named}")
