"""Tuned products of five tokens and more: launches, shapes of blocks, and their bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from accel.cuda.device import Device
from accel.cuda.group_shapes import MAX_SPLIT_TOKENS, group_shape, overlapping_shapes
from accel.cuda.norm_rows import MAX_TOKENS as MAX_GATED
from accel.cuda.packed_tiles import UNIT_ROWS
from accel.cuda.packing import MAX_FOUR_WARPS
from accel.cuda.plan import plain_ops, plan_launches
from accel.cuda.products import MAX_TILE_SLOTS
from accel.cuda.registered import cuda_buckets
from accel.cuda.split_k_products import MAX_TOKENS, span_shape
from accel.packets.rules import lower_graph
from contract import dtypes
from contract.dtypes import F32, DType
from contract.ir.graph import BufferKind, GraphBuilder
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from reference.ops.rms_norm import rms_norm
from reference.ops.swiglu import swiglu
from reference.quant.dot import matmul
from tests.cuda.emulated_step import DEVICE, OLDER
from tests.cuda.product_cases import (
    WIDE,
    Case,
    activations,
    check_layer,
    check_product,
    entries,
    layer,
    one_product,
    planned,
    run,
    spans,
    weights,
)


@pytest.mark.parametrize(("dtype", "tokens"), [(dtypes.Q4_K, 5), (dtypes.Q6_K, 7)], ids=str)
@pytest.mark.parametrize("columns", [1024, 2048])
def test_fewer_tokens_than_a_form_of_sixteen(
    dtype: DType, tokens: int, columns: int, folder: Path
) -> None:
    """Whoever has values of a tile ends a share of it, at once or behind its next item; places of
    tiles are used again."""
    tiles = (2 * MAX_TILE_SLOTS + 1) * DEVICE.multiprocessors
    case = one_product(dtype, UNIT_ROWS * tiles, columns, tokens)
    check_product(case, folder, 16)


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
    check_product(case, folder, most, device)


@pytest.mark.parametrize(
    ("biases", "gated", "most"),
    [pytest.param(False, False, 24, marks=pytest.mark.long), (True, False, 70), (False, True, 70)],
)
def test_a_layer_of_many_tokens(biases: bool, gated: bool, most: int, folder: Path) -> None:
    """Norms are packed with their integers; biases, a gate and the residual go along, and matrices
    of one format share a launch."""
    case = layer(9, dtypes.Q5_K, biases, gated)
    pack = _pack_of(most)
    products = [pack, "unit_groups"] * (1 + gated)
    assert entries(case, most) == [pack, "unit_groups", "unit_groups", *products]
    check_layer(case, biases, folder, most)


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
    both = overlapping_shapes(4096, 512, ((dtypes.Q4_K, rows), (dtypes.Q6_K, (1024,))), WIDE)
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
    assert entries(case, most) == ["unit_pack", "unit_spans"] * (2 + gated)
    check_layer(case, biases, folder, most)


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
    assert entries(case, tokens) == ["unit_pack", "unit_spans"]
    check_product(case, folder)


@pytest.mark.parametrize("tokens", [17, 70])
def test_three_matrices_share_a_launch(tokens: int, folder: Path) -> None:
    """Of different heights, none a whole number of blocks; older devices take one after the other
    and the gate by itself."""
    case = layer(tokens, dtypes.Q4_K)
    step, plan = planned(case)
    pack = _pack_of(tokens)
    assert [launch.entry for launch in plan.launches[:3]] == [pack, "unit_groups", pack]
    older = plan_launches(step.ops, OLDER, step.scratch)
    few = tokens <= MAX_GATED
    assert [step.ops[i].name for i in plain_ops(older)] == ([] if few else ["swiglu"])
    assert few == ("gated_rows" in [launch.entry for launch in older.launches])
    check_layer(case, False, folder)


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
    by_fours = weighted is None or units <= MAX_FOUR_WARPS
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
        pytest.param(dtypes.Q4_K, False, 61, 64, 227, marks=pytest.mark.long),
        (dtypes.Q6_K, True, 37, 64, 227),
        (dtypes.Q4_K, True, 9, 16, 170),
        pytest.param(dtypes.Q6_K, False, 6, 8, 170, marks=pytest.mark.long),
        (dtypes.Q5_K, True, 16, 16, 227),
        pytest.param(dtypes.Q4_K, True, 70, 128, 227, marks=pytest.mark.long),
        pytest.param(dtypes.Q6_K, False, 130, 256, 227, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_spans_folded_by_the_next_run(
    dtype: DType, biased: bool, tokens: int, most: int, shared: int, folder: Path
) -> None:
    """Blocks share rows where there are more of them that way; the norm behind packs the sum, which
    is a result as well. The last span has one unit."""
    check_spans(dtype, biased, tokens, most, shared, True, folder)


@pytest.mark.parametrize(
    ("biased", "tokens", "most", "shared"),
    [(True, 61, 64, 227), (False, 9, 16, 170), (True, 67, 128, 227)],
)
def test_spans_nobody_packs(
    biased: bool, tokens: int, most: int, shared: int, folder: Path
) -> None:
    """The last product of a model: a launch of its own adds them up."""
    check_spans(dtypes.Q4_K, biased, tokens, most, shared, False, folder)


def check_spans(
    dtype: DType, biased: bool, tokens: int, most: int, shared: int, normed: bool, folder: Path
) -> None:
    device = replace(WIDE, shared_bytes=shared << 10)
    case, hidden = spans(dtype, biased, tokens, normed), 256
    matrices, vectors = case.matrices, case.vectors
    case.x[3, 300] = np.inf
    step = lower_graph(case.graph, ShapeKey(most, 0), 1, "cuda")
    plan = plan_launches(step.ops, device, step.scratch)
    products = "unit_spans" if most <= MAX_TOKENS else "unit_groups"
    behind = ["unit_pack", products] if normed else ["unit_fold"]
    assert [launch.entry for launch in plan.launches] == [_pack_of(most), products, *behind]
    assert dict(plan.launches[1].source.macros)["PARTS"] > 1
    assert plan.transient_bytes == 4 * 6 * most * hidden
    got = run(case, folder, most, device)
    want = matmul(matrices["first"][1], dtype, case.x)
    want = case.x[:, 256 : 256 + hidden] + (want + vectors["bias"] if biased else want)
    assert np.array_equal(got["sum"], want, equal_nan=True)
    if normed:
        want = rms_norm(x=want, weight=vectors["norm"], eps=1e-6)
        want = matmul(matrices["second"][1], dtypes.Q4_K, want)
        assert np.array_equal(got["y"], want, equal_nan=True)


def _pack_of(most: int) -> str:
    """What packs rows of so many tokens that are no sum of spans."""
    return "unit_pack_fours" if most > MAX_SPLIT_TOKENS else "unit_pack"


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
        (dtypes.Q4_K, 12288, 128, 4),
        (dtypes.Q6_K, 12288, 128, 2),
        (dtypes.Q4_K, 12288, 256, 2),
        (dtypes.Q6_K, 12288, 320, 4),
        (dtypes.Q6_K, 12288, 384, 2),
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


@pytest.mark.parametrize("tokens", [65, 128, 129, 192, 200, 256, 257, 320, 321, 384, 385, 512])
@pytest.mark.parametrize("dtype", [dtypes.Q4_K, dtypes.Q6_K], ids=str)
def test_steps_of_some_tokens_have_a_form_that_fills_the_device(dtype: DType, tokens: int) -> None:
    """By the largest form's blocks, which share no rows, 65 tokens would be 32 of them, 320 in
    Q6_K 160, of which the last 28 run alone, and 512 in Q4_K 176."""
    bucket = next(bucket for bucket in cuda_buckets(ShapeKey(1088, 64)) if bucket.tokens >= tokens)
    shape = group_shape(dtype, 12288, bucket.tokens, (4096,), WIDE, parted=True)
    blocks = shape.row_blocks((4096,)) * -(-tokens // shape.tokens) * shape.parts
    rounds = -(-blocks // WIDE.multiprocessors)
    assert blocks / (rounds * WIDE.multiprocessors) > 0.7


@pytest.mark.parametrize(("tokens", "parts"), [(64, 4), (128, 2)])
def test_tiles_of_all_matrices_are_one_row_of_blocks(tokens: int, parts: int) -> None:
    """Of q, k and v by themselves the last blocks would have half of their tiles: 34 blocks, four
    times as many of which do not run at once."""
    rows = (4096, 1024, 1024)
    shape = group_shape(dtypes.Q4_K, 4096, tokens, rows, WIDE, parted=True)
    assert (shape.groups, shape.parts, shape.row_blocks(rows)) == (3, parts, 32)


@pytest.mark.parametrize(
    ("columns", "tiles", "parted", "parts"),
    [(12288, 256, True, 12), (4096, 384, True, 4), (4096, 384, False, 1), (12288, 256, False, 0)],
    ids=str,
)
def test_a_few_tokens_lie_near_many_blocks(
    columns: int, tiles: int, parted: bool, parts: int
) -> None:
    """Where blocks may share rows each has the tokens of one span; whole rows may not fit."""
    shape = span_shape((dtypes.Q4_K,), columns, 16, tiles, False, WIDE, parted)
    assert parts == (0 if shape is None else shape.parts)
    assert shape is None or shape.shared_bytes <= WIDE.shared_bytes
