"""Products for matrix units, in tiles and from planes of bytes, whose work the items of a subgroup
do here: C++ of Metal's text beside that of the kernel of packed dots, on the same bytes."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.kernels import product_check
from accel.kernels.matrix_tiles import (
    EXPANDED_FORMATS,
    FEW_PRODUCT,
    NARROW_PRODUCT,
    WIDE_FORMATS,
    WIDE_PRODUCT,
    WIDE_PRODUCTS,
    plane_bytes,
)
from accel.kernels.product_check import COLUMNS, GROUPS, PLANE_CALLS, ROWS, product_of
from accel.kernels.source import PLANE_PRODUCT, Language, module_source
from accel.packets.fused_ops import WIDE_TILE
from contract.arrays import Floats
from contract.dtypes import IQ4_XS, MXFP4, Q2_K, Q3_K, Q4_0, Q4_K, Q5_1, Q5_K, Q6_K, Q8_0, DType
from tests.kernels.metal_modules import compiled

TOKENS = WIDE_TILE + 5
SMALL_TILES = ("matmul_tiles", FEW_PRODUCT)
FORMATS = (Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS, Q4_0, Q5_1, Q8_0, MXFP4)
"""Every way there is to keep integers and scales."""
Texts = Mapping[str, Callable[[str], str]]
"""What becomes of the texts of some kernels."""


@pytest.fixture(autouse=True)
def two_groups_of_tokens(monkeypatch) -> None:
    """The second one is not whole, however many tokens a group has."""
    planes = {"weight planes": plane_bytes(ROWS, COLUMNS), "x planes": plane_bytes(TOKENS, COLUMNS)}
    monkeypatch.setattr(product_check, "TOKENS", TOKENS)
    monkeypatch.setattr(product_check, "PLANES", planes)


def result(
    op: str, dtype: DType, folder: Path, texts: Texts | None = None, over_y: bool = False
) -> Floats:
    """What the kernel of ``op``, or what expands planes and multiplies them, makes of a product, a
    bias and a residual, which may lie where the result does."""
    made, rng = product_of(dtype), np.random.default_rng(3)
    y = np.full((TOKENS, ROWS), np.nan, np.float32)
    arrays: dict[str, Any] = dict(made.operands) | {"bias": rng.standard_normal(ROWS, np.float32)}
    arrays |= {"residual": rng.standard_normal((TOKENS, ROWS), np.float32), "y": y}
    if over_y:
        arrays["y"] = y = arrays["residual"]
    arrays |= {name: np.full(nbytes, 77, np.uint8) for name, nbytes in product_check.PLANES.items()}
    product = product_check.Product(
        dtype, made.operands, {**made.strides, "bias": 0, "residual": ROWS}
    )
    whole = {name: name for name in (*made.operands, "y")}
    for each, operands in PLANE_CALLS if op == PLANE_PRODUCT else ((op, whole),):
        module = product.module(each)
        text = (texts or {}).get(each, str)(module_source(Language.METAL, module))
        last = {name: name for name in ("bias", "residual")} if "y" in operands else {}
        addresses = {
            operand: arrays[name].ctypes.data for operand, name in {**operands, **last}.items()
        }
        run = compiled(module, text, folder)
        assert run(product.packet(each, addresses).ctypes.data, GROUPS)
    return y


@cache
def right(dtype: DType, folder: Path) -> Floats:
    """What packed dots give."""
    return result("matmul", dtype, folder)


def replaced(text: str, instead: str) -> Callable[[str], str]:
    """A change of a kernel, in which ``text`` is there."""

    def change(kernel: str) -> str:
        assert text in kernel
        return kernel.replace(text, instead)

    return change


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        pytest.param(op, dtype, id=f"{dtype}-{op}")
        for ops, dtypes in (
            (SMALL_TILES, FORMATS),
            (WIDE_PRODUCTS, WIDE_FORMATS),
            ((PLANE_PRODUCT,), EXPANDED_FORMATS),
        )
        for dtype in dtypes
        for op in ops
    ],
)
def test_tiles_have_the_bits_of_packed_dots(op, dtype, kernel_cache):
    """All codes, scales and activations there can be, several groups of rows and of tokens, the
    last ones not whole, more than a span of columns; planes have rests of other bytes."""
    expected, found = right(dtype, kernel_cache), result(op, dtype, kernel_cache)
    assert np.isfinite(expected).any()
    assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize("op", WIDE_PRODUCTS)
def test_a_residual_may_be_y(op, kernel_cache):
    """No total is stored before the residual of its element is added."""
    found = result(op, Q4_K, kernel_cache, over_y=True)
    assert np.array_equal(found, right(Q4_K, kernel_cache), equal_nan=True)


SPANS = "SPAN_SEGMENTS == SPAN_SEGMENTS - 1u"
CONTROLS = [
    *(
        (op, op, *control)
        for op in SMALL_TILES
        for control in (
            ("const int dot = 16 * ELEMENT(high, e)", "const int dot = 15 * ELEMENT(high, e)"),
            (SPANS, "SPAN_SEGMENTS == SPAN_SEGMENTS - 2u"),
            ("128 * minima.sum", "127 * minima.sum"),
        )
    ),
    *(
        (WIDE_PRODUCT, WIDE_PRODUCT, *control)
        for control in (
            ("(ELEMENT(high, e) << 4)", "(ELEMENT(high, e) << 3)"),
            (SPANS, "SPAN_SEGMENTS == SPAN_SEGMENTS - 2u"),
            ("2 * 128 * all", "2 * 127 * all"),
            ("b / STEP_BLOCKS, ITEM_ROW, b %", "b / STEP_BLOCKS, ITEM_ROW, 1u - b %"),
            ("ELEMENT(SUM(m, n), e) = 0", "ELEMENT(SUM(m, n), e) = 1"),
            ("STEPS - 1u, sum", "STEPS - 2u, sum"),
            ("STEPS * unit + STEPS,", "STEPS * unit + STEPS - 1u,"),
        )
    ),
    *(
        (NARROW_PRODUCT, NARROW_PRODUCT, *control)
        for control in (
            ("#define GROUP_TOKENS 64u", "#define GROUP_TOKENS 96u"),
            ("#define ROW_MATRICES 2u", "#define ROW_MATRICES 4u"),
            ("GROUP_ROWS + OWN_TOKEN + (token)", "GROUP_ROWS + (token)"),
        )
    ),
    *(
        (PLANE_PRODUCT, *control)
        for control in (
            ("expand_weight", "(risen + low) ^ sign", "risen ^ sign"),
            ("expand_weight", "128 * all", "127 * all"),
            ("expand_tokens", "& 0x03030303u", "& 0x01010101u"),
            (PLANE_PRODUCT, "0x41041040u", "0x41041041u"),
            (PLANE_PRODUCT, SPANS, "SPAN_SEGMENTS == 1u"),
            (PLANE_PRODUCT, "value = value - AS_F32", "value = value + AS_F32"),
        )
    ),
]


@pytest.mark.parametrize(("op", "changed", "text", "instead"), CONTROLS)
def test_wrong_kernels_are_noticed(op, changed, text, instead, kernel_cache):
    """Negative controls: a wrong weight of the high bytes, spans that end elsewhere, minima off,
    scales of another block, sums that do not begin at zero, the last step of a unit with scales of
    the step before, the same columns again after it; tokens and rows that no subgroup has, scales
    of other tokens; planes, the multiplier behind a plane, totals."""
    found = result(op, Q4_K, kernel_cache, {changed: replaced(text, instead)})
    assert not np.array_equal(found, right(Q4_K, kernel_cache), equal_nan=True)


@pytest.mark.parametrize("instead", ["unit >= SPAN_SEGMENTS", "unit >= 2u * SPAN_SEGMENTS"])
def test_totals_of_several_spans(instead, kernel_cache):
    """Both kernels with a span a unit, and a total that is forgotten."""
    short = replaced("define SPAN_SEGMENTS 4u", "define SPAN_SEGMENTS 1u")
    texts = {
        "matmul": short,
        PLANE_PRODUCT: lambda text: replaced("unit >= SPAN_SEGMENTS", instead)(short(text)),
    }
    found, other = (result(op, Q4_K, kernel_cache, texts) for op in (PLANE_PRODUCT, "matmul"))
    assert np.array_equal(found, other, equal_nan=True) == (instead == "unit >= SPAN_SEGMENTS")
