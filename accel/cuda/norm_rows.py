"""The rules for norms of few tokens, and for gated activations, that no product computes.

Of a norm a block computes a row, whose values its warps keep in registers; of a gated activation a
thread computes one element."""

from __future__ import annotations

from accel.cuda.device import Device
from accel.cuda.packed_tiles import unit_count
from accel.cuda.products import ALIGNED_FLOATS, MAX_HELD_UNITS, all_aligned
from accel.cuda.runs import operand_indices, size_indices
from accel.cuda.tuned import KernelLaunch, Remaining, Replacement

MAX_WARPS = 16
THREADS = 128
"""Of a block that computes gated activations."""
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
    macros = {
        "WARPS": warps,
        "HELD_UNITS": held,
        **operand_indices(ops, 0, "X_AT=x WEIGHT_AT=weight Y_AT=y"),
        **size_indices("rms_norm", "width", "eps"),
    }
    launch = KernelLaunch("norm_rows", (sizes["tokens"],), 32 * warps, 4 * units, macros)
    return Replacement(1, (launch,))


def gated_rows_rule(ops: Remaining, device: Device) -> Replacement | None:
    """Replaces a single SWIGLU."""
    op = ops[0]
    if op.name != "swiglu":
        return None
    sizes = op.max_sizes()
    if sizes["tokens"] > MAX_TOKENS:
        return None
    macros = {
        "THREADS": THREADS,
        **operand_indices(ops, 0, "GATE_AT=gate UP_AT=up Y_AT=y"),
        **size_indices("swiglu", "width", "activation"),
    }
    launch = KernelLaunch(
        "gated_rows", (-(-sizes["width"] // THREADS), sizes["tokens"]), THREADS, 0, macros
    )
    return Replacement(1, (launch,))
