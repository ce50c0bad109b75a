"""Graphs of products with what their buffers hold, and running them on an emulated block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from accel.cuda.device import Device
from accel.cuda.plan import Plan, plan_launches
from accel.packets.rules import lower_graph
from accel.packets.step import Step
from contract import dtypes
from contract.dtypes import F32, DType
from contract.ir.graph import BufferKind, Graph, GraphBuilder, View
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from reference.ops.rms_norm import rms_norm
from reference.ops.swiglu import swiglu
from reference.quant import FORMATS
from reference.quant.dot import matmul
from tests.cuda.emulated_step import DEVICE, aligned_memory, in_device_memory, run_step

WIDE = replace(DEVICE, multiprocessors=132)
EVEN = replace(DEVICE, multiprocessors=4)
"""Whose blocks share columns two by two."""
Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]
QUANTIZED = sorted(
    (dtype for dtype in FORMATS if dtype.storage is not F32.storage), key=lambda d: d.ggml_id
)


@dataclass(frozen=True)
class Case:
    """A graph with what its buffers hold. ``y`` names the results."""

    graph: Graph
    x: Float32
    matrices: Mapping[str, tuple[DType, Bytes]]
    vectors: Mapping[str, Float32]


def planned(case: Case) -> tuple[Step, Plan]:
    step = lower_graph(case.graph, ShapeKey(len(case.x), 0), 1, "cuda")
    return step, plan_launches(step.ops, DEVICE, step.scratch)


def run(case: Case, folder: Path, most: int = 0, device: Device = DEVICE) -> dict[str, Float32]:
    """Every output of the graph, in a form of ``most`` tokens; no plain kernel may be left."""
    key = ShapeKey(len(case.x), 0)
    bucket = ShapeKey(max(most, len(case.x)), 0)
    outputs: dict[str, Float32] = {
        decl.name: aligned_memory(bucket.tokens * int(decl.shape[-1]) * 4)
        .view(np.float32)
        .reshape(bucket.tokens, -1)
        for decl in case.graph.of_kind(BufferKind.OUTPUT)
    }
    kept = {name: in_device_memory(vector) for name, vector in case.vectors.items()}
    sizes, results = (key, bucket), kept | outputs
    run_step(case.graph, sizes, {"x": case.x}, results, case.matrices, folder, device=device)
    return {name: values[: len(case.x)] for name, values in outputs.items()}


def check_product(case: Case, folder: Path, most: int = 0, device: Device = DEVICE) -> None:
    """The product of ``one_product`` has the definition's bits."""
    dtype, stored = case.matrices["w"]
    got = run(case, folder, most, device)["y"]
    assert np.array_equal(got, matmul(stored, dtype, case.x), equal_nan=True)


def entries(case: Case, most: int, device: Device = DEVICE) -> list[str]:
    """The launches of a form of so many tokens."""
    step = lower_graph(case.graph, ShapeKey(most, 0), 1, "cuda")
    return [launch.entry for launch in plan_launches(step.ops, device, step.scratch).launches]


def activations(tokens: int, columns: int, seed: int) -> Float32:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, columns)) * 10.0 ** rng.uniform(-5, 3, (tokens, 1))
    x[rng.random(x.shape) < 0.02] *= 40
    return x.astype(np.float32)


def weights(dtype: DType, rows: int, columns: int, seed: int) -> Bytes:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, columns)) * 10.0 ** rng.uniform(-2, 1, (rows, 1))
    return FORMATS[dtype].quantize(values.astype(np.float32))


def one_product(
    dtype: DType, rows: int, columns: int, tokens: int, given: Bytes | None = None
) -> Case:
    builder = GraphBuilder("product")
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", columns))
    w = builder.buffer("w", BufferKind.WEIGHT, dtype, (rows, columns))
    builder.emit(Opcode.MATMUL, x=x, weight=w, y=builder.output("y", "tokens", rows))
    stored = weights(dtype, rows, columns, rows) if given is None else given
    x_values = activations(tokens, columns, dtype.ggml_id)
    return Case(builder.build(), x_values, {"w": (dtype, stored)}, {})


