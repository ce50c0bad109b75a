"""The rules for norms of few tokens, gated activations, scaling and addition that no product
computes.

Of a norm a block computes a row, whose values its warps keep in registers; of the others a thread
computes one element."""

from __future__ import annotations

from accel.cuda.device import Device
from accel.cuda.packed_tiles import unit_count
from accel.cuda.products import ALIGNED_FLOATS, MAX_HELD_UNITS, all_aligned
from accel.cuda.runs import are_unread, operand_indices, operand_of, result, size_indices
from accel.cuda.tuned import KernelLaunch, Remaining, Replacement

MAX_WARPS = 16
THREADS = 128
"""Of a block whose threads compute an element each."""
MAX_TOKENS = 64
"""Most tokens; with more the plain kernel has enough blocks."""
MAX_SCALED_TOKENS = 512
"""The same of scaling and addition, which take less time than it takes to start the next launch."""


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


def scaled_rows_rule(ops: Remaining, device: Device) -> Replacement | None:
    """Replaces SCALE and the ADD of its result to something else."""
    if len(ops) < 2 or (ops[0].name, ops[1].name) != ("scale", "add"):
        return None
    sizes, scaled = ops[0].max_sizes(), result(ops[0])
    others = [name for name in ("a", "b") if operand_of(ops[1], name) != scaled]
    if len(others) != 1 or not are_unread(ops, 2, (result(ops[1]),)):
        return None
    if sizes["tokens"] > MAX_SCALED_TOKENS:
        return None
    macros = {
        "THREADS": THREADS,
        **operand_indices(ops, 0, "X_AT=x"),
        **operand_indices(ops, 1, f"A_AT={others[0]} Y_AT=y"),
        **size_indices("scale", "width", "factor"),
    }
    grid = (-(-sizes["width"] // THREADS), sizes["tokens"])
    return Replacement(2, (KernelLaunch("scaled_rows", grid, THREADS, 0, macros),))
