"""Refuses code that must not run."""

from __future__ import annotations

from collections.abc import Sequence

from accel.amd.isa.blocks import blocks_of
from accel.amd.isa.code_object import LDS_GRANULE, LDS_SIZE_SHIFT, VGPR_GRANULE
from accel.amd.isa.decode import Instruction, instructions, isa_of
from accel.amd.isa.semantics import VECTOR_OFFSET, access
from accel.amd.isa.waits import missing_waits
from contract.errors import CodecError
from contract.kernel import KernelHeader

NOTED = 3
"""Most missing waits that an error names."""


def check_code(kernel: KernelHeader) -> None:
    """Raises CodecError for code of another GPU, with instructions that the table of semantics
    lacks, that jumps out of itself, or that does not wait for its loads."""
    if kernel.scratch_bytes:
        raise CodecError(f"{kernel.name}: {kernel.scratch_bytes} bytes of scratch memory a lane")
    try:
        _check(kernel)
    except CodecError as error:
        raise CodecError(f"{kernel.name}: {error}") from None


def _check_registers(kernel: KernelHeader, listed: Sequence[Instruction]) -> None:
    """The header, the launch registers and the code must agree."""
    granted = ((kernel.rsrc1 & 63) + 1) * VGPR_GRANULE
    if kernel.vgpr_count != granted:
        raise CodecError(f"{kernel.vgpr_count} vector registers, RSRC1 says {granted}")
    granules = -(-kernel.lds_bytes // LDS_GRANULE)
    if (said := kernel.rsrc2 >> LDS_SIZE_SHIFT & 0x1FF) != granules:
        raise CodecError(
            f"{kernel.lds_bytes} bytes of group memory, RSRC2 says {said * LDS_GRANULE}"
        )
    for instruction in listed:
        found = access(instruction)
        highest = max(found.reads | found.writes, default=0) - VECTOR_OFFSET
        if highest >= granted:
            raise CodecError(f"{instruction.name} uses v{highest}, beyond {granted} registers")


def _check(kernel: KernelHeader) -> None:
    isa = isa_of(kernel.target)
    listed = list(instructions(kernel.code, isa))
    addresses = {instruction.address for instruction in listed}
    _check_registers(kernel, listed)
    blocks = blocks_of(kernel.code, isa)
    for block in blocks.values():
        for address in block.successors:
            if address not in addresses:
                raise CodecError(f"{block.last.name} leads to {address:#x}, no code")
    missing = missing_waits(kernel.code, isa)
    if missing:
        named = "; ".join(str(found) for found in missing[:NOTED])
        raise CodecError(f"{len(missing)} waits are missing: {named}")
