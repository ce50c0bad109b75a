"""Tuned products: the launches that runs of ops become, and their bits, on an emulated block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from accel.cuda.device import Device
from accel.cuda.gated_rows import MOST_TOKENS as MOST_GATED
from accel.cuda.group_shapes import MOST_SPLIT_TOKENS, group_shape, shapes_beside
from accel.cuda.packing import MOST_FOUR_WARPS
from accel.cuda.plan import Plan, plain_ops, plan_launches
from accel.cuda.products import MOST_TILE_SLOTS
from accel.cuda.span_products import MOST_TOKENS, span_shape
from accel.cuda.units import UNIT_ROWS
from accel.packets.rules import lower_graph
from accel.packets.schedule import schedule_launches
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
from tests.cuda.emulated_step import DEVICE, OLDER, aligned_memory, in_device_memory, run_step

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
    form = ShapeKey(max(most, len(case.x)), 0)
    outputs: dict[str, Float32] = {
        decl.name: aligned_memory(form.tokens * int(decl.shape[-1]) * 4)
        .view(np.float32)
        .reshape(form.tokens, -1)
        for decl in case.graph.of_kind(BufferKind.OUTPUT)
    }
    kept = {name: in_device_memory(vector) for name, vector in case.vectors.items()}
    sizes, results = (key, form), kept | outputs
    run_step(case.graph, sizes, {"x": case.x}, results, case.matrices, folder, device=device)
    return {name: values[: len(case.x)] for name, values in outputs.items()}


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


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_a_product_has_the_bits_of_the_definition(dtype: DType, tokens: int, folder: Path) -> None:
    """Rows that fill no tile, a last span of one unit, of 32-blocks a last unit of 3 blocks."""
    columns = 1280 + (96 if dtype.block_elements == 32 else 0)
    case = one_product(dtype, 21, columns, tokens)
    assert np.array_equal(run(case, folder)["y"], matmul(case.matrices["w"][1], dtype, case.x))


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("dtype", [dtypes.Q4_K, dtypes.Q5_K, dtypes.Q6_K], ids=str)
def test_the_largest_sums(dtype: DType, tokens: int, folder: Path) -> None:
    """Every code, scale and integer of a segment as large as it can be: no sum overflows."""
    case = one_product(dtype, 16, 512, tokens)
    _, stored = case.matrices["w"]
    stored[:] = 0x7F if dtype == dtypes.Q6_K else 0xFF
    blocks = stored.reshape(-1, dtype.block_bytes).view(np.float16)
    blocks[:, -1 if dtype == dtypes.Q6_K else slice(2)] = 1
    case.x[:] = np.float32(2047 / 1024)
    case.x[-1, ::3] *= -1
    assert np.array_equal(run(case, folder)["y"], matmul(stored, dtype, case.x))


@pytest.mark.parametrize("tokens", [1, 3, 6])
def test_integers_made_elsewhere(tokens: int, folder: Path) -> None:
    """Rows of x that do not lie at multiples of 16 bytes are quantized by the plain kernel."""
    columns, dtype = 544, dtypes.Q5_0
    builder = GraphBuilder("sliced")
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", columns + 3))
    w = builder.buffer("w", BufferKind.WEIGHT, dtype, (40, columns))
    y = builder.output("y", "tokens", 40)
    builder.emit(Opcode.MATMUL, x=x[1 : columns + 1], weight=w, y=y)
    stored = weights(dtype, 40, columns, 5)
    case = Case(builder.build(), activations(tokens, columns + 3, 8), {"w": (dtype, stored)}, {})
    step, plan = planned(case)
    assert [step.ops[i].name for i in plain_ops(plan)] == ["quantize_activation"]
    want = matmul(stored, dtype, np.ascontiguousarray(case.x[:, 1 : columns + 1]))
    assert np.array_equal(run(case, folder)["y"], want)


@pytest.mark.parametrize(("tokens", "columns"), [(1, 2048), (3, 2048), (1, 10240)])
@pytest.mark.parametrize("dtype", [dtypes.Q4_K, dtypes.Q8_0], ids=str)
def test_more_tiles_than_places_for_their_values(
    dtype: DType, tokens: int, columns: int, folder: Path
) -> None:
    """A warp that is to fold a tile, which several have computed, has to do so before it computes
    what needs its place."""
    tiles = (2 * MOST_TILE_SLOTS + 1) * DEVICE.multiprocessors
    case = one_product(dtype, UNIT_ROWS * tiles, columns, tokens)
    assert np.array_equal(run(case, folder)["y"], matmul(case.matrices["w"][1], dtype, case.x))


@pytest.mark.parametrize(
    ("tokens", "rows", "columns"), [(3, 70, 1280), (2, 16, 512 + 256), (4, 16 * 37, 1024)]
)
@pytest.mark.parametrize("dtype", [dtypes.Q4_K, dtypes.Q6_K, dtypes.Q8_0], ids=str)
def test_two_blocks_share_the_columns(
    dtype: DType, tokens: int, rows: int, columns: int, folder: Path
) -> None:
    """A share of one unit, a single tile, more tiles than places for their values; broken and
    silent segments in both shares."""
    case = one_product(dtype, rows, columns, tokens)
    case.x[0, 300], case.x[1, :256], case.x[2:3, columns - 3] = np.inf, 0, np.nan
    step = lower_graph(case.graph, ShapeKey(tokens, 0), 1, "cuda")
    (launch,) = plan_launches(step.ops, EVEN, step.scratch).launches
    macros = dict(launch.source.macros)
    assert macros["CLUSTER"] == 2
    assert (-(-rows // 16) > 4 << macros["SLOT_BITS"]) == (rows > 16 * 36)
    want = matmul(case.matrices["w"][1], dtype, case.x)
    assert np.array_equal(run(case, folder, device=EVEN)["y"], want, equal_nan=True)


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("dtype", [dtypes.Q4_K, dtypes.Q8_0], ids=str)
def test_warps_that_have_no_share_of_a_tile(dtype: DType, tokens: int, folder: Path) -> None:
    """In a form of four tokens several warps fold a tile; with fewer some of them fold nothing of
    it, and must not give up its place before its values are there."""
    tiles = (2 * MOST_TILE_SLOTS + 1) * DEVICE.multiprocessors
    case = one_product(dtype, UNIT_ROWS * tiles, 2048, tokens)
    want = matmul(case.matrices["w"][1], dtype, case.x)
    for device in (DEVICE, EVEN):
        assert np.array_equal(run(case, folder, most=4, device=device)["y"], want)


@pytest.mark.parametrize(("dtype", "tokens"), [(dtypes.Q4_K, 5), (dtypes.Q6_K, 7)], ids=str)
@pytest.mark.parametrize("columns", [1024, 2048])
def test_fewer_tokens_than_a_form_of_sixteen(
    dtype: DType, tokens: int, columns: int, folder: Path
) -> None:
    """Whoever has values of a tile ends a share of it, at once or behind its next item; places of
    tiles are used again."""
    tiles = (2 * MOST_TILE_SLOTS + 1) * DEVICE.multiprocessors
    case = one_product(dtype, UNIT_ROWS * tiles, columns, tokens)
    want = matmul(case.matrices["w"][1], dtype, case.x)
    assert np.array_equal(run(case, folder, most=16)["y"], want)


@pytest.mark.parametrize("dtype", [dtypes.Q8_0, dtypes.Q3_K], ids=str)
def test_more_tokens_than_a_block_takes(dtype: DType, folder: Path) -> None:
    """Tokens are cut in fours, and a form may have more than the step."""
    case = one_product(dtype, 50, 512, 6)
    got = run(case, folder, most=10)["y"]
    assert np.array_equal(got, matmul(case.matrices["w"][1], dtype, case.x))


@pytest.mark.parametrize(
    ("dtype", "device", "most", "tokens", "rows", "columns"),
    [
        (dtypes.Q4_K, OLDER, 80, 70, 150, 1280),
        (dtypes.Q5_K, OLDER, 80, 9, 20, 512),
        (dtypes.Q6_K, DEVICE, 80, 70, 150, 1280),
        (dtypes.Q4_K, DEVICE, 80, 70, 270, 1280),
        (dtypes.Q5_K, DEVICE, 80, 66, 40, 512),
        (dtypes.Q4_K, DEVICE, 64, 37, 70, 5 * 1024 + 256),
        (dtypes.Q6_K, DEVICE, 64, 20, 40, 5 * 1024 + 256),
        (dtypes.Q5_K, DEVICE, 12, 9, 40, 512),
    ],
    ids=str,
)
def test_many_tokens(
    dtype: DType, device: Device, most: int, tokens: int, rows: int, columns: int, folder: Path
) -> None:
    """Single warps and groups of them, with rows of their own or spans: two blocks of rows and two
    of tokens, neither full; a span of one unit; broken segments."""
    case = one_product(dtype, rows, columns, tokens)
    case.x[3, 300] = np.inf
    case.x[tokens - 4] = 0
    got = run(case, folder, most, device)["y"]
    want = matmul(case.matrices["w"][1], dtype, case.x)
    assert np.array_equal(got, want, equal_nan=True)


@pytest.mark.parametrize(
    ("biases", "gated", "most"), [(False, False, 24), (True, False, 70), (False, True, 70)]
)
def test_a_layer_of_many_tokens(biases: bool, gated: bool, most: int, folder: Path) -> None:
    """Norms are packed with their integers; biases, a gate and the residual go along, and matrices
    of one format share a launch."""
    case = layer(9, dtypes.Q5_K, biases, gated)
    step = lower_graph(case.graph, ShapeKey(most, 0), 1, "cuda")
    entries = [launch.entry for launch in plan_launches(step.ops, DEVICE, step.scratch).launches]
    pack = "unit_pack_fours" if most > MOST_SPLIT_TOKENS else "unit_pack"
    products = [pack, "unit_groups"] * (1 + gated)
    assert entries == [pack, "unit_groups", "unit_groups", *products]
    got, want = run(case, folder, most), layer_by_definition(case, biases)
    for name, values in want.items():
        assert np.array_equal(got[name], values), name


@pytest.mark.parametrize(("tokens", "columns"), [(70, 1280), (130, 256)])
def test_blocks_of_a_pair_follow_each_other(tokens: int, columns: int, folder: Path) -> None:
    """A multiprocessor takes several, of rows of five units and of one. Rows that
    end in a block, tokens that do."""
    rows = 200
    builder = GraphBuilder("pair")
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", columns))
    matrices = {
        name: (dtypes.Q4_K, weights(dtypes.Q4_K, rows, columns, i + 1))
        for i, name in enumerate(("gate", "up"))
    }
    gate, up = (
        builder.emit(
            Opcode.MATMUL,
            x=x,
            weight=builder.buffer(name, BufferKind.WEIGHT, dtypes.Q4_K, (rows, columns)),
        )
        for name in matrices
    )
    builder.emit(
        Opcode.SWIGLU, gate=gate, up=up, activation=0, y=builder.output("y", "tokens", rows)
    )
    case = Case(builder.build(), activations(tokens, columns, 7), matrices, {})
    _, plan = planned(case)
    assert [launch.entry for launch in plan.launches] == ["unit_pack_fours", "unit_groups"]
    assert plan.launches[1].grid[0] == DEVICE.multiprocessors
    gate_rows, up_rows = (matmul(stored, dtypes.Q4_K, case.x) for _, stored in matrices.values())
    assert np.array_equal(run(case, folder)["y"], swiglu(gate=gate_rows, up=up_rows))


def test_formats_run_beside_each_other() -> None:
    """The first launch of a norm's products lets the second start, which waits for it at its end;
    nobody else does either."""
    case = layer(9, dtypes.Q5_K)
    step = lower_graph(case.graph, ShapeKey(70, 0), 1, "cuda")
    macros = [dict(launch.source.macros) for launch in plan_launches(step.ops, DEVICE).launches]
    found = [(each["FOLLOWED"], each["BESIDE"]) for each in macros if "BESIDE" in each]
    assert found[:2] == [(1, 0), (0, 1)]
    assert not any(map(any, found[2:]))


def test_shapes_of_launches_beside_each_other() -> None:
    """By itself the first takes two rounds of smaller blocks; beside the second, whose blocks fill
    what its last round leaves, larger ones are done sooner."""
    rows = (4096, 1024)
    assert group_shape(dtypes.Q4_K, 4096, 512, rows, WIDE).groups == 3
    both = shapes_beside(4096, 512, ((dtypes.Q4_K, rows), (dtypes.Q6_K, (1024,))), WIDE)
    assert [shape.groups for shape in both] == [4, 2]


@pytest.mark.parametrize(
    ("tokens", "most", "biases", "gated"),
    [(16, 16, False, True), (5, 12, True, False), (9, 15, True, True), (6, 8, False, False)],
)
@pytest.mark.parametrize("dtype", [dtypes.Q5_K, dtypes.Q6_K], ids=str)
def test_a_layer_of_a_few_tokens(
    dtype: DType, tokens: int, most: int, biases: bool, gated: bool, folder: Path
) -> None:
    """Matrices of two formats share a launch, each block has all tokens."""
    case = layer(tokens, dtype, biases, gated)
    step = lower_graph(case.graph, ShapeKey(most, 0), 1, "cuda")
    entries = [launch.entry for launch in plan_launches(step.ops, DEVICE, step.scratch).launches]
    assert entries == ["unit_pack", "unit_spans"] * (2 + gated)
    got, want = run(case, folder, most), layer_by_definition(case, biases)
    for name, values in want.items():
        assert np.array_equal(got[name], values), name


@pytest.mark.parametrize("dtype", [dtypes.Q4_K, dtypes.Q5_K, dtypes.Q6_K], ids=str)
@pytest.mark.parametrize(
    ("tokens", "rows", "columns"), [(16, 150, 1280), (7, 20, 512), (9, 1100, 3328)]
)
def test_a_few_tokens(dtype: DType, tokens: int, rows: int, columns: int, folder: Path) -> None:
    """A span of one unit, warps with nothing to do, more tiles than places for their values;
    broken segments."""
    case = one_product(dtype, rows, columns, tokens)
    case.x[3, 300] = np.inf
    case.x[tokens - 4] = 0
    _, plan = planned(case)
    assert [launch.entry for launch in plan.launches] == ["unit_pack", "unit_spans"]
    want = matmul(case.matrices["w"][1], dtype, case.x)
    assert np.array_equal(run(case, folder)["y"], want, equal_nan=True)


@pytest.mark.parametrize("tokens", [17, 70])
def test_three_matrices_share_a_launch(tokens: int, folder: Path) -> None:
    """Of different heights, none a whole number of blocks; older devices take one after the other
    and the gate by itself."""
    case = layer(tokens, dtypes.Q4_K)
    step, plan = planned(case)
    pack = "unit_pack_fours" if tokens > MOST_SPLIT_TOKENS else "unit_pack"
    assert [launch.entry for launch in plan.launches[:3]] == [pack, "unit_groups", pack]
    older = plan_launches(step.ops, OLDER, step.scratch)
    few = tokens <= MOST_GATED
    assert [step.ops[i].name for i in plain_ops(older)] == ([] if few else ["swiglu"])
    assert few == ("gated_rows" in [launch.entry for launch in older.launches])
    got, want = run(case, folder), layer_by_definition(case, False)
    for name, values in want.items():
        assert np.array_equal(got[name], values), name


def spans_and_norm(dtype: DType, biased: bool, tokens: int) -> Case:
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
    second = builder.buffer("second", BufferKind.WEIGHT, dtypes.Q4_K, (48, hidden))
    product = builder.emit(Opcode.MATMUL, x=x, weight=first)
    if biased:
        product = builder.emit(Opcode.BIAS_ADD, x=product, bias=kept["bias"])
    total = builder.output("sum", "tokens", hidden)
    builder.emit(Opcode.ADD, a=x[256 : 256 + hidden], b=product, y=total)
    norm = builder.emit(Opcode.RMS_NORM, x=total, weight=kept["norm"], eps=1e-6, groups=1)
    builder.emit(Opcode.MATMUL, x=norm, weight=second, y=builder.output("y", "tokens", 48))
    return Case(builder.build(), activations(tokens, columns, 7), matrices, vectors)


@pytest.mark.parametrize(("tokens", "units"), [(67, 5), (70, 10), (66, 33)])
@pytest.mark.parametrize("weighted", [None, False, True])
def test_many_tokens_are_packed_by_fours(
    weighted: bool | None, tokens: int, units: int, folder: Path
) -> None:
    """Normed with and without weights, or not at all: rows that are broken, that have a unit of
    zeros or of very small numbers, the last four not whole. Q6_K needs
    every sum. Of longer rows a block norms one."""
    builder, columns = GraphBuilder("packed"), 256 * units
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", columns))
    w = builder.buffer("w", BufferKind.WEIGHT, dtypes.Q6_K, (16, columns))
    vectors = {"norm": activations(1, columns, 3)[0]} if weighted else {}
    packed = x
    if weighted is not None:
        kept = {"weight": builder.buffer("norm", BufferKind.WEIGHT, F32, (columns,))}
        packed = builder.emit(
            Opcode.RMS_NORM, x=x, eps=1e-6, groups=1, **(kept if weighted else {})
        )
    builder.emit(Opcode.MATMUL, x=packed, weight=w, y=builder.output("y", "tokens", 16))
    stored, values = weights(dtypes.Q6_K, 16, columns, 2), activations(tokens, columns, 7)
    values[3, 300], values[9, 7], values[-1, -1] = np.inf, np.nan, -np.inf
    values[11, 256:512], values[14, :256] = 0.0, 1e-30
    case = Case(builder.build(), values, {"w": (dtypes.Q6_K, stored)}, vectors)
    _, plan = planned(case)
    by_fours = weighted is None or units <= MOST_FOUR_WARPS
    assert plan.launches[0].entry == ("unit_pack_fours" if by_fours else "unit_pack")
    with np.errstate(invalid="ignore"):
        if weighted is not None:
            values = rms_norm(x=values, weight=vectors.get("norm"), eps=1e-6)
        want = matmul(stored, dtypes.Q6_K, values)
    assert np.isnan(want).any(axis=1).sum() == 3
    assert np.array_equal(run(case, folder, 99)["y"], want, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "biased", "tokens", "most", "shared"),
    [
        (dtypes.Q4_K, False, 61, 64, 227),
        (dtypes.Q6_K, True, 37, 64, 227),
        (dtypes.Q4_K, True, 9, 16, 170),
        (dtypes.Q6_K, False, 6, 8, 170),
        (dtypes.Q5_K, True, 16, 16, 227),
    ],
    ids=str,
)
def test_spans_folded_by_the_next_run(
    dtype: DType, biased: bool, tokens: int, most: int, shared: int, folder: Path
) -> None:
    """Blocks share rows where there are more of them that way; the norm behind packs the sum, which
    is a result as well. The last span has one unit."""
    device = replace(WIDE, shared_bytes=shared << 10)
    case = spans_and_norm(dtype, biased, tokens)
    matrices, vectors, hidden = case.matrices, case.vectors, 256
    case.x[3, 300] = np.inf
    step = lower_graph(case.graph, ShapeKey(most, 0), 1, "cuda")
    plan = plan_launches(step.ops, device, step.scratch)
    products = "unit_spans" if most <= MOST_TOKENS else "unit_groups"
    assert [launch.entry for launch in plan.launches] == ["unit_pack", products] * 2
    assert dict(plan.launches[1].source.macros)["PARTS"] > 1
    assert plan.passing_bytes == 4 * 6 * most * hidden
    got = run(case, folder, most, device)
    want = matmul(matrices["first"][1], dtype, case.x)
    want = case.x[:, 256 : 256 + hidden] + (want + vectors["bias"] if biased else want)
    assert np.array_equal(got["sum"], want, equal_nan=True)
    normed = rms_norm(x=want, weight=vectors["norm"], eps=1e-6)
    want = matmul(matrices["second"][1], dtypes.Q4_K, normed)
    assert np.array_equal(got["y"], want, equal_nan=True)


@pytest.mark.parametrize(("tokens", "most", "shared"), [(61, 64, 227), (9, 16, 170)])
@pytest.mark.parametrize("biased", [False, True])
def test_spans_nobody_packs(
    biased: bool, tokens: int, most: int, shared: int, folder: Path
) -> None:
    """The last product of a model: a launch of its own adds them up."""
    device = replace(WIDE, shared_bytes=shared << 10)
    case = spans_and_norm(dtypes.Q4_K, biased, tokens)
    builder = GraphBuilder("last")
    columns, hidden = case.x.shape[1], 256
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", columns))
    first = builder.buffer("first", BufferKind.WEIGHT, dtypes.Q4_K, (hidden, columns))
    product = builder.emit(Opcode.MATMUL, x=x, weight=first)
    if biased:
        bias = builder.buffer("bias", BufferKind.WEIGHT, F32, (hidden,))
        product = builder.emit(Opcode.BIAS_ADD, x=product, bias=bias)
    y = builder.output("sum", "tokens", hidden)
    builder.emit(Opcode.ADD, a=x[256 : 256 + hidden], b=product, y=y)
    first_only = {"first": case.matrices["first"]}
    last = replace(case, graph=builder.build(), matrices=first_only)
    step = lower_graph(last.graph, ShapeKey(most, 0), 1, "cuda")
    plan = plan_launches(step.ops, device, step.scratch)
    products = "unit_spans" if most <= MOST_TOKENS else "unit_groups"
    assert [launch.entry for launch in plan.launches] == ["unit_pack", products, "unit_fold"]
    got = run(last, folder, most, device)["sum"]
    want = matmul(first_only["first"][1], dtypes.Q4_K, case.x)
    want = case.x[:, 256 : 256 + hidden] + (want + case.vectors["bias"] if biased else want)
    assert np.array_equal(got, want, equal_nan=True)


@pytest.mark.parametrize(
    ("multiprocessors", "tokens", "rows", "groups"),
    [
        (132, 513, (4096,), 4),
        (132, 513, (4096, 1024), 3),
        (132, 513, (24576,), 4),
        (3, 80, (64,), 2),
        (132, 64, (24576,), 3),
        (132, 64, (4096,), 4),
    ],
    ids=str,
)
def test_blocks_leave_few_multiprocessors_idle(
    multiprocessors: int, tokens: int, rows: tuple[int, ...], groups: int
) -> None:
    """Of 160 blocks of four groups the last 28 would run alone."""
    device = replace(DEVICE, multiprocessors=multiprocessors)
    assert group_shape(dtypes.Q4_K, 4096, tokens, rows, device).groups == groups


@pytest.mark.parametrize(
    ("dtype", "columns", "tokens", "parts"),
    [
        (dtypes.Q6_K, 12288, 64, 4),
        (dtypes.Q4_K, 12288, 64, 6),
        (dtypes.Q4_K, 4096, 16, 2),
        (dtypes.Q4_K, 1024, 16, 1),
        (dtypes.Q4_K, 12288, 512, 1),
    ],
    ids=str,
)
def test_blocks_share_rows_where_there_are_few(
    dtype: DType, columns: int, tokens: int, parts: int
) -> None:
    """One span has no parts, many tokens are blocks enough, and no group is without a span."""
    shape = group_shape(dtype, columns, tokens, (4096,), WIDE, parted=True)
    assert shape.parts == parts
    assert parts == 1 or not shape.split or columns // 1024 // parts >= shape.groups


@pytest.mark.parametrize(
    ("columns", "tiles", "parted", "parts"),
    [
        (12288, 256, True, 12),
        (4096, 384, True, 4),
        (4096, 384, False, 1),
        (12288, 256, False, 0),
    ],
    ids=str,
)
def test_a_few_tokens_lie_near_many_blocks(
    columns: int, tiles: int, parted: bool, parts: int
) -> None:
    """Where blocks may share rows each has the tokens of one span; whole rows may not fit."""
    shape = span_shape((dtypes.Q4_K,), columns, 16, tiles, False, WIDE, parted)
    assert parts == (0 if shape is None else shape.parts)
    assert shape is None or shape.shared_bytes <= WIDE.shared_bytes


def test_broken_and_silent_segments(folder: Path) -> None:
    """NaN reaches its token's outputs alone; a segment below 2^-64 is zero."""
    case = one_product(dtypes.Q4_K, 16, 768, 3)
    case.x[0, 300] = np.nan
    case.x[1, 512:] = 2.0**-65
    case.x[2] = 0
    got = run(case, folder)["y"]
    want = matmul(case.matrices["w"][1], dtypes.Q4_K, case.x)
    assert np.isnan(got[0]).all()
    assert np.array_equal(got, want, equal_nan=True)


