"""The CPU tier behind the contract: errors, memory, and its two ways of computing."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from contract.dtypes import F32, Q8_0, DType
from contract.errors import OutOfMemory, UnsupportedOp
from contract.ir.graph import BufferDecl, BufferKind, Graph, GraphBuilder, Node, View
from contract.ir.inputs import input_layout
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from contract.spec import Stage
from reference.cpu.tier import CpuTier
from reference.matrix import Matrix
from reference.ops import DEFINITIONS
from reference.ops.matmul import matmul
from tests.quant.samples import random_blocks
from tests.run_graph import run_graph

VOCAB, HIDDEN, WIDTH = 11, 64, 96


def feed_forward() -> Graph:
    """A token's embedding, normed, gated, added back and projected: one layer in miniature."""
    builder = GraphBuilder("feed forward")

    def weight(name: str, dtype: DType, *shape: int) -> View:
        return builder.buffer(name, BufferKind.WEIGHT, dtype, shape, name)

    x = builder.emit(
        Opcode.EMBED,
        query=builder.request("query", "tokens", 4),
        table=weight("table", Q8_0, VOCAB, HIDDEN),
    )
    h = builder.emit(Opcode.RMS_NORM, x=x, weight=weight("norm", F32, HIDDEN), eps=1e-5)
    gate = builder.emit(Opcode.MATMUL, x=h, weight=weight("gate", Q8_0, WIDTH, HIDDEN))
    up = builder.emit(Opcode.MATMUL, x=h, weight=weight("up", Q8_0, WIDTH, HIDDEN))
    hidden = builder.emit(Opcode.SWIGLU, gate=gate, up=up)
    down = builder.emit(Opcode.MATMUL, x=hidden, weight=weight("down", Q8_0, HIDDEN, WIDTH))
    total = builder.emit(Opcode.ADD, a=x, b=down)
    rows = builder.emit(
        Opcode.SELECT_ROWS, x=total, output_rows=builder.request("output_rows", "rows")
    )
    builder.emit(
        Opcode.LM_HEAD,
        x=rows,
        weight=weight("table", Q8_0, VOCAB, HIDDEN),
        logits=builder.output("logits", "rows", VOCAB),
    )
    return builder.build()


def run(tier: CpuTier, tokens: list[int], rows: list[int]) -> NDArray[np.float32]:
    """Logits of one step."""
    graph = feed_forward()
    query = [(token, 0, position, 0) for position, token in enumerate(tokens)]
    contents: dict[str, NDArray[Any]] = {
        "query": np.array(query, np.int32),
        "output_rows": np.array(rows, np.int32),
    }
    for seed, decl in enumerate(graph.of_kind(BufferKind.WEIGHT)):
        matrix = [int(dim) for dim in (1, *decl.shape)][-2:]
        contents[decl.name] = random_blocks(decl.dtype, *matrix, seed)
    logits = run_graph(tier, graph, ShapeKey(len(tokens), len(rows)), contents)["logits"]
    return logits.view(np.float32).reshape(len(rows), VOCAB)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tokens", [[3], [1, 2, 3, 10, 0], [5] * 40])
def test_fast_kernels_equal_definitions(threads, tokens):
    """A whole graph, scratch reuse included, has the same bits both ways."""
    rows = [len(tokens) - 1, 0]
    with CpuTier(threads) as fast, CpuTier(definitions_only=True) as plain:
        assert (run(fast, tokens, rows) == run(plain, tokens, rows)).all()


def test_step_without_output_rows():
    """A prefill chunk that wants no logits runs."""
    with CpuTier(1) as tier:
        assert run(tier, [1, 2, 3], []).shape == (0, VOCAB)


def test_rows_do_not_depend_on_the_batch():
    """Every token's logits are those it has alone."""
    tokens = [4, 0, 9, 9, 2]
    with CpuTier(2) as tier:
        together = run(tier, tokens, [0, 1, 2, 3, 4])
        for row, token in enumerate(tokens):
            assert (run(tier, [token], [0])[0] == together[row]).all()


