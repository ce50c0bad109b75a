"""Which products on matrix units are multiplied in small tiles."""

from __future__ import annotations

import pytest

from accel.packets.step import Op
from accel.vulkan.tiles_32x16 import SMALL_BUCKETS, with_tiles_32x16
from contract.dtypes import Q4_0, Q4_K, Q6_K, DType
from tests.vulkan.test_expanded_tiles import names, product, step


@pytest.mark.parametrize("dtype", [Q4_0, Q4_K, Q6_K], ids=str)
@pytest.mark.parametrize("most", SMALL_BUCKETS)
def test_products_of_few_tokens_are(dtype: DType, most: int) -> None:
    """With the operands, sizes and count they had, of any format and size."""
    before = product("gate", dtype=dtype, rows=33, most=most)
    (_, after) = with_tiles_32x16(step(before)).ops
    assert after.name == "matmul_few"
    assert after.operands == before.operands
    assert (after.count, after.sizes, after.dtype) == (before.count, before.sizes, before.dtype)
    assert after.matrices == before.matrices


def test_others_are_not() -> None:
    other: Op = product("gate", dtype=Q4_K, most=SMALL_BUCKETS[-1] + 1)
    assert names(with_tiles_32x16(step(other))) == ["rms_norm_quantize", "matmul_tiles"]