def layer(
    tokens: int, value_format: DType, biases: bool = False, gated: bool = True, hidden: int = 512
) -> Case:
    """Norm and three products; two products, gate and a product with a residual. Without gate the
    last product is that of the second norm."""
    width, rows = 96, {"q": 64, "k": 32, "v": 48}
    builder = GraphBuilder("layer")
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", hidden))
    formats = {"q": dtypes.Q4_K, "k": dtypes.Q4_K, "v": value_format}
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
        gate_weight = matrix("gate", dtypes.Q4_K, wide, hidden)
        gate = builder.emit(Opcode.MATMUL, x=other, weight=gate_weight)
        up = builder.emit(Opcode.MATMUL, x=other, weight=matrix("up", dtypes.Q4_K, wide, hidden))
        other = builder.emit(Opcode.SWIGLU, gate=gate, up=up, activation=0)
    down = builder.emit(Opcode.MATMUL, x=other, weight=matrix("down", dtypes.Q6_K, hidden, wide))
    builder.emit(Opcode.ADD, a=x, b=down, y=builder.output("y", "tokens", hidden))
    return Case(builder.build(), activations(tokens, hidden, 7), matrices, vectors)


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


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_layer_is_three_launches(tokens: int, biases: bool, folder: Path) -> None:
    """q, k, v behind their norm; gate and up; down and the residual: with the definition's bits."""
    case = layer(tokens, dtypes.Q6_K, biases)
    step, plan = planned(case)
    assert [launch.first for launch in plan.launches] == [0, 8 if biases else 5, len(step.ops) - 3]
    got, want = run(case, folder), layer_by_definition(case, biases)
    assert got.keys() == want.keys()
    for name, values in want.items():
        assert np.array_equal(got[name], values), name


