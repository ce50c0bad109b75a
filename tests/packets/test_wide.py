"""Which products of many tokens are multiplied in wide tiles."""

from __future__ import annotations

import pytest

from accel.packets.step import Op
from accel.packets.wide import LEAST_ROWS, WIDE_FORMATS, WIDE_FROM, with_wide_tiles
from contract.dtypes import Q4_K, Q6_K, DType
from tests.packets.test_planes import names, product, step


@pytest.mark.parametrize(
    ("rows", "name"), [(LEAST_ROWS, "matmul_wide"), (LEAST_ROWS - 1, "matmul_narrow")]
)
@pytest.mark.parametrize("dtype", WIDE_FORMATS, ids=str)
def test_products_of_many_tokens_are(dtype: DType, rows: int, name: str) -> None:
    """With the operands, sizes and count they had; of few rows in tiles of fewer tokens."""
    before = product("gate", dtype=dtype, rows=rows, most=WIDE_FROM)
    (_, after) = with_wide_tiles(step(before)).ops
    assert after.name == name
    assert after.operands == before.operands
    assert (after.count, after.sizes, after.dtype) == (before.count, before.sizes, before.dtype)
    assert after.matrices == before.matrices


@pytest.mark.parametrize(
    "other",
    [
        product("gate", dtype=Q4_K, most=WIDE_FROM - 1),
        product("gate", dtype=Q6_K, most=WIDE_FROM),
    ],
    ids=["few tokens", "another format"],
)
def test_others_are_not(other: Op) -> None:
    assert names(with_wide_tiles(step(other))) == ["rms_norm_quantize", "matmul_tiles"]
