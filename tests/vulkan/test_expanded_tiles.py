"""Which products of many tokens are multiplied from planes, in wide tiles and in small ones."""

import pytest

from accel.kernels.matrix_tiles import WIDE_FORMATS, plane_bytes
from accel.packets.fused_ops import FUSED
from accel.packets.schedule import schedule_levels
from accel.packets.step import Count, Op, Per, Step, Tensor
from accel.vulkan.expanded_tiles import MIN_ROWS, PLANES_FROM, with_expanded_tiles
from accel.vulkan.matrix_tiles import MIN_ROWS as MIN_WIDE_ROWS
from accel.vulkan.matrix_tiles import SMALL_BUCKETS, WIDE_FROM, with_tiles_32x16, with_tiles_128x128
from contract.dtypes import Q4_0, Q4_K, Q6_K, DType

COLUMNS = 512


def made(name: str, tensors: dict[str, str], sizes: tuple[int, ...], most: int) -> Op:
    """An op of ``name`` whose operands are whole buffers."""
    device = FUSED[name]
    operands = (tensors.get(operand.name) for operand in device.operands)
    tensors_of = tuple(None if o is None else Tensor(o, 0, COLUMNS, COLUMNS) for o in operands)
    count = Count(1, Per.TOKEN, most)
    return Op(device, tensors_of, device.splits, count, sizes, matrix=device.matrix)


def product(name: str, dtype: DType = Q6_K, rows: int = MIN_ROWS, most: int = PLANES_FROM) -> Op:
    tensors = {"x": "m", "scale": "scale", "sums": "sums", "weight": f"{name}.weight", "y": name}
    op = made("matmul_tiles", tensors, (rows, COLUMNS), most)
    op.dtype = dtype
    return op


def step(*products: Op) -> Step:
    """A norm and what multiplies its integers."""
    results = {"x": "x", "m": "m", "scale": "scale", "sums": "sums"}
    norm = made("rms_norm_quantize", results, (COLUMNS,), PLANES_FROM)
    buffers = dict.fromkeys(("m", "scale", "sums"), 4 * COLUMNS)
    return Step([norm, *products], buffers)


def names(step: Step) -> list[str]:
    return [op.name for op in step.ops]


def test_matrices_are_expanded_beside_the_norm_and_activations_once():
    expanded = with_expanded_tiles(step(product("gate"), product("up")))
    assert names(expanded) == [
        *("expand_weight", "expand_weight", "rms_norm_quantize", "expand_tokens"),
        *("matmul_planes", "matmul_planes"),
    ]
    levels = [op_schedule.level for op_schedule in schedule_levels(expanded).op_schedules]
    assert levels == [0, 0, 0, 1, 2, 2]
    sizes = sorted(set(expanded.scratch.values()))[1:]
    assert sizes == [plane_bytes(PLANES_FROM, COLUMNS), plane_bytes(MIN_ROWS, COLUMNS)]


def test_new_integers_in_the_same_place_are_expanded_again():
    first, second = step(product("gate")), step(product("up"))
    expanded = with_expanded_tiles(Step([*first.ops, *second.ops], first.scratch))
    assert names(expanded) == [
        *("expand_weight", "rms_norm_quantize", "expand_tokens", "matmul_planes"),
        *("expand_weight", "rms_norm_quantize", "expand_tokens", "matmul_planes"),
    ]


PLANES, WIDE, SMALL = with_expanded_tiles, with_tiles_128x128, with_tiles_32x16
WIDE_ROWS = {"rows": MIN_WIDE_ROWS, "most": WIDE_FROM}


@pytest.mark.parametrize(
    ("change", "given", "name"),
    [
        *((WIDE, {"dtype": dtype, **WIDE_ROWS}, "matmul_wide") for dtype in WIDE_FORMATS),
        (WIDE, {"dtype": Q4_K, **WIDE_ROWS, "rows": MIN_WIDE_ROWS - 1}, "matmul_narrow"),
        *(
            (SMALL, {"dtype": dtype, "rows": 33, "most": most}, "matmul_few")
            for dtype in (Q4_0, Q6_K)
            for most in SMALL_BUCKETS
        ),
        (PLANES, {"most": PLANES_FROM - 1}, "matmul_tiles"),
        (PLANES, {"rows": MIN_ROWS - 1}, "matmul_tiles"),
        (PLANES, {"rows": 1 << 19}, "matmul_tiles"),
        (PLANES, {"dtype": Q4_0}, "matmul_tiles"),
        (WIDE, {"dtype": Q4_K, "most": WIDE_FROM - 1}, "matmul_tiles"),
        (WIDE, {"dtype": Q6_K, "most": WIDE_FROM}, "matmul_tiles"),
        (SMALL, {"dtype": Q4_K, "most": SMALL_BUCKETS[-1] + 1}, "matmul_tiles"),
    ],
)
def test_kernels_of_products(change, given, name):
    """With the operands, sizes and count they had: by tokens, rows and formats; few tokens, few or
    very many rows and other formats stay in tiles."""
    before = product("gate", **given)
    (_, after) = change(step(before)).ops
    assert after.name == name
    assert (after.operands, after.matrices) == (before.operands, before.matrices)
    assert (after.count, after.sizes, after.dtype) == (before.count, before.sizes, before.dtype)


def of_one_layer() -> list[Op]:
    """Those of queries, keys and values, the last in a format that stays in tiles."""
    queries = product("q", dtype=Q4_K, rows=MIN_WIDE_ROWS, most=WIDE_FROM)
    keys = product("k", dtype=Q4_K, rows=MIN_WIDE_ROWS - 1, most=WIDE_FROM)
    return [keys, queries, product("v", dtype=Q6_K, rows=MIN_WIDE_ROWS - 1, most=WIDE_FROM)]


def test_products_of_the_same_activations_begin_with_the_longest():
    made = with_tiles_128x128(step(*of_one_layer()))
    assert names(made) == ["rms_norm_quantize", "matmul_tiles", "matmul_wide", "matmul_narrow"]


@pytest.mark.parametrize("operand", ["x", "residual"])
def test_those_of_others_stay_where_they_are(operand):
    """They may read what one in front of them writes."""
    ops = of_one_layer()
    index = [o.name for o in ops[1].device.operands].index(operand)
    ops[1].operands = tuple(
        Tensor("k", 0, 512, 512) if i == index else o for i, o in enumerate(ops[1].operands)
    )
    assert names(with_tiles_128x128(step(*ops)))[1:] == [
        *("matmul_narrow", "matmul_wide", "matmul_tiles")
    ]
