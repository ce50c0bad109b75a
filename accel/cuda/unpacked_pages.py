"""Attention over pages of rotated rows: their pages are unpacked to I12 pages, and the kernels for
these do the rest.

Codes times their scales are I12 integers (rule R13), so nothing is rounded. The unpacked pages of
one layer lie in memory of the step."""

from __future__ import annotations

from dataclasses import replace

from accel.cuda.device import Device
from accel.cuda.runs import operand_indices
from accel.cuda.tuned import KernelLaunch, Remaining, Replacement
from accel.packets.device_op import ANY, DeviceOp, DeviceOperand
from accel.packets.step import Op, Step, Tensor
from contract.dtypes import I12, ROTATED_KV
from contract.ir.graph import Graph
from contract.ir.scratch import buffer_bytes
from contract.shape_key import ShapeKey

WARPS = 8
BLOCKS_PER_MULTIPROCESSOR = 4
UNPACKED = "unpacked_pages"
"""The buffer of the unpacked pages, of one layer at a time."""
ATTENTION = ("flash_attn_part", "flash_attn_batched")

UNPACK_PAGES = DeviceOp(
    "unpack_pages",
    (
        DeviceOperand("kv", "uchar"),
        DeviceOperand("page_table", "int"),
        DeviceOperand("query", "int"),
        DeviceOperand("y", "uchar", written=True),
    ),
    ("tokens", "kv_heads", "head_dim", "window"),
    (),
    lambda tokens, kv_heads, **_: tokens * kv_heads,
    True,
    False,
    "unpack_pages",
)
"""Writes to ``y`` the I12 pages of what the tokens see of ``kv``, under the same page numbers."""


def unpack_rotated(step: Step, graph: Graph, bucket: ShapeKey) -> Step:
    """The lowered ``step`` with an UNPACK_PAGES before every attention over rotated rows, which
    then reads I12 pages."""
    ops: list[Op] = []
    scratch = dict(step.scratch)
    for op in step.ops:
        if op.name not in ATTENTION or op.dtype not in ROTATED_KV:
            ops.append(op)
            continue
        names = op.device.index_of
        kv = op.operands[names["kv"]]
        assert kv is not None
        row = I12.row_bytes(op.max_sizes()["head_dim"])
        pages = Tensor(UNPACKED, 0, row, row, 1)
        decl = replace(graph.buffers[kv.buffer], dtype=I12)
        scratch[UNPACKED] = max(scratch.get(UNPACKED, 0), buffer_bytes(decl, bucket))
        ops += [_unpacking(op, pages), _reading(op, names["kv"], pages)]
    return Step(ops, scratch)


def with_own_pages(own: Step, whole: Step) -> Step:
    """The part ``own`` of the step ``whole`` with as much room for unpacked pages as those of its
    heads need."""
    needed, had = (
        max([0, *(_rows_bytes(op) for op in step.ops if op.device is UNPACK_PAGES)])
        for step in (own, whole)
    )
    if needed == had:
        return own
    room = own.scratch[UNPACKED] // had * needed
    return Step(own.ops, {**own.scratch, UNPACKED: room})


def _rows_bytes(op: Op) -> int:
    """Bytes of the unpacked keys of one position."""
    sizes = op.max_sizes()
    return sizes["kv_heads"] * I12.row_bytes(sizes["head_dim"])


def _unpacking(op: Op, pages: Tensor) -> Op:
    read = (op.operands[op.device.index_of[name]] for name in ("kv", "page_table", "query"))
    sizes = op.max_sizes()
    known = tuple(sizes[name] for name in UNPACK_PAGES.sizes[1:])
    return Op(UNPACK_PAGES, (*read, pages), (ANY,) * 4, op.count, known, dtype=op.dtype)


def _reading(op: Op, index: int, pages: Tensor) -> Op:
    operands = (*op.operands[:index], pages, *op.operands[index + 1 :])
    return replace(op, operands=operands, dtype=I12)


def unpack_rule(ops: Remaining, device: Device) -> Replacement | None:
    """Replaces UNPACK_PAGES."""
    op = ops[0]
    if op.device is not UNPACK_PAGES:
        return None
    sizes = op.max_sizes()
    assert op.dtype is not None
    macros = {
        "DTYPE": op.dtype.ggml_id,
        "HEAD_DIM": sizes["head_dim"],
        "KV_HEADS": sizes["kv_heads"],
        "WINDOW": max(sizes["window"], 0),  # Of chunks all pages are unpacked.
        **operand_indices(ops, 0, "KV_AT=kv PAGES_AT=page_table QUERY_AT=query Y_AT=y"),
    }
    launch = KernelLaunch(
        "unpack_pages", (device.multiprocessors * BLOCKS_PER_MULTIPROCESSOR,), WARPS * 32, 0, macros
    )
    return Replacement(1, (launch,))
