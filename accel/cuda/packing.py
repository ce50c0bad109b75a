"""Launches that pack activations for products of many tokens, and that fold sums of spans."""

from __future__ import annotations

from collections.abc import Sequence

from accel.cuda.device import CLUSTER_CAPABILITY, Device
from accel.cuda.group_shapes import MAX_SPLIT_TOKENS, span_count
from accel.cuda.packed_tiles import UNIT_COLUMNS, unit_count
from accel.cuda.products import Run, residual_operand
from accel.cuda.runs import ABSENT, operand_indices, packet_number, size_indices
from accel.cuda.tuned import KernelLaunch
from accel.packets.step import Op

WARPS = 8
"""Warps of a block whose warps take units of any row."""
MAX_PACKING_BLOCKS = 1 << 12
ROW_WARPS = 16
"""Warps of a block that first makes a norm or folds spans."""
MAX_PIECES = 4
"""Most blocks of such a row; they form a cluster if there is a norm."""
FOUR = 4
"""Tokens of a warp when there are many."""
MAX_FOUR_WARPS = 32
"""Most warps of a block, which has a whole row of units if a norm comes first."""


def pack_launch(
    ops: Sequence[Op], run: Run, device: Device, folded: Run | None = None, half_tokens: int = 0
) -> KernelLaunch:
    """Packs the activations of a run; ``folded`` is the run whose spans are these rows, if any.

    With ``half_tokens``, which only runs that ``packs_fours`` may have, integers are binary16 in
    blocks of that many tokens."""
    assert run.quantize is not None
    quantize = ops[run.quantize]
    tokens, units = quantize.count.maximum, unit_count(quantize.max_sizes()["columns"])
    if folded is None and packs_fours(ops, run):
        return pack_fours(ops, run, tokens, half_tokens)
    whole = run.norm is not None or folded is not None
    pieces = _row_pieces(tokens, units, device) if whole else -(-units // WARPS)
    warps = min(ROW_WARPS if whole else WARPS, -(-units // pieces))
    macros = {
        "WARPS": warps,
        "HELD_UNITS": -(-units // (pieces * warps)),
        "PIECES": pieces,
        "CLUSTER": 1 if run.norm is None else pieces,
        **_fold_macros(ops, folded),
        **_packing_macros(ops, run),
    }
    return KernelLaunch(
        "unit_pack", (min(tokens, MAX_PACKING_BLOCKS) * pieces,), warps * 32, 4 * units, macros
    )


def packs_fours(ops: Sequence[Op], run: Run) -> bool:
    """Whether a warp packs four tokens of the run where no spans are folded."""
    assert run.quantize is not None
    units = unit_count(ops[run.quantize].max_sizes()["columns"])
    fits = run.norm is None or units <= MAX_FOUR_WARPS
    return ops[run.quantize].count.maximum > MAX_SPLIT_TOKENS and fits


def pack_fours(
    ops: Sequence[Op], run: Run, tokens: int, half_tokens: int = 0, **around_experts: int
) -> KernelLaunch:
    """Packs the activations of many tokens; with macros that ``unit_pack_fours.cu`` has
    ``around_experts``."""
    assert run.quantize is not None
    units = unit_count(ops[run.quantize].max_sizes()["columns"])
    warps = min(WARPS, units) if run.norm is None else units
    pieces = -(-units // warps)
    weights = 0 if run.norm is None else 4 * UNIT_COLUMNS * warps
    macros = {
        "WARPS": warps,
        "PIECES": pieces,
        "HALF_TOKENS": half_tokens,
        "FACTORS_AT": ABSENT,
        "GATE_ROW": ABSENT,
        "GATE_LOGIT": ABSENT,
        "EXPERT_PAIRS": 0,
        **_packing_macros(ops, run),
        **around_experts,
    }
    grid = (-(-tokens // FOUR) * pieces,)
    return KernelLaunch("unit_pack_fours", grid, warps * 32, 2 * 4 * FOUR * warps + weights, macros)


def _packing_macros(ops: Sequence[Op], run: Run) -> dict[str, int]:
    """Macros that the launches which pack share."""
    assert run.quantize is not None
    first = run.quantize if run.norm is None else run.norm
    return {
        **operand_indices(ops, first, "x"),
        **operand_indices(ops, run.norm, "NORM_WEIGHT=weight"),
        **operand_indices(ops, run.quantize, "m scale sums"),
        "NORM": packet_number(run.norm),
        "QUANTIZE": run.quantize,
        **size_indices("quantize_activation", "columns"),
        **size_indices("rms_norm", "eps"),
    }


def fold_launch(ops: Sequence[Op], run: Run) -> KernelLaunch:
    """Folds sums of spans that no later run packs."""
    tokens = ops[run.products[0]].count.maximum
    macros = {
        **operand_indices(ops, run.residual, "y"),
        **_fold_macros(ops, run),
        **size_indices("matmul", "rows"),
    }
    return KernelLaunch("unit_fold", (min(tokens, MAX_PACKING_BLOCKS),), ROW_WARPS * 32, 0, macros)


def _row_pieces(tokens: int, units: int, device: Device) -> int:
    """Blocks that share a row: as many as there are multiprocessors for."""
    pieces = 1
    while (
        device.capability >= CLUSTER_CAPABILITY
        and 2 * pieces <= min(MAX_PIECES, units)
        and 2 * pieces * tokens <= device.multiprocessors
    ):
        pieces *= 2
    return pieces


def _fold_macros(ops: Sequence[Op], folded: Run | None) -> dict[str, int]:
    if folded is None:
        return {"FOLDED": packet_number(None)}
    return {
        "FOLDED": folded.products[0],
        **operand_indices(ops, folded.biases[0], "bias"),
        **operand_indices(ops, folded.residual, f"RESIDUAL={residual_operand(ops, folded)}"),
        "SPANS": span_count(ops[folded.products[0]].max_sizes()["columns"]),
    }
