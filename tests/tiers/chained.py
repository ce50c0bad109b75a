"""A graph whose steps depend on those before, and the same lowered on one tier."""

from collections.abc import Mapping

import numpy as np

from contract.dtypes import F32
from contract.ir.graph import BufferKind, Graph, GraphBuilder
from contract.ir.inputs import input_layout, pack_inputs
from contract.ir.scratch import buffer_bytes
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from contract.tier import Fence, Tier

LARGEST = ShapeKey(64, 64)
WIDTH = 1200
"""Floats of a row: outputs of the largest step are above what is always brought to the host."""


def chained() -> Graph:
    """A convolution that goes on where the step before ended, and rows kept for later."""
    b = GraphBuilder("chained")
    x = b.buffer("x", BufferKind.REQUEST, F32, ("tokens", WIDTH))
    query, pairs = b.request("query", "tokens", 4), b.request("pairs", "rows", 2)
    weight = b.buffer("weight", BufferKind.WEIGHT, F32, (WIDTH, 3), source="weight")
    state = b.buffer("state", BufferKind.STATE, F32, (1, 2, WIDTH))
    memory = b.buffer("memory", BufferKind.STATE, F32, (LARGEST.tokens, WIDTH))
    product, folded = b.output("product", "tokens", WIDTH), b.output("folded", "tokens", WIDTH)
    b.emit(Opcode.SCALE, x=x, factor=3.0, y=product)
    conv = {"weight": weight, "query": query, "state": state, "history": 2}
    b.emit(Opcode.SSM_CONV1D, x=x, y=folded, **conv)
    b.emit(Opcode.COPY_ROWS, source=product, pairs=pairs, target=memory)
    return b.build()


GRAPH = chained()
LAYOUT = input_layout(GRAPH, LARGEST)
WEIGHT = np.random.default_rng(0).standard_normal((WIDTH, 3), np.float32).view(np.uint8)


def step_block(tokens: int, seed: int) -> np.ndarray:
    """Random values of tokens that go on with one sequence; one row of memory is moved."""
    rng = np.random.default_rng(seed)
    query = np.zeros((tokens, 4), np.int32)
    query[:, 2] = 100 + np.arange(tokens)
    arrays = {
        "x": rng.standard_normal((tokens, WIDTH), np.float32),
        "query": query,
        "pairs": np.array([[tokens - 1, 8 + seed % 3]], np.int32),
    }
    return pack_inputs(LAYOUT, ShapeKey(tokens, 1), arrays)


class Lowered:
    """The graph on one tier, its memory holding known values."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.buffers = {"weight": tier.upload(GRAPH.buffers["weight"], WEIGHT)}
        for name in ("state", "memory", "product", "folded"):
            nbytes = buffer_bytes(GRAPH.buffers[name], LARGEST)
            self.buffers[name] = tier.alloc(GRAPH.buffers[name], nbytes)
        values = np.random.default_rng(1).standard_normal((LARGEST.tokens, WIDTH), np.float32)
        tier.write(self.buffers["memory"], 0, values.reshape(-1).view(np.uint8))
        self.batch = tier.lower(GRAPH, self.buffers, LARGEST, LAYOUT)

    def submit(self, block: np.ndarray, *requested: str) -> Fence:
        return self.tier.submit(self.batch, block, requested)

    def outputs(self, block: np.ndarray) -> dict[str, np.ndarray]:
        """Both outputs of a step that is waited for."""
        fence = self.submit(block, "product", "folded")
        self.tier.wait(fence)
        return dict(fence.outputs)

    def states(self) -> list[np.ndarray]:
        buffers = [self.buffers[name] for name in ("state", "memory")]
        return [self.tier.read(buffer, 0, buffer.nbytes) for buffer in buffers]

    def free(self) -> None:
        """Give its memory back."""
        for buffer in self.buffers.values():
            self.tier.free(buffer)


def same(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)