def spans(dtype: DType, biased: bool, tokens: int, normed: bool = True) -> Case:
    """A product of 256 rows and 21 units with a residual, a norm of the sum and its product."""
    columns, hidden = 5 * 1024 + 256, 256
    builder = GraphBuilder("spans")
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", columns))
    matrices = {
        "first": (dtype, weights(dtype, hidden, columns, 1)),
        "second": (dtypes.Q4_K, weights(dtypes.Q4_K, 48, hidden, 2)),
    }
    vectors = {"norm": activations(1, hidden, 3)[0], "bias": activations(1, hidden, 4)[0]}
    kept = {name: builder.buffer(name, BufferKind.WEIGHT, F32, (hidden,)) for name in vectors}
    first = builder.buffer("first", BufferKind.WEIGHT, dtype, (hidden, columns))
    product = builder.emit(Opcode.MATMUL, x=x, weight=first)
    if biased:
        product = builder.emit(Opcode.BIAS_ADD, x=product, bias=kept["bias"])
    total = builder.output("sum", "tokens", hidden)
    builder.emit(Opcode.ADD, a=x[256 : 256 + hidden], b=product, y=total)
    if normed:
        second = builder.buffer("second", BufferKind.WEIGHT, dtypes.Q4_K, (48, hidden))
        norm = builder.emit(Opcode.RMS_NORM, x=total, weight=kept["norm"], eps=1e-6, groups=1)
        builder.emit(Opcode.MATMUL, x=norm, weight=second, y=builder.output("y", "tokens", 48))
    else:
        del matrices["second"], vectors["norm"], kept["norm"]
    return Case(builder.build(), activations(tokens, columns, 7), matrices, vectors)


def layer(
    tokens: int,
    value_format: DType,
    biases: bool = False,
    gated: bool = True,
    hidden: int = 512,
    alone: bool = False,
) -> Case:
    """Norm and three products; two products, gate and a product with a residual. Without gate the
    last product is that of the second norm. ``alone``: the format of the values is that of all."""
    width, rows = 96, {"q": 120 if alone else 64, "k": 72 if alone else 32, "v": 48}
    builder = GraphBuilder("layer")
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", hidden))
    usual, last = (value_format, value_format) if alone else (dtypes.Q4_K, dtypes.Q6_K)
    formats = {"q": usual, "k": usual, "v": value_format}
    matrices: dict[str, tuple[DType, Bytes]] = {}
    vectors: dict[str, Float32] = {}

    def vector(name: str, size: int) -> View:
        vectors[name] = activations(1, size, len(vectors) + 90)[0]
        return builder.buffer(name, BufferKind.WEIGHT, F32, (size,))

    def matrix(name: str, dtype: DType, rows: int, columns: int) -> View:
        matrices[name] = dtype, weights(dtype, rows, columns, len(matrices))
        return builder.buffer(name, BufferKind.WEIGHT, dtype, (rows, columns))

    norm = builder.emit(Opcode.RMS_NORM, x=x, weight=vector("norm", hidden), eps=1e-6, groups=1)
    for name, count in rows.items():
        y = builder.output(f"y.{name}", "tokens", count)
        w = matrix(name, formats[name], count, hidden)
        if biases:
            product = builder.emit(Opcode.MATMUL, x=norm, weight=w)
            builder.emit(Opcode.BIAS_ADD, x=product, bias=vector(f"b.{name}", count), y=y)
        else:
            builder.emit(Opcode.MATMUL, x=norm, weight=w, y=y)
    other = builder.emit(Opcode.RMS_NORM, x=x, weight=vector("norm2", hidden), eps=1e-5, groups=1)
    wide = width * 8 if gated else hidden
    if gated:
        gate_weight = matrix("gate", usual, wide, hidden)
        gate = builder.emit(Opcode.MATMUL, x=other, weight=gate_weight)
        up = builder.emit(Opcode.MATMUL, x=other, weight=matrix("up", usual, wide, hidden))
        other = builder.emit(Opcode.SWIGLU, gate=gate, up=up, activation=0)
    down = builder.emit(Opcode.MATMUL, x=other, weight=matrix("down", last, hidden, wide))
    builder.emit(Opcode.ADD, a=x, b=down, y=builder.output("y", "tokens", hidden))
    return Case(builder.build(), activations(tokens, hidden, 7), matrices, vectors)


def check_layer(
    case: Case, biases: bool, folder: Path, most: int = 0, device: Device = DEVICE
) -> None:
    """Every result of ``layer`` has the definition's bits."""
    got, want = run(case, folder, most, device), layer_by_definition(case, biases)
    assert got.keys() == want.keys()
    for name, values in want.items():
        assert np.array_equal(got[name], values), name


def layer_by_definition(case: Case, biases: bool) -> dict[str, Float32]:
    def product(name: str, x: Float32) -> Float32:
        dtype, stored = case.matrices[name]
        return matmul(stored, dtype, x)

    first = rms_norm(x=case.x, weight=case.vectors["norm"], eps=1e-6)
    results = {f"y.{name}": product(name, first) for name in "qkv"}
    if biases:
        results = {f"y.{n}": results[f"y.{n}"] + case.vectors[f"b.{n}"] for n in "qkv"}
    second = rms_norm(x=case.x, weight=case.vectors["norm2"], eps=1e-5)
    if "gate" in case.matrices:
        second = swiglu(gate=product("gate", second), up=product("up", second))
    return results | {"y": case.x + product("down", second)}
