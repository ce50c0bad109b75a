"""The rules for norms of few tokens, gated activations, scaling and addition that no product
computes.

Of a norm a block computes a row, whose values its warps keep in registers; of the others a thread
computes one element."""

from __future__ import annotations

from accel.cuda.device import Device
from accel.cuda.packed_tiles import unit_count
from accel.cuda.products import ALIGNED_FLOATS, MAX_HELD_UNITS, all_aligned
from accel.cuda.runs import ABSENT, are_unread, operand_indices, operand_of, result, size_indices
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
    """Replaces SCALE and the ADD of its result to something else, or one of them."""
    op = ops[0]
    if op.name not in ("scale", "add") or op.max_sizes()["tokens"] > MAX_SCALED_TOKENS:
        return None
    x, term = ("b", "a") if op.name == "add" else ("x", _other_term(ops))
    last = 1 if op.name == "scale" and term else 0
    sizes = op.max_sizes()
    macros = {
        "THREADS": THREADS,
        **operand_indices(ops, 0, f"X_AT={x}"),
        **(operand_indices(ops, last, f"A_AT={term}") if term else {"A_AT": ABSENT}),
        **operand_indices(ops, last, "Y_AT=y"),
        "WIDTH_AT": op.device.sizes.index("width"),
        "FACTOR_AT": op.device.reals.index("factor") if op.name == "scale" else ABSENT,
    }
    grid = (-(-sizes["width"] // THREADS), sizes["tokens"])
    return Replacement(last + 1, (KernelLaunch("scaled_rows", grid, THREADS, 0, macros),))


def _other_term(ops: Remaining) -> str:
    """The operand to which the second op, an ADD, adds the first one's result as its only reader;
    or empty."""
    if len(ops) < 2 or ops[1].name != "add" or not are_unread(ops, 2, (result(ops[1]),)):
        return ""
    terms = {name: operand_of(ops[1], name) == result(ops[0]) for name in ("a", "b")}
    return "" if sum(terms.values()) != 1 else "a" if terms["b"] else "b"
