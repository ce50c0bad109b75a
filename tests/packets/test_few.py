"""Which products on matrix units are multiplied in small tiles."""

from __future__ import annotations

import pytest

from accel.packets.few import FEW_FORMS, with_few_tokens
from accel.packets.step import Op
from contract.dtypes import Q4_0, Q4_K, Q6_K, DType
from tests.packets.test_planes import names, product, step


@pytest.mark.parametrize("dtype", [Q4_0, Q4_K, Q6_K], ids=str)
@pytest.mark.parametrize("most", FEW_FORMS)
def test_products_of_few_tokens_are(dtype: DType, most: int) -> None:
    """With the operands, sizes and count they had, of any format and size."""
    before = product("gate", dtype=dtype, rows=33, most=most)
    (_, after) = with_few_tokens(step(before)).ops
    assert after.name == "matmul_few"
    assert after.operands == before.operands
    assert (after.count, after.sizes, after.dtype) == (before.count, before.sizes, before.dtype)
    assert after.matrices == before.matrices


def test_others_are_not() -> None:
    other: Op = product("gate", dtype=Q4_K, most=FEW_FORMS[-1] + 1)
    assert names(with_few_tokens(step(other))) == ["rms_norm_quantize", "matmul_tiles"]
