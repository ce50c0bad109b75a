"""The rule for norms of few tokens that no product computes: a block for a row, whose values its
warps keep in registers."""

from __future__ import annotations

from accel.cuda.device import Device
from accel.cuda.packed_tiles import unit_count
from accel.cuda.products import ALIGNED_FLOATS, MAX_HELD_UNITS, all_aligned
from accel.cuda.runs import operand_indices, size_indices
from accel.cuda.tuned import KernelLaunch, Remaining, Replacement

MAX_WARPS = 16
MAX_TOKENS = 64
"""Most tokens; with more the plain kernel has enough blocks."""


def norm_rows_rule(ops: Remaining, device: Device) -> Replacement | None:
    """Replaces a single RMS_NORM of whole rows."""
    op = ops[0]
    if op.name != "rms_norm":
        return None
    sizes = op.max_sizes()
    units = unit_count(sizes["width"])
    warps = min(MAX_WARPS, units)
    held = -(-units // warps)
    aligned = all_aligned(tensor for tensor in op.operands if tensor is not None)
    if sizes["groups"] != 1 or sizes["tokens"] > MAX_TOKENS or held > MAX_HELD_UNITS:
        return None
    if sizes["width"] % ALIGNED_FLOATS or not aligned:
        return None
    launch = KernelLaunch(
        "norm_rows",
        (sizes["tokens"], 1, 1),
        (32 * warps, 1, 1),
        4 * units,
        {
            "WARPS": warps,
            "HELD_UNITS": held,
            **operand_indices(ops, 0, "X_AT=x WEIGHT_AT=weight Y_AT=y"),
            **size_indices("rms_norm", "width", "eps"),
        },
    )
    return Replacement(1, (launch,))
