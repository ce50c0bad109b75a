"""The packet of an op, the record that tells a device which op to run on which memory."""

from __future__ import annotations

import numpy as np

from accel.packets.ops import OPS
from contract.arithmetic import MAX_LOG_PROBABILITIES
from contract.records import OUTPUT_EVENT, SLOT, STEP, record

OPERANDS = max(len(op.operands) for op in OPS)
SIZES = max(len(op.sizes) for op in OPS)
REALS = max(len(op.reals) for op in OPS)
SIZES += (OPERANDS + SIZES + REALS) % 2
"""An even number of words, so that a packet is a whole number of 64-bit words."""

PACKET = record(
    "u4 op wait everyone split_columns dtype layout counted reserved, "
    f"u8 operand[{OPERANDS}], u4 stride[{OPERANDS}], i4 size[{SIZES}], f4 real[{REALS}]"
)
"""The record type; ``PACKET`` of ``accel/opencl/kernels/packet.h`` mirrors it and explains the
fields. An operand is an address in the device's memory, or one of the values below."""

ABSENT = 0xFFFF_FFFF_FFFF_FFFF
"""The operand of an optional input that is left out."""
OWN_MEMORY = 1 << 63
"""Set in an offset into the scratch memory of the worker that runs the packet."""
SCRATCH_MEMORY = 1 << 62
"""Set in an offset into the scratch memory that all workers share."""
INPUT_MEMORY = 1 << 61
"""Set in an offset into the inputs of the step."""
BANK_SHIFT = 56
"""Position of the number of a bank, one of BANKS buffers, in an address of OpenCL devices with
their own memory; the bits below are the offset in it."""
BANKS = 16
COLUMN_GRANULE = 32
"""Columns of products, and of elementwise ops after them, are divided at multiples of this, and of
half of it in steps of at most FEW_TOKENS tokens, whose products have a kernel of their own."""
FEW_TOKENS = 32


def _word(record: np.dtype[np.void], field: str) -> int:
    """The offset of a field in 32-bit words."""
    assert record.fields is not None
    return record.fields[field][1] // 4


CONSTANTS = {
    "OPERANDS": OPERANDS,
    "SIZES": SIZES,
    "REALS": REALS,
    "ABSENT": ABSENT,
    "OWN_MEMORY": OWN_MEMORY,
    "SCRATCH_MEMORY": SCRATCH_MEMORY,
    "INPUT_MEMORY": INPUT_MEMORY,
    "BANK_SHIFT": BANK_SHIFT,
    "BANKS": BANKS,
    "COLUMN_GRANULE": COLUMN_GRANULE,
    "FEW_TOKENS": FEW_TOKENS,
    "SLOT_POSITION": _word(SLOT, "position"),
    "SLOT_LAST_TOKEN": _word(SLOT, "last_token"),
    "STEP_FIRST_EVENT": _word(STEP, "first_event"),
    "EVENT_WORDS": OUTPUT_EVENT.itemsize // 4,
    "MAX_LOG_PROBABILITIES": MAX_LOG_PROBABILITIES,
}
"""The macros that ``accessors.packet_constants`` defines for ``packet.h``."""

ALIGNMENT = 256
"""Alignment of everything in device memory, in bytes."""


def aligned(nbytes: int) -> int:
    """The bytes that ``nbytes`` occupy after alignment; at least one alignment unit."""
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
