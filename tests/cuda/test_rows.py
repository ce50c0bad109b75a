"""Norms and gated activations by themselves on emulated blocks."""

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
from reference.ops.rms_norm import rms_norm
from reference.ops.swiglu import swiglu
from tests.cuda.emulated_step import DEVICE, aligned_memory, in_device_memory, run_step

WIDTH = 150
"""No whole number of blocks."""
EPS = 1e-6
SIZES = ShapeKey(3, 0), ShapeKey(5, 0)
"""Fewer tokens than the form has."""


def gated(activation: int) -> Graph:
    builder = GraphBuilder("gated")
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", 2 * WIDTH))
    parts = {"gate": x[0:WIDTH], "up": x[WIDTH : 2 * WIDTH]}
    y = builder.output("y", "tokens", WIDTH)
    builder.emit(Opcode.SWIGLU, **parts, y=y, activation=activation)
    return builder.build()


def normed(width: int, weighted: bool, at: int = 0) -> Graph:
    """Of the columns from ``at`` on, and of those in front of them."""
    builder = GraphBuilder("normed")
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", at + width))
    weight = builder.buffer("w", BufferKind.WEIGHT, F32, (width,)) if weighted else None
    y = builder.output("y", "tokens", at + width)
    if at:
        builder.emit(Opcode.RMS_NORM, x=x[0:at], y=y[0:at], eps=EPS)
    columns = slice(at, at + width)
    more = {"weight": weight} if weighted else {}
    builder.emit(Opcode.RMS_NORM, x=x[columns], y=y[columns], eps=EPS, **more)
    return builder.build()


@pytest.mark.parametrize("activation", range(5))
def test_every_activation(activation: int, folder: Path) -> None:
    x = np.random.default_rng(4).standard_normal((3, 2 * WIDTH)).astype(np.float32) * 9
    y = aligned_memory(5 * WIDTH * 4).view(np.float32).reshape(5, WIDTH)
    run_step(gated(activation), SIZES, {"x": x}, {"y": y}, {}, folder)
    want = swiglu(gate=x[:, :WIDTH], up=x[:, WIDTH:], activation=activation)
    assert np.array_equal(y[:3], want)
    assert np.isnan(y[3:]).all()


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("width", [64, 256, 1100, 4096, 4100, 16384])
def test_every_width(width: int, weighted: bool, folder: Path) -> None:
    """Columns behind others, values of all sizes and NaN."""
    random = np.random.default_rng(4)
    x = random.standard_normal((3, 8 + width)).astype(np.float32)
    x *= np.float32(10.0) ** random.integers(-9, 9, x.shape)
    x[1, 12] = np.nan
    weight = in_device_memory(random.standard_normal(width).astype(np.float32))
    y = aligned_memory(5 * (8 + width) * 4).view(np.float32).reshape(5, 8 + width)
    kept = {"y": y} | ({"w": weight} if weighted else {})
    run_step(normed(width, weighted, 8), SIZES, {"x": x}, kept, {}, folder)
    for columns, of in ((slice(8), None), (slice(8, None), weight if weighted else None)):
        want = rms_norm(x=x[:, columns], weight=of, eps=EPS)
        assert np.array_equal(y[:3, columns], want, equal_nan=True)
    assert np.isnan(y[3:]).all()


@pytest.mark.parametrize(
    ("tokens", "graph"),
    [
        (MAX_TOKENS + 1, gated(0)),
        (MAX_TOKENS + 1, normed(256, True, 8)),
        *((4, normed(width, True, at)) for width, at in ((255, 0), (256, 2), (20480, 0))),
    ],
    ids=["gates", "tokens", "width", "start", "length"],
)
def test_other_rows_are_the_plain_kernels(tokens: int, graph: Graph) -> None:
    """Many tokens, which are blocks enough, rows that are not read 16 bytes at a time, and rows
    that are too long."""
    step = lower_graph(graph, ShapeKey(tokens, 0), 1, "cuda")
    assert plain_ops(plan_launches(step.ops, DEVICE, step.scratch)) == [*range(len(step.ops))]


def scaled(nodes: tuple[str, ...]) -> Graph:
    """Nodes over a row's first half; ADD takes the second, the third node what was scaled."""
    builder = GraphBuilder("scaled")
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", 2 * WIDTH))
    y = builder.output("y", "tokens", WIDTH)
    made = [x[0:WIDTH]]
    for number, node in enumerate(nodes):
        to = y if number + 1 == len(nodes) else builder.scratch(f"t{number}", "tokens", WIDTH)
        if node == "scale":
            builder.emit(Opcode.SCALE, x=made[-1], y=to, factor=0.3)
        else:
            terms = [made[1] if number == 2 else x[WIDTH : 2 * WIDTH], made[-1]]
            a, b = terms[::-1] if node == "add to" else terms
            builder.emit(Opcode.ADD, a=a, b=b, y=to)
        made.append(to)
    return builder.build()


@pytest.mark.parametrize("last", ["add", "add to"])
def test_addition_of_what_is_scaled(last: str, folder: Path) -> None:
    """One launch, in either order of the sum."""
    graph = scaled(("scale", last))
    x = np.random.default_rng(6).standard_normal((3, 2 * WIDTH)).astype(np.float32)
    y = aligned_memory(5 * WIDTH * 4).view(np.float32).reshape(5, WIDTH)
    run_step(graph, SIZES, {"x": x}, {"y": y}, {}, folder)
    assert np.array_equal(y[:3], x[:, WIDTH:] + x[:, :WIDTH] * np.float32(0.3))
    assert np.isnan(y[3:]).all()


def test_what_is_scaled_and_read_twice_keeps_the_plain_kernels() -> None:
    step = lower_graph(scaled(("scale", "add", "add")), SIZES[1], 1, "cuda")
    entries = [launch.entry for launch in plan_launches(step.ops, DEVICE).launches]
    assert entries == ["launch_scale", "launch_add", "launch_add"]
