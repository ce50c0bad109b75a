"""The rule for gate and up if devices share a step of some tens of tokens.

A device has few rows of both matrices, so blocks share rows and write sums of spans. A separate
launch adds these up, packs the gated activations and stores them on every device. Packed integers
are half as many bytes as the activations, and each device packs only its own columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from accel.cuda.device import Device
from accel.cuda.gathers import PART, WHOLE, packed_on_all
from accel.cuda.group_shapes import MAX_SPLIT_TOKENS, parted_shape, span_count
from accel.cuda.matrices import group_launch, has_groups, replaced_run, run_of_many, span_bytes
from accel.cuda.packed_tiles import UNIT_COLUMNS
from accel.cuda.packing import pack_launch
from accel.cuda.products import Run, shifted_run
from accel.cuda.runs import operand_indices, result, size_indices, source
from accel.cuda.split_k_products import MAX_TOKENS as SPLIT_K_TOKENS
from accel.cuda.tuned import KernelLaunch, Remaining, Replacement
from accel.packets.shares import ALL_GATHER
from accel.packets.step import Op

EIGHT = 8
"""Tokens that a block packs."""
PACKED_BYTES = EIGHT * (512 + 32 + 4)


def gated_spans_rule(ops: Remaining, device: Device) -> Replacement | None:
    """Replaces gate and up, what gathers their activation, and the product that reads it.

    All that decides is the same on every device."""
    run = run_of_many(ops, device)
    if run is None or run.gate is None or not has_groups(device):
        return None
    product, gather = ops[run.products[0]], run.length
    if not SPLIT_K_TOKENS < product.count.maximum <= MAX_SPLIT_TOKENS:
        return None
    if len(ops) < gather + 2 or span_count(product.max_sizes()["columns"]) < 2:
        return None
    behind = _reader(ops, run, device)
    if behind is None:
        return None
    assert product.dtype is not None
    sizes = product.max_sizes()
    apart = replace(run, gate=None)
    rows = [sizes["rows"]] * 2
    shape = parted_shape(product.dtype, sizes["columns"], product.count.maximum, rows, device)
    launches = (
        pack_launch(ops, run, device),
        group_launch(ops, apart, (0, 1), shape, device),
        _packing(ops, run, behind),
    )
    replaced = replaced_run(ops, behind, device)
    return replace(
        replaced,
        launches=(*launches, *replaced.launches[1:]),
        transient_bytes=max(replaced.transient_bytes, span_bytes(ops, apart)),
    )


def _reader(ops: Remaining, run: Run, device: Device) -> Run | None:
    """The run of the product that alone reads the gated activation, of which every device has as
    many whole units."""
    gather = ops[run.length]
    whole = gather.operands[WHOLE] if gather.device is ALL_GATHER else None
    if whole is None or gather.operands[PART] != result(ops[run.gate or 0]):
        return None
    if whole.columns % (gather.max_sizes()["devices"] * UNIT_COLUMNS):
        return None
    following = Remaining(ops.step, ops.start + run.length + 1, ops.last_read)
    found = run_of_many(following, device)
    if found is None or found.norm is not None:
        return None
    found = shifted_run(found, run.length + 1)
    assert found.quantize is not None
    same = ops[found.quantize].count == ops[run.products[0]].count
    if source(ops[found.quantize]) != whole or not same:
        return None
    return None if ops.is_read_after(whole.buffer, found.quantize + 1) else found


def _packing(ops: Sequence[Op], run: Run, behind: Run) -> KernelLaunch:
    product = ops[run.products[0]]
    sizes, quantize = product.max_sizes(), behind.quantize
    assert quantize is not None
    eights = -(-product.count.maximum // EIGHT)
    macros = {
        "PRODUCT": run.products[0],
        "GATE": run.gate or 0,
        "QUANTIZE": quantize,
        "SPANS": span_count(sizes["columns"]),
        **operand_indices(ops, quantize, "m scale sums"),
        **size_indices("matmul", "rows"),
        **size_indices("swiglu", "activation"),
    }
    launch = KernelLaunch(
        "gated_pack", (eights * (sizes["rows"] // UNIT_COLUMNS),), EIGHT * 32, PACKED_BYTES, macros
    )
    units = ops[quantize].max_sizes()["columns"] // UNIT_COLUMNS
    return packed_on_all(launch, ops, run.length, quantize, units)
