"""Quantized matrices in units, operands of tensor cores as ``kernels/units.h`` describes them."""

from __future__ import annotations

from accel.cuda.device import Device
from accel.cuda.tuned import ArrangedLayout, Extent, KernelLaunch, Remaining, Replacement
from accel.packets.layouts import WeightLayout
from accel.packets.step import Op
from contract.dtypes import Q4_K, Q5_K, Q6_K, DType, StorageClass
from contract.ir.nodes import BufferDecl

TUNED_STACKS = (Q4_K, Q5_K, Q6_K)
"""Formats whose stacks have the layout of units; other formats have that of the plain kernels."""
UNIT_ROWS = 16
UNIT_COLUMNS = 256
ARRANGING_THREADS = 256
MAX_BLOCKS = 1 << 16
EMBEDDING_THREADS = 256


def unit_count(columns: int) -> int:
    """Consecutive units of a tile of 16 rows; the last is padded with zeros."""
    return -(-columns // UNIT_COLUMNS)


def unit_bytes(dtype: DType) -> int:
    """Bytes of a unit of 16 rows and 256 columns, as many as in the model file."""
    return UNIT_ROWS * UNIT_COLUMNS // dtype.block_elements * dtype.block_bytes


def tile_bytes(dtype: DType, columns: int) -> int:
    """Bytes of 16 whole rows."""
    return unit_count(columns) * unit_bytes(dtype)


def _grid(dtype: DType, columns: int, tiles: int) -> Extent:
    return (min(unit_count(columns) * tiles, MAX_BLOCKS), 1, 1)


UNITS = ArrangedLayout(
    "units_arrange.cu", "arrange_units", UNIT_ROWS, tile_bytes, _grid, ARRANGING_THREADS
)


def unit_layout(decl: BufferDecl, device: Device) -> WeightLayout | None:
    """Every quantized matrix is stored in units; stacks, which products by experts read, in some
    formats."""
    if len(decl.shape) == 3:
        return WeightLayout.UNITS if decl.dtype in TUNED_STACKS else None
    quantized = decl.dtype.storage is not StorageClass.FLOAT
    return WeightLayout.UNITS if quantized and len(decl.shape) == 2 else None


def in_units(op: Op) -> bool:
    """Whether ``op`` is a product by one quantized matrix, which ``unit_layout`` stores in
    units."""
    if op.name != "matmul" or op.dtype is None or op.dtype.storage is StorageClass.FLOAT:
        return False
    return op.matrix is not None and op.max_sizes()["row_pairs"] == 0


def is_stack_in_units(op: Op) -> bool:
    """Whether ``op`` is a product by experts whose matrices ``unit_layout`` stores in units."""
    if op.name != "matmul" or op.dtype not in TUNED_STACKS:
        return False
    return op.matrix is not None and op.max_sizes()["row_pairs"] > 0


def embed_rule(ops: Remaining, device: Device) -> Replacement | None:
    """Replaces EMBED from a table that some product of the step reads too."""
    op = ops[0]
    if op.name != "embed" or op.dtype is None or op.matrix is None:
        return None
    table = op.operands[op.matrix]
    products = (other.operands[other.matrix or 0] for other in ops if in_units(other))
    if table is None or all(m is None or m.buffer != table.buffer for m in products):
        return None
    elements = op.count.maximum * op.max_sizes()["hidden"]
    blocks = max(1, min(-(-elements // EMBEDDING_THREADS), device.multiprocessors))
    macros = {"DTYPE": op.dtype.ggml_id}
    launch = KernelLaunch("units_embed", (blocks,), EMBEDDING_THREADS, 0, macros, op="embed")
    return Replacement(1, (launch,))