@pytest.mark.parametrize("tokens", [2, 4])
def test_a_layer_whose_blocks_share_columns(tokens: int, folder: Path) -> None:
    """Norms need squares of both shares; of gate and up a block folds both."""
    case = layer(tokens, dtypes.Q6_K, biases=True, hidden=1280)
    step = lower_graph(case.graph, ShapeKey(tokens, 0), 1, "cuda")
    plan = plan_launches(step.ops, EVEN, step.scratch)
    assert [dict(launch.source.macros)["CLUSTER"] for launch in plan.launches] == [2, 2, 2]
    got = run(case, folder, device=EVEN)
    for name, values in layer_by_definition(case, True).items():
        assert np.array_equal(got[name], values), name


def test_another_weight_gives_other_bits(folder: Path) -> None:
    """The comparison would notice one flipped nibble."""
    case = one_product(dtypes.Q4_K, 16, 256, 1)
    dtype, stored = case.matrices["w"]
    other = stored.copy()
    other[3, 40] ^= 0x10
    got = run(case, folder)["y"]
    assert not np.array_equal(got, matmul(other, dtype, case.x))


def test_a_result_somebody_reads_is_not_left_out() -> None:
    """The norm's result is an output too: the run begins behind it, and the norm is plain."""
    case = layer(1, dtypes.Q4_K)
    builder = GraphBuilder("norm is read")
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", 256))
    norm = builder.emit(Opcode.RMS_NORM, x=x, eps=1e-6, groups=1)
    w = builder.buffer("w", BufferKind.WEIGHT, dtypes.Q4_K, (32, 256))
    builder.emit(Opcode.MATMUL, x=norm, weight=w, y=builder.output("y", "tokens", 32))
    builder.emit(Opcode.ADD, a=x, b=norm, y=builder.output("z", "tokens", 256))
    step, plan = planned(replace(case, graph=builder.build()))
    assert [step.ops[i].name for i in plain_ops(plan)] == ["rms_norm", "add"]
    assert len(plan.launches) == 3


