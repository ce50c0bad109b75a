"""Products in wide tiles, whose small matrices the items of a subgroup multiply here: C++ of
Metal's text beside that of the kernel of packed dots, on the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from accel.kernels import products
from accel.kernels.matrix_tiles import NARROW_PRODUCT, WIDE_FORMATS, WIDE_PRODUCT, WIDE_PRODUCTS
from accel.kernels.products import GROUPS, ROWS, product_of
from accel.kernels.source import Language, Module, module_source
from accel.packets.fused_ops import WIDE_TILE
from contract.dtypes import Q4_K, DType
from tests.kernels import test_tiles
from tests.kernels.metal_modules import compiled
from tests.kernels.test_tiles import Float32, result

TOKENS = WIDE_TILE + 5


@pytest.fixture(autouse=True)
def two_groups_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one is not whole."""
    for module in (products, test_tiles):
        monkeypatch.setattr(module, "TOKENS", TOKENS)


@pytest.mark.parametrize("op", WIDE_PRODUCTS)
@pytest.mark.parametrize("dtype", WIDE_FORMATS, ids=str)
def test_wide_tiles_have_the_bits_of_packed_dots(
    right: Callable[[DType], Float32], dtype: DType, op: str, kernel_cache: Path
) -> None:
    """Several groups of rows and of tokens, the last ones not whole, and more than a span of
    columns."""
    expected, found = right(dtype), result(product_of(dtype), op, kernel_cache)
    assert found.shape[0] == TOKENS
    assert np.isfinite(expected).any()
    assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize("op", WIDE_PRODUCTS)
def test_a_residual_may_be_y(
    right: Callable[[DType], Float32], op: str, kernel_cache: Path
) -> None:
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


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("(ELEMENT(high, e) << 4)", "(ELEMENT(high, e) << 3)"),
        ("SPAN_SEGMENTS == SPAN_SEGMENTS - 1u", "SPAN_SEGMENTS == SPAN_SEGMENTS - 2u"),
        ("2 * 128 * all", "2 * 127 * all"),
        ("b / STEP_BLOCKS, OWN_PLACE, b %", "b / STEP_BLOCKS, OWN_PLACE, 1u - b %"),
        ("ELEMENT(SUM(m, n), e) = 0", "ELEMENT(SUM(m, n), e) = 1"),
        ("STEPS - 1u, sum", "STEPS - 2u, sum"),
        ("STEPS * unit + STEPS,", "STEPS * unit + STEPS - 1u,"),
    ],
)
def test_wrong_kernels_are_noticed(
    right: Callable[[DType], Float32], text: str, instead: str, kernel_cache: Path
) -> None:
    """Negative controls: a wrong weight of the high bytes, spans that end elsewhere, minima off,
    scales of another block, sums that do not begin at zero, the last step of a unit with scales of
    the one before, and the same columns put again behind it."""
    kernel = module_source(Language.METAL, Module(WIDE_PRODUCT, Q4_K))
    assert text in kernel
    wrong = kernel.replace(text, instead)
    found = result(product_of(Q4_K), WIDE_PRODUCT, kernel_cache, wrong)
    assert not np.array_equal(found, right(Q4_K), equal_nan=True)


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("#define GROUP_TOKENS 64u", "#define GROUP_TOKENS 96u"),
        ("#define ROW_MATRICES 2u", "#define ROW_MATRICES 4u"),
        ("GROUP_ROWS + OWN_TOKEN + (token)", "GROUP_ROWS + (token)"),
    ],
)
def test_wrong_narrow_kernels_are_noticed(
    right: Callable[[DType], Float32], text: str, instead: str, kernel_cache: Path
) -> None:
    """Negative controls: tokens and rows that no subgroup has, and what scales other
    tokens."""
    kernel = module_source(Language.METAL, Module(NARROW_PRODUCT, Q4_K))
    assert text in kernel
    wrong = kernel.replace(text, instead)
    found = result(product_of(Q4_K), NARROW_PRODUCT, kernel_cache, wrong)
    assert not np.array_equal(found, right(Q4_K), equal_nan=True)
