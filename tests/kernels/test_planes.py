"""Products from planes of bytes, whose small matrices the items of a subgroup multiply here: C++ of
Metal's text beside that of the kernel of packed dots, on the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from accel.kernels.matrix_tiles import EXPANDED_FORMATS
from accel.kernels.product_check import (
    GROUPS,
    PLANE_CALLS,
    PLANES,
    ROWS,
    TOKENS,
    Product,
    product_of,
)
from accel.kernels.source import Language, module_source
from contract.arrays import Floats
from contract.dtypes import Q4_K, DType
from tests.kernels.metal_modules import compiled
from tests.kernels.test_tiles import result

Texts = Mapping[str, tuple[str, str]]


def expanded(product: Product, folder: Path, texts: Texts | None = None) -> Floats:
    """The product, a bias and a residual; of the kernels named in ``texts`` a part is replaced."""
    rng = np.random.default_rng(3)
    arrays = dict(product.operands) | {"y": np.full((TOKENS, ROWS), np.nan, np.float32)}
    arrays["bias"] = rng.standard_normal(ROWS, np.float32)
    arrays["residual"] = rng.standard_normal((TOKENS, ROWS), np.float32)
    arrays |= {name: np.full(nbytes, 77, np.uint8) for name, nbytes in PLANES.items()}
    product = Product(product.dtype, {}, dict(product.strides) | {"bias": 0, "residual": ROWS})
    for op, operands in PLANE_CALLS:
        module = product.module(op)
        text = module_source(Language.METAL, module)
        if texts is not None and op in texts:
            assert texts[op][0] in text
            text = text.replace(*texts[op])
        last = {name: name for name in ("bias", "residual")} if op == "matmul_planes" else {}
        addresses = {o: arrays[p].ctypes.data for o, p in (dict(operands) | last).items()}
        run = compiled(module, text, folder)
        assert run(product.packet(op, addresses).ctypes.data, GROUPS)
    return arrays["y"]


@pytest.mark.parametrize("dtype", EXPANDED_FORMATS, ids=str)
def test_planes_have_the_bits_of_packed_dots(
    right: Callable[[DType], Floats], dtype: DType, kernel_cache: Path
) -> None:
    """All codes, scales and activations there can be, groups that are not whole, more than a span
    of columns; what planes have no room for holds other bytes."""
    expected, found = right(dtype), expanded(product_of(dtype), kernel_cache)
    assert np.isfinite(expected).any()
    assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize(
    ("op", "text", "instead"),
    [
        ("expand_weight", "(risen + low) ^ sign", "risen ^ sign"),
        ("expand_weight", "128 * all", "127 * all"),
        ("expand_tokens", "& 0x03030303u", "& 0x01010101u"),
        ("matmul_planes", "0x41041040u", "0x41041041u"),
        ("matmul_planes", "SPAN_SEGMENTS == SPAN_SEGMENTS - 1u", "SPAN_SEGMENTS == 1u"),
        ("matmul_planes", "value = value - AS_F32", "value = value + AS_F32"),
    ],
)
def test_wrong_kernels_are_noticed(
    right: Callable[[DType], Floats], op: str, text: str, instead: str, kernel_cache: Path
) -> None:
    """Negative controls: planes, minima, the multiplier behind a plane, spans and their totals."""
    found = expanded(product_of(Q4_K), kernel_cache, {op: (text, instead)})
    assert not np.array_equal(found, right(Q4_K), equal_nan=True)


SHORT_SPANS = ("define SPAN_SEGMENTS 4u", "define SPAN_SEGMENTS 1u")


@pytest.mark.parametrize("instead", ["unit >= SPAN_SEGMENTS", "unit >= 2u * SPAN_SEGMENTS"])
def test_totals_of_several_spans(instead: str, kernel_cache: Path) -> None:
    """Both kernels with a span a unit, and a total that is forgotten."""
    product = product_of(Q4_K)
    text = module_source(Language.METAL, product.module("matmul")).replace(*SHORT_SPANS)
    planes = module_source(Language.METAL, product.module("matmul_planes"))
    short = planes.replace(*SHORT_SPANS)
    assert SHORT_SPANS[1] in text
    assert SHORT_SPANS[1] in short
    assert "unit >= SPAN_SEGMENTS" in short
    short = short.replace("unit >= SPAN_SEGMENTS", instead)
    found = expanded(product, kernel_cache, {"matmul_planes": (planes, short)})
    same = np.array_equal(found, result(product, "matmul", kernel_cache, text), equal_nan=True)
    assert same == (instead == "unit >= SPAN_SEGMENTS")