def test_an_output_is_written_whoever_reads_it() -> None:
    """A run ends before the op that would take an output in: the host reads it."""
    builder = GraphBuilder("product is an output")
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", 256))
    w = builder.buffer("w", BufferKind.WEIGHT, dtypes.Q4_K, (256, 256))
    product = builder.emit(Opcode.MATMUL, x=x, weight=w, y=builder.output("y", "tokens", 256))
    builder.emit(Opcode.ADD, a=x, b=product, y=builder.output("z", "tokens", 256))
    step, plan = planned(replace(layer(1, dtypes.Q4_K), graph=builder.build()))
    assert [step.ops[i].name for i in plain_ops(plan)] == ["add"]


@pytest.mark.parametrize("tokens", [1, 9])
def test_a_product_that_is_read_leaves_its_bias_alone(tokens: int) -> None:
    """Both are outputs: the product is one launch, its bias a plain one."""
    builder = GraphBuilder("product and bias")
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", 256))
    w = builder.buffer("w", BufferKind.WEIGHT, dtypes.Q8_0, (32, 256))
    bias = builder.buffer("b", BufferKind.WEIGHT, F32, (32,))
    product = builder.emit(Opcode.MATMUL, x=x, weight=w, y=builder.output("y", "tokens", 32))
    builder.emit(Opcode.BIAS_ADD, x=product, bias=bias, y=builder.output("z", "tokens", 32))
    case = replace(layer(tokens, dtypes.Q4_K), graph=builder.build())
    step, plan = planned(case)
    assert [step.ops[i].name for i in plain_ops(plan)] == ["bias_add"]


def test_ops_of_one_launch_share_no_memory() -> None:
    """A block may read x while another writes y: the schedule keeps them apart."""
    step, plan = planned(layer(1, dtypes.Q6_K))
    apart, together = (schedule_launches(step, levels).shared for levels in (None, plan.levels))
    down = step.ops[-3:]
    x, y = down[0].operands[0], down[1].operands[down[1].written[0]]
    assert x is not None
    assert y is not None

    def place(shared: Mapping[str, int], name: str) -> range:
        return range(shared[name], shared[name] + step.scratch[name])

    assert set(place(together, x.buffer)).isdisjoint(place(together, y.buffer))
    assert apart != together
