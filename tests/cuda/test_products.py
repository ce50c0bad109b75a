"""Tuned products: the launches that runs of ops become, and their bits, on an emulated block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from accel.cuda.packed_tiles import UNIT_ROWS
from accel.cuda.plan import plain_ops, plan_launches
from accel.cuda.products import MAX_TILE_SLOTS
from accel.packets.rules import lower_graph
from accel.packets.schedule import schedule_launches
from contract import dtypes
from contract.dtypes import F32, DType
from contract.ir.graph import BufferKind, GraphBuilder
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from reference.quant.dot import matmul
from tests.cuda.emulated_step import DEVICE
from tests.cuda.product_cases import (
    EVEN,
    QUANTIZED,
    Case,
    activations,
    check_layer,
    check_product,
    layer,
    one_product,
    planned,
    run,
    weights,
)


@pytest.mark.parametrize(
    ("dtype", "tokens"),
    [
        pytest.param(dtype, tokens, marks=[pytest.mark.soak] if tokens == 3 and number % 2 else [])
        for number, dtype in enumerate(QUANTIZED)
        for tokens in (1, 3)
    ],
    ids=str,
)
def test_a_product_has_the_bits_of_the_definition(dtype: DType, tokens: int, folder: Path) -> None:
    """Rows that fill no tile, a last span of one unit, of 32-blocks a last unit of 3 blocks."""
    columns = 1280 + (96 if dtype.block_elements == 32 else 0)
    case = one_product(dtype, 21, columns, tokens)
    check_product(case, folder)


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
    check_product(case, folder)


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
    tiles = (2 * MAX_TILE_SLOTS + 1) * DEVICE.multiprocessors
    case = one_product(dtype, UNIT_ROWS * tiles, columns, tokens)
    check_product(case, folder)


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
    check_product(case, folder, device=EVEN)


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("dtype", [dtypes.Q4_K, dtypes.Q8_0], ids=str)
def test_warps_that_have_no_share_of_a_tile(dtype: DType, tokens: int, folder: Path) -> None:
    """In a form of four tokens several warps fold a tile; with fewer some of them fold nothing of
    it, and must not give up its place before its values are there."""
    tiles = (2 * MAX_TILE_SLOTS + 1) * DEVICE.multiprocessors
    case = one_product(dtype, UNIT_ROWS * tiles, 2048, tokens)
    for device in (DEVICE, EVEN):
        check_product(case, folder, 4, device)


@pytest.mark.parametrize("dtype", [dtypes.Q8_0, dtypes.Q3_K], ids=str)
def test_more_tokens_than_a_block_takes(dtype: DType, folder: Path) -> None:
    """Tokens are cut in fours, and a form may have more than the step."""
    case = one_product(dtype, 50, 512, 6)
    check_product(case, folder, 10)


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


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_layer_is_three_launches(tokens: int, biases: bool, folder: Path) -> None:
    """q, k, v behind their norm; gate and up; down and the residual: with the definition's bits."""
    case = layer(tokens, dtypes.Q6_K, biases)
    step, plan = planned(case)
    assert [launch.first for launch in plan.launches] == [0, 8 if biases else 5, len(step.ops) - 3]
    check_layer(case, biases, folder)


@pytest.mark.parametrize("tokens", [2, 4])
def test_a_layer_whose_blocks_share_columns(tokens: int, folder: Path) -> None:
    """Norms need squares of both shares; of gate and up a block folds both."""
    case = layer(tokens, dtypes.Q6_K, biases=True, hidden=1280)
    step = lower_graph(case.graph, ShapeKey(tokens, 0), 1, "cuda")
    plan = plan_launches(step.ops, EVEN, step.scratch)
    assert [dict(launch.source.macros)["CLUSTER"] for launch in plan.launches] == [2, 2, 2]
    check_layer(case, True, folder, device=EVEN)


def test_another_weight_gives_other_bits(folder: Path) -> None:
    """The comparison would notice one flipped nibble."""
    case = one_product(dtypes.Q4_K, 16, 256, 1)
    dtype, stored = case.matrices["w"]
    other = stored.copy()
    other[3, 40] ^= 0x10
    got = run(case, folder)["y"]
    assert not np.array_equal(got, matmul(other, dtype, case.x))


def test_a_result_somebody_reads_is_not_left_out() -> None:
    """The norm's result is an output too: the run begins behind it, and the norm is apart."""
    builder = GraphBuilder("norm is read")
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", 256))
    norm = builder.emit(Opcode.RMS_NORM, x=x, eps=1e-6, groups=1)
    w = builder.buffer("w", BufferKind.WEIGHT, dtypes.Q4_K, (32, 256))
    builder.emit(Opcode.MATMUL, x=norm, weight=w, y=builder.output("y", "tokens", 32))
    builder.emit(Opcode.ADD, a=x, b=norm, y=builder.output("z", "tokens", 256))
    step, plan = planned(replace(layer(1, dtypes.Q4_K), graph=builder.build()))
    assert [step.ops[i].name for i in plain_ops(plan)] == ["add"]
    assert plan.launches[0].entry == "norm_rows"
    assert len(plan.launches) == 3


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [1, 9])
def test_an_output_is_written_whoever_reads_it(tokens: int, biased: bool) -> None:
    """A run ends before the op that would take an output in: the host reads it."""
    builder = GraphBuilder("product is an output")
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", 256))
    w = builder.buffer("w", BufferKind.WEIGHT, dtypes.Q4_K, (256, 256))
    product = builder.emit(Opcode.MATMUL, x=x, weight=w, y=builder.output("y", "tokens", 256))
    z = builder.output("z", "tokens", 256)
    if biased:
        bias = builder.buffer("b", BufferKind.WEIGHT, F32, (256,))
        builder.emit(Opcode.BIAS_ADD, x=product, bias=bias, y=z)
    else:
        builder.emit(Opcode.ADD, a=x, b=product, y=z)
    step, plan = planned(replace(layer(tokens, dtypes.Q4_K), graph=builder.build()))
    assert [step.ops[i].name for i in plain_ops(plan)] == ["bias_add" if biased else "add"]


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
