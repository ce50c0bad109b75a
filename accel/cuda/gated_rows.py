"""The rule for gated activations that no product computes: one element a thread, where the plain
kernel has sixteen."""

from __future__ import annotations

from accel.cuda.device import Device
from accel.cuda.runs import operand_indices, size_indices
from accel.cuda.tuned import KernelLaunch, Remaining, Replacement

THREADS = 128
MAX_TOKENS = 64
"""Most tokens; with more the plain kernel has enough blocks."""


def gated_rows_rule(ops: Remaining, device: Device) -> Replacement | None:
    """Replaces a single SWIGLU."""
    op = ops[0]
    if op.name != "swiglu":
        return None
    sizes = op.max_sizes()
    if sizes["tokens"] > MAX_TOKENS:
        return None
    launch = KernelLaunch(
        "gated_rows",
        (-(-sizes["width"] // THREADS), sizes["tokens"], 1),
        (THREADS, 1, 1),
        macros={
            "THREADS": THREADS,
            **operand_indices(ops, 0, "GATE_AT=gate UP_AT=up Y_AT=y"),
            **size_indices("swiglu", "width", "activation"),
        },
    )
    return Replacement(1, (launch,))
