"""A small graph of two dependent ops, on whatever tier."""

from typing import Any

import numpy as np
import pytest

from contract.dtypes import F32
from contract.errors import DeviceLost
from contract.ir.graph import BufferDecl, BufferKind, Graph, GraphBuilder
from contract.ir.inputs import InputLayout, input_layout, pack_inputs
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey

KEY = ShapeKey(3, 0)
WIDTH = 40
STATE = BufferDecl("state", BufferKind.STATE, F32, (4, 4))
"""For tests that only need some memory."""


def doubling() -> Graph:
    """y = 3 (x + x)."""
    builder = GraphBuilder("doubling")
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", WIDTH))
    total = builder.emit(Opcode.ADD, a=x, b=x)
    builder.emit(Opcode.SCALE, x=total, factor=3.0, y=builder.output("y", "tokens", WIDTH))
    return builder.build()


GRAPH = doubling()
LAYOUT = input_layout(GRAPH, KEY)
NBYTES = KEY.tokens * WIDTH * 4


def values_of(number: int) -> np.ndarray:
    """float32[tokens, WIDTH] of a step, of any number of tokens."""
    tokens = KEY.tokens - number % (KEY.tokens + 1)
    return np.random.default_rng(number).standard_normal((tokens, WIDTH), dtype=np.float32)


def inputs_of(values: np.ndarray, layout: InputLayout = LAYOUT) -> np.ndarray:
    """A step whose tokens have ``values``."""
    return pack_inputs(layout, ShapeKey(len(values), 0), {"x": values})


def doubled(values: np.ndarray) -> np.ndarray:
    """What the graph makes of them."""
    return (values + values) * np.float32(3)


class Doubling:
    """The graph lowered on one tier."""

    def __init__(self, tier: Any) -> None:
        self.tier = tier
        self.y = tier.alloc(GRAPH.buffers["y"], NBYTES)
        try:
            self.batch = tier.lower(GRAPH, {"y": self.y}, KEY, LAYOUT)
        except BaseException:
            tier.free(self.y)
            raise

    def run(self, rounds: int = 1, requested: tuple[str, ...] = ("y",)) -> None:
        """New inputs, of any number of tokens, and every result as it should be."""
        for number in range(rounds):
            values = values_of(number)
            fence = self.tier.submit(self.batch, inputs_of(values), requested)
            self.tier.wait(fence)
            for name in requested:
                self.check(fence.outputs[name], values)
            got = self.tier.map(self.y)[: values.nbytes]
            self.check(got, values)

    def check(self, got: np.ndarray, values: np.ndarray) -> None:
        """The bytes of y are those of 3 (x + x)."""
        assert np.array_equal(got.view(np.float32).reshape(-1, WIDTH), doubled(values))

    def assert_lost(self) -> None:
        """Every way to use the tier says that its device is lost; the tier is closed."""
        with pytest.raises(DeviceLost):
            self.tier.submit(self.batch, inputs_of(values_of(0)))
        with pytest.raises(DeviceLost):
            self.tier.alloc(STATE, 64)
        self.tier.free(self.y)
        self.tier.close()


def run_doubling(tier: Any, rounds: int = 1) -> None:
    """A graph lowered, run and forgotten."""
    lowered = Doubling(tier)
    try:
        lowered.run(rounds)
    finally:
        tier.free(lowered.y)
