"""GGML storage formats: the table of layouts, and the registry of all formats."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from contract.dtypes import WEIGHT_DTYPES, DType
from reference.quant.formats import Blocks32, Bytes, SuperBlocks
from reference.quant.layouts import FLOATS, LAYOUTS, FloatFormat, Format
from reference.quant.rounding import EXPONENT_BIAS

__all__ = [
    "EXPONENT_BIAS",
    "FORMATS",
    "LAYOUTS",
    "Blocks32",
    "Format",
    "SuperBlocks",
    "find_nonfinite_scale",
    "moderate_scales",
]

FORMATS: Mapping[DType, Format] = MappingProxyType(
    {dtype: FLOATS.get(dtype) or LAYOUTS[dtype] for dtype in WEIGHT_DTYPES}
)
"""Every format a weight may be stored in."""


def find_nonfinite_scale(dtype: DType, blocks: Bytes) -> tuple[int, int] | None:
    """The first (row, block) whose scale or minimum is NaN or infinite, or None.

    ``blocks`` uint8[rows, row_bytes]. In a float format every element is a block of its own.
    The exponent 255 of MXFP4 is NaN in the standard that defines it.
    """
    form = FORMATS[dtype]
    if isinstance(form, FloatFormat):
        exponent = {"f32": 0x7F80, "f16": 0x7C00, "bf16": 0x7F80}[dtype.name]
        upper = blocks.view("<u2")[:, dtype.block_bytes // 2 - 1 :: dtype.block_bytes // 2]
        broken = upper & exponent == exponent
    else:
        parts = form.parts(blocks)
        marks = [parts[name].view("<u2") & 0x7C00 == 0x7C00 for name in form.floats]
        broken = marks[0] if marks else parts["e"] == 0xFF
        for mark in marks[1:]:
            broken |= mark
    if not broken.any():
        return None
    row, block = np.unravel_index(int(broken.argmax()), broken.shape)
    return int(row), int(block)


def moderate_scales(dtype: DType, blocks: Bytes) -> None:
    """Change the scales of random blocks, in place, such that every magnitude is below 2.

    ``blocks`` uint8[rows, row_bytes] of a format with scales; every integer stays as it is.
    """
    form = LAYOUTS[dtype]
    parts = form.parts(blocks)
    for name in form.floats:
        parts[name].view("<u2")[...] &= 0xBFFF
    if not form.floats:
        parts["e"] = 96 | parts["e"] & 31