def test_missing_opcode_is_named(monkeypatch):
    """Lowering refuses the graph before anything runs."""
    absent = Opcode.SSM_CONV1D
    known = {opcode: function for opcode, function in DEFINITIONS.items() if opcode is not absent}
    monkeypatch.setattr("reference.cpu.tier.DEFINITIONS", known)
    graph = Graph("foreign", Stage.BOTH, {}, (Node("node", absent, {}, {}),))
    with CpuTier(1) as tier, pytest.raises(UnsupportedOp, match=absent.name) as caught:
        tier.lower(graph, {}, ShapeKey(1, 1), input_layout(graph, ShapeKey(1, 1)))
    assert caught.value.opcodes == (absent.name,)


def test_absurd_allocation_is_refused():
    """An exabyte is an error of the tier, not of numpy, and names the buffer."""
    decl = BufferDecl("kv.0", BufferKind.STATE, F32, (1 << 58,))
    with CpuTier(1) as tier, pytest.raises(OutOfMemory, match=r"kv\.0") as caught:
        tier.alloc(decl, 1 << 60)
    assert caught.value.needed == 1 << 60


def test_upload_is_a_view():
    """Weights are mapped, never copied."""
    data = random_blocks(Q8_0, 3, 64, 1)
    with CpuTier(1) as tier:
        buffer = tier.upload(BufferDecl("w", BufferKind.WEIGHT, Q8_0, (3, 64), "w"), data)
        assert np.shares_memory(tier.map(buffer), data)


def multiply(tier: CpuTier, dtype: DType, blocks: NDArray[np.uint8], columns: int) -> np.ndarray:
    """Ones times an uploaded matrix; the buffers are freed again."""
    builder = GraphBuilder("product")
    builder.emit(
        Opcode.MATMUL,
        x=builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", columns)),
        weight=builder.buffer("w", BufferKind.WEIGHT, dtype, (len(blocks), columns), "w"),
        y=builder.output("y", "tokens", len(blocks)),
    )
    contents = {"x": np.ones((1, columns), np.float32), "w": blocks}
    return run_graph(tier, builder.build(), ShapeKey(1, 0), contents)["y"].view(np.float32)


def test_freed_weight_is_forgotten():
    """A second model in the memory of the first gets its own products."""
    blocks = random_blocks(Q8_0, 4, 64, 1)
    ones = np.ones((1, 64), np.float32)
    with CpuTier(1) as tier:
        multiply(tier, Q8_0, blocks, 64)
        blocks[...] = random_blocks(Q8_0, 4, 64, 2)
        expected = matmul(x=ones, weight=Matrix(Q8_0, (4, 64), blocks))[0]
        assert (multiply(tier, Q8_0, blocks, 64) == expected).all()


def test_two_matrices_that_start_at_one_address():
    """A matrix and its first rows are two weights."""
    blocks = random_blocks(Q8_0, 6, 64, 1)
    ones = np.ones((1, 64), np.float32)
    expected = matmul(x=ones, weight=Matrix(Q8_0, (6, 64), blocks))[0]
    with CpuTier(1) as tier:
        builder = GraphBuilder("two")
        x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", 64))
        for name, rows in (("all", 6), ("some", 2)):
            matrix = builder.buffer(name, BufferKind.WEIGHT, Q8_0, (rows, 64), name)
            y = builder.output(f"y.{name}", "tokens", rows)
            builder.emit(Opcode.MATMUL, x=x, weight=matrix, y=y)
        contents = {"x": ones, "all": blocks, "some": blocks[:2]}
        y = run_graph(tier, builder.build(), ShapeKey(1, 0), contents)
        assert (y["y.all"].view(np.float32) == expected).all()
        assert (y["y.some"].view(np.float32) == expected[:2]).all()


def test_absurd_scratch_is_refused():
    """Lowering for more tokens than memory holds is OutOfMemory too."""
    graph = feed_forward()
    with CpuTier(1) as tier:
        layout = input_layout(graph, ShapeKey(1, 1))
        with pytest.raises(OutOfMemory, match="scratch"):
            tier.lower(graph, {}, ShapeKey(2**32 - 1, 1), layout)
