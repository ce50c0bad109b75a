"""The rule for copies of a device's own heads of pages, see ``accel.packets.head_shares``."""

from __future__ import annotations

from accel.cuda.device import Device
from accel.cuda.runs import operand_indices
from accel.cuda.tuned import KernelLaunch, Remaining, Replacement
from accel.packets.head_shares import COPY_HEADS

THREADS = 256
BLOCKS_PER_MULTIPROCESSOR = 8


def copy_heads_rule(ops: Remaining, device: Device) -> Replacement | None:
    """Replaces COPY_HEADS."""
    op = ops[0]
    if op.device is not COPY_HEADS:
        return None
    sizes = op.max_sizes()
    blocks = -(-sizes["rows"] * sizes["stretches"] * sizes["words"] // THREADS)
    macros = {
        **operand_indices(ops, 0, "SOURCE_AT=source PAIRS_AT=pairs TARGET_AT=target"),
        **{
            f"COPY_HEADS_{name}".upper(): COPY_HEADS.sizes.index(name)
            for name in COPY_HEADS.sizes[1:]
        },
    }
    grid = min(blocks, device.multiprocessors * BLOCKS_PER_MULTIPROCESSOR)
    return Replacement(1, (KernelLaunch("copy_heads", (grid,), THREADS, 0, macros),))
