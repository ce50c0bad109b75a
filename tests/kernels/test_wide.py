"""Products in wide tiles, whose small matrices the items of a subgroup multiply here: C++ of
Metal's text beside that of the kernel of packed dots, on the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from accel.kernels import product_check
from accel.kernels.matrix_tiles import NARROW_PRODUCT, WIDE_FORMATS, WIDE_PRODUCT, WIDE_PRODUCTS
from accel.kernels.product_check import GROUPS, ROWS, product_of
from accel.kernels.source import Language, Module, module_source
from accel.packets.fused_ops import WIDE_TILE
from contract.arrays import Floats
from contract.dtypes import Q4_K, DType
from tests.kernels import test_tiles
from tests.kernels.metal_modules import compiled
from tests.kernels.test_tiles import assert_noticed, result

TOKENS = WIDE_TILE + 5


@pytest.fixture(autouse=True)
def two_groups_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one is not whole."""
    for module in (product_check, test_tiles):
        monkeypatch.setattr(module, "TOKENS", TOKENS)


@pytest.mark.parametrize("op", WIDE_PRODUCTS)
@pytest.mark.parametrize("dtype", WIDE_FORMATS, ids=str)
def test_wide_tiles_have_the_bits_of_packed_dots(
    right: Callable[[DType], Floats], dtype: DType, op: str, kernel_cache: Path
) -> None:
    """Several groups of rows and of tokens, the last ones not whole, and more than a span of
    columns."""
    expected, found = right(dtype), result(product_of(dtype), op, kernel_cache)
    assert found.shape[0] == TOKENS
    assert np.isfinite(expected).any()
    assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize("op", WIDE_PRODUCTS)
def test_a_residual_may_be_y(right: Callable[[DType], Floats], op: str, kernel_cache: Path) -> None:
    """No total is stored before the residual of its element is added."""
    module = Module(op, Q4_K)
    run = compiled(module, module_source(Language.METAL, module), kernel_cache)
    product, rng = product_of(Q4_K), np.random.default_rng(3)
    bias = rng.standard_normal(ROWS, np.float32)
    y = rng.standard_normal((TOKENS, ROWS), np.float32)
    product = replace(product, strides={**product.strides, "bias": 0, "residual": ROWS})
    addresses = {name: array.ctypes.data for name, array in product.operands.items()}
    addresses |= {"bias": bias.ctypes.data, "residual": y.ctypes.data, "y": y.ctypes.data}
    assert run(product.packet(op, addresses).ctypes.data, GROUPS)
    assert np.array_equal(y, right(Q4_K), equal_nan=True)


@pytest.mark.parametrize(("op", "text", "instead"), [
    (WIDE_PRODUCT, "(ELEMENT(high, e) << 4)", "(ELEMENT(high, e) << 3)"),
    (*(WIDE_PRODUCT, "SPAN_SEGMENTS == SPAN_SEGMENTS - 1u"), "SPAN_SEGMENTS == SPAN_SEGMENTS - 2u"),
    (WIDE_PRODUCT, "2 * 128 * all", "2 * 127 * all"),
    (WIDE_PRODUCT, "b / STEP_BLOCKS, ITEM_ROW, b %", "b / STEP_BLOCKS, ITEM_ROW, 1u - b %"),
    (WIDE_PRODUCT, "ELEMENT(SUM(m, n), e) = 0", "ELEMENT(SUM(m, n), e) = 1"),
    (WIDE_PRODUCT, "STEPS - 1u, sum", "STEPS - 2u, sum"),
    (WIDE_PRODUCT, "STEPS * unit + STEPS,", "STEPS * unit + STEPS - 1u,"),
    (NARROW_PRODUCT, "#define GROUP_TOKENS 64u", "#define GROUP_TOKENS 96u"),
    (NARROW_PRODUCT, "#define ROW_MATRICES 2u", "#define ROW_MATRICES 4u"),
    (NARROW_PRODUCT, "GROUP_ROWS + OWN_TOKEN + (token)", "GROUP_ROWS + (token)"),
])  # fmt: skip
def test_wrong_kernels_are_noticed(
    right: Callable[[DType], Floats], op: str, text: str, instead: str, kernel_cache: Path
) -> None:
    """Negative controls: a wrong weight of the high bytes, spans that end elsewhere, minima off,
    scales of another block, sums that do not begin at zero, the last step of a unit with scales of
    the step before, and the same columns again after it; in narrow tiles, tokens and rows that no
    subgroup has, and the scales of other tokens."""
    assert_noticed(right, op, text, instead, kernel_cache)
