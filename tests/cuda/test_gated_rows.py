"""A gated activation by itself on emulated blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from accel.cuda.norm_rows import MAX_TOKENS
from accel.cuda.plan import plain_ops, plan_launches
from accel.packets.rules import lower_graph
from contract.dtypes import F32
from contract.ir.graph import BufferKind, Graph, GraphBuilder
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from reference.ops.swiglu import swiglu
from tests.cuda.emulated_step import DEVICE, aligned_memory, run_step

WIDTH = 150
"""No whole number of blocks."""


def gated(activation: int) -> Graph:
    builder = GraphBuilder("gated")
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", 2 * WIDTH))
    y = builder.output("y", "tokens", WIDTH)
    builder.emit(
        Opcode.SWIGLU, gate=x[0:WIDTH], up=x[WIDTH : 2 * WIDTH], y=y, activation=activation
    )
    return builder.build()


@pytest.mark.parametrize("activation", range(5))
def test_every_activation(activation: int, folder: Path) -> None:
    """Fewer tokens than the form has."""
    x = np.random.default_rng(4).standard_normal((3, 2 * WIDTH)).astype(np.float32) * 9
    y = aligned_memory(5 * WIDTH * 4).view(np.float32).reshape(5, WIDTH)
    sizes = ShapeKey(3, 0), ShapeKey(5, 0)
    run_step(gated(activation), sizes, {"x": x}, {"y": y}, {}, folder)
    want = swiglu(gate=x[:, :WIDTH], up=x[:, WIDTH:], activation=activation)
    assert np.array_equal(y[:3], want)
    assert np.isnan(y[3:]).all()


def test_many_tokens_are_the_plain_kernels() -> None:
    """Where that has blocks enough."""
    step = lower_graph(gated(0), ShapeKey(MAX_TOKENS + 1, 0), 1, "cuda")
    assert plain_ops(plan_launches(step.ops, DEVICE, step.scratch)) == [0]
