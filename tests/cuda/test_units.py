"""Units: the bits of the model file in another order, read back as an embedding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from accel.cuda.packed_tiles import tile_bytes, unit_bytes
from contract.dtypes import I32, DType, StorageClass
from contract.ir.graph import BufferKind, GraphBuilder
from contract.opcodes import Opcode
from contract.records import QUERY_TOKEN
from contract.shape_key import ShapeKey
from reference.quant import FORMATS
from reference.quant.dot import matmul
from tests.cuda.emulated_step import aligned_memory, arranged, run_step

QUANTIZED = [dtype for dtype in FORMATS if dtype.storage is not StorageClass.FLOAT]
ROWS, TOKENS = 37, 3


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_a_tied_table_is_read_element_by_element(dtype: DType, folder: Path) -> None:
    """EMBED and the product of the output, of one table of random bytes kept in units."""
    columns = 512 + (64 if dtype.block_elements == 32 else 0)
    rng = np.random.default_rng(dtype.ggml_id)
    values = rng.standard_normal((ROWS, columns)).astype(np.float32)
    table = FORMATS[dtype].quantize(values)
    builder = GraphBuilder("tied")
    query = builder.buffer("query", BufferKind.REQUEST, I32, ("tokens", 4))
    w = builder.buffer("w", BufferKind.WEIGHT, dtype, (ROWS, columns))
    x = builder.emit(Opcode.EMBED, query=query, table=w, y=builder.output("x", "tokens", columns))
    builder.emit(Opcode.MATMUL, x=x, weight=w, y=builder.output("y", "tokens", ROWS))
    tokens = np.zeros(TOKENS, QUERY_TOKEN)
    tokens["token"] = 0, ROWS - 1, 17
    kept = {
        name: aligned_memory(TOKENS * size * 4).view(np.float32).reshape(TOKENS, size)
        for name, size in (("x", columns), ("y", ROWS))
    }
    inputs = {"query": tokens.view(np.int32).reshape(TOKENS, 4)}
    key = ShapeKey(TOKENS, 0)
    run_step(builder.build(), (key, key), inputs, kept, {"w": (dtype, table)}, folder)
    want = FORMATS[dtype].dequantize(table[tokens["token"]])
    assert np.array_equal(kept["x"], want)
    assert np.array_equal(kept["y"], matmul(table, dtype, want))


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_units_hold_the_bits_of_the_file_and_no_others(dtype: DType, folder: Path) -> None:
    """Every set bit of a whole tile is one of the file's, and rows that are not there are zeros."""
    columns = 512
    rng = np.random.default_rng(3)
    stored = rng.integers(0, 256, (16, dtype.row_bytes(columns)), np.uint8)
    whole = arranged(dtype, stored, folder)
    assert whole.size == tile_bytes(dtype, columns) == 2 * unit_bytes(dtype) == stored.size
    assert np.bitwise_count(whole).sum() == np.bitwise_count(stored).sum()
    some = arranged(dtype, stored[:5], folder)
    assert np.bitwise_count(some).sum() == np.bitwise_count(stored[:5]).sum()
