"""Which products of many tokens are multiplied in wide tiles."""

from __future__ import annotations

import pytest

from accel.kernels.matrix_tiles import WIDE_FORMATS
from accel.packets.step import Op, Tensor
from accel.vulkan.tiles_128x128 import LEAST_ROWS, WIDE_FROM, with_tiles_128x128
from contract.dtypes import Q4_K, Q6_K, DType
from tests.vulkan.test_expanded_tiles import names, product, step


@pytest.mark.parametrize(
    ("rows", "name"), [(LEAST_ROWS, "matmul_wide"), (LEAST_ROWS - 1, "matmul_narrow")]
)
@pytest.mark.parametrize("dtype", WIDE_FORMATS, ids=str)
def test_products_of_many_tokens_are(dtype: DType, rows: int, name: str) -> None:
    """With the operands, sizes and count they had; of few rows in tiles of fewer tokens."""
    before = product("gate", dtype=dtype, rows=rows, most=WIDE_FROM)
    (_, after) = with_tiles_128x128(step(before)).ops
    assert after.name == name
    assert after.operands == before.operands
    assert (after.count, after.sizes, after.dtype) == (before.count, before.sizes, before.dtype)
    assert after.matrices == before.matrices


@pytest.mark.parametrize(
    "other",
    [product("gate", dtype=Q4_K, most=WIDE_FROM - 1), product("gate", dtype=Q6_K, most=WIDE_FROM)],
    ids=["few tokens", "another format"],
)
def test_others_are_not(other: Op) -> None:
    assert names(with_tiles_128x128(step(other))) == ["rms_norm_quantize", "matmul_tiles"]


def of_one_layer() -> list[Op]:
    """Those of queries, keys and values, the last in a format that stays in tiles."""
    queries = product("q", dtype=Q4_K, rows=LEAST_ROWS, most=WIDE_FROM)
    keys = product("k", dtype=Q4_K, rows=LEAST_ROWS - 1, most=WIDE_FROM)
    return [keys, queries, product("v", dtype=Q6_K, rows=LEAST_ROWS - 1, most=WIDE_FROM)]


def test_products_of_the_same_activations_begin_with_the_longest() -> None:
    made = with_tiles_128x128(step(*of_one_layer()))
    assert names(made) == ["rms_norm_quantize", "matmul_tiles", "matmul_wide", "matmul_narrow"]


@pytest.mark.parametrize("operand", ["x", "residual"])
def test_those_of_others_stay_where_they_are(operand: str) -> None:
    """They may read what one in front of them writes."""
    ops = of_one_layer()
    place = [o.name for o in ops[1].device.operands].index(operand)
    ops[1].operands = tuple(
        Tensor("k", 0, 512, 512) if i == place else o for i, o in enumerate(ops[1].operands)
    )
    assert names(with_tiles_128x128(step(*ops)))[1:] == [
        *("matmul_narrow", "matmul_wide", "matmul_tiles")
    ]
