"""Products for matrix units, whose work the items of a subgroup do here: C++ of Metal's text beside
that of the kernel of packed dots, on the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from accel.kernels.product_check import GROUPS, ROWS, TOKENS, Product, product_of
from accel.kernels.source import Language, Module, module_source
from contract.dtypes import IQ4_XS, MXFP4, Q2_K, Q3_K, Q4_0, Q4_K, Q5_1, Q5_K, Q6_K, Q8_0, DType
from tests.kernels.metal_modules import compiled

Float32 = NDArray[np.float32]

FORMATS = (Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS, Q4_0, Q5_1, Q8_0, MXFP4)
"""Every way there is to keep integers and scales."""
TILES = ("matmul_tiles", "matmul_few")


def result(product: Product, op: str, folder: Path, text: str = "") -> Float32:
    """What the kernel of ``op``, or another ``text`` of it, makes of a product, a bias and a
    residual."""
    module = Module(op, product.dtype)
    run = compiled(module, text or module_source(Language.METAL, module), folder)
    rng = np.random.default_rng(3)
    y = np.full((TOKENS, ROWS), np.nan, np.float32)
    arrays = dict(product.operands) | {"y": y}
    arrays["bias"] = rng.standard_normal(ROWS, np.float32)
    arrays["residual"] = rng.standard_normal((TOKENS, ROWS), np.float32)
    product = Product(product.dtype, {}, dict(product.strides) | {"bias": 0, "residual": ROWS})
    packet = product.packet(op, {name: array.ctypes.data for name, array in arrays.items()})
    assert run(packet.ctypes.data, GROUPS)
    return y


@pytest.mark.parametrize("op", TILES)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_tiles_have_the_bits_of_packed_dots(
    right: Callable[[DType], Float32], dtype: DType, op: str, kernel_cache: Path
) -> None:
    """Two groups of rows and of tokens, neither whole, and more than a span of columns."""
    expected, found = right(dtype), result(product_of(dtype), op, kernel_cache)
    assert np.isfinite(expected).any()
    assert np.array_equal(found, expected, equal_nan=True)


def assert_noticed(
    right: Callable[[DType], Float32], op: str, text: str, instead: str, folder: Path
) -> None:
    """A kernel with ``instead`` in place of ``text`` gives other bits."""
    kernel = module_source(Language.METAL, Module(op, Q4_K))
    assert text in kernel
    found = result(product_of(Q4_K), op, folder, kernel.replace(text, instead))
    assert not np.array_equal(found, right(Q4_K), equal_nan=True)


@pytest.mark.parametrize("op", TILES)
@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("const int dot = 16 * ELEMENT(high, e)", "const int dot = 15 * ELEMENT(high, e)"),
        ("SPAN_SEGMENTS == SPAN_SEGMENTS - 1u", "SPAN_SEGMENTS == SPAN_SEGMENTS - 2u"),
        ("128 * minima.sum", "127 * minima.sum"),
    ],
)
def test_wrong_kernels_are_noticed(
    right: Callable[[DType], Float32], text: str, instead: str, op: str, kernel_cache: Path
) -> None:
    """Negative controls: a wrong weight of the high bytes, spans that end elsewhere, minima off."""
    assert_noticed(right, op, text, instead, kernel_cache)
