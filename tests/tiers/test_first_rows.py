"""Products with the first rows of a matrix that a tier holds once, in every format."""

from __future__ import annotations

import numpy as np
import pytest

from contract.dtypes import F16, F32, Q4_K, Q8_0, WEIGHT_DTYPES, DType
from contract.ir.codec import decode, encode
from contract.ir.graph import BufferKind, Graph, GraphBuilder, View
from contract.ir.inputs import input_layout, pack_inputs
from contract.ir.scratch import buffer_bytes
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from contract.tier import Tier
from harness.synth.draw import draw_matrix
from reference.quant.dot import matmul
from tests.tiers.conftest import each
from tests.tiers.ways import MODELS

ROWS, COLUMNS = 100, 256
LARGEST = ShapeKey(20, 20)
OTHERS = [name for name in MODELS if name != "native"]
PARTS = (1, 48, 61)
"""Numbers of rows: one, whole groups of 16, and neither."""


def products(dtype: DType) -> Graph:
    """``whole`` = x weight^T, and its first columns from the first rows of the same weight."""
    b = GraphBuilder("first rows")
    x = b.buffer("x", BufferKind.REQUEST, F32, ("rows", COLUMNS))
    weight = b.buffer("weight", BufferKind.WEIGHT, dtype, (ROWS, COLUMNS), source="weight")
    b.emit(Opcode.LM_HEAD, x=x, weight=weight, logits=b.output("whole", "rows", ROWS))
    for rows in PARTS:
        part = b.output(f"first {rows}", "rows", rows)
        b.emit(Opcode.LM_HEAD, x=x, weight=View("weight", rows=rows), logits=part)
    return decode(encode(b.build()))


@pytest.mark.parametrize("way", each("cpu", "native"), indirect=True, scope="module")
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
def test_they_are_the_first_results(tier: Tier, dtype: DType) -> None:
    check(tier, dtype)


@pytest.mark.parametrize("way", each(*OTHERS), indirect=True, scope="module")
@pytest.mark.parametrize("dtype", [F16, Q8_0, Q4_K], ids=str)
def test_on_tiers_that_compile_kernels_for_a_format(tier: Tier, dtype: DType) -> None:
    """One format of each class: floats, blocks, super-blocks."""
    check(tier, dtype)


def check(tier: Tier, dtype: DType) -> None:
    """Results of one token, a few and many are those of the definition of the product."""
    graph = products(dtype)
    stored = np.concatenate([*draw_matrix(3, "w", dtype, ROWS, COLUMNS, 1.0)])
    tier.reserve(graph, LARGEST)
    layout = input_layout(graph, LARGEST)
    buffers = {
        decl.name: tier.upload(decl, stored)
        if decl.kind is BufferKind.WEIGHT
        else tier.alloc(decl, buffer_bytes(decl, LARGEST))
        for decl in graph.buffers.values()
        if decl.kind in (BufferKind.WEIGHT, BufferKind.OUTPUT)
    }
    names = ("whole", *(f"first {rows}" for rows in PARTS))
    batch = tier.lower(graph, buffers, LARGEST, layout)
    for tokens in (1, 4, LARGEST.rows):
        drawn = np.random.default_rng(tokens).standard_normal((tokens, COLUMNS), np.float32)
        expected = matmul(stored, dtype, drawn)
        fence = tier.submit(
            batch, pack_inputs(layout, ShapeKey(tokens, tokens), {"x": drawn}), names
        )
        tier.wait(fence)
        for name, rows in zip(names, (ROWS, *PARTS), strict=True):
            got = fence.outputs[name].view(np.float32).reshape(tokens, rows)
            assert np.array_equal(got, expected[:, :rows]), name
    for buffer in buffers.values():
        tier.free(buffer)
