"""GGML storage formats: the registry of all formats, and checks of their scales."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np

from contract.arrays import Bytes
from contract.dtypes import F16, WEIGHT_DTYPES, DType
from contract.tier import FiniteWords
from reference.quant.formats import Blocks32, SuperBlocks
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
    "finite_words",
    "moderate_scales",
]

FORMATS: Mapping[DType, Format] = {
    dtype: FLOATS.get(dtype) or LAYOUTS[dtype] for dtype in WEIGHT_DTYPES
}
"""Every format a weight can be stored in."""


def find_nonfinite_scale(dtype: DType, blocks: Bytes) -> tuple[int, int] | None:
    """The first (row, block) whose scale or minimum is NaN or infinite, or None.

    ``blocks`` is uint8[rows, row_bytes]. In a float format every element is a block. The exponent
    255 of MXFP4 is NaN in the standard that defines it."""
    exponent = finite_words(dtype).exponent
    parts = blocks.view(_words_of(dtype))
    broken, *others = (parts[name] & exponent == exponent for name in parts.dtype.names or ())
    for mark in others:
        broken |= mark
    if not broken.any():
        return None
    row, at = np.unravel_index(int(broken.argmax()), broken.shape)
    return int(row), int(at)


@cache
def finite_words(dtype: DType) -> FiniteWords:
    """The words of a block that must be finite: its scales and minima, or a float format's
    element."""
    form, nbytes = FORMATS[dtype], dtype.block_bytes
    if isinstance(form, FloatFormat):
        return FiniteWords(nbytes, (nbytes - 2,), 2, 0x7C00 if dtype == F16 else 0x7F80)
    fields = form.block.fields
    assert fields is not None
    offsets = tuple(fields[name][1] for name in form.floats or (form.scale,))
    return FiniteWords(nbytes, offsets, *((2, 0x7C00) if form.floats else (1, 0xFF)))


@cache
def _words_of(dtype: DType) -> np.dtype[np.void]:
    """A structured dtype of a block's ``finite_words``. Made once per dtype: see ``Layout``."""
    words = finite_words(dtype)
    return np.dtype(
        {
            "names": [str(offset) for offset in words.offsets],
            "formats": [f"<u{words.word_bytes}"] * len(words.offsets),
            "offsets": words.offsets,
            "itemsize": words.block_bytes,
        }
    )


def moderate_scales(dtype: DType, blocks: Bytes) -> None:
    """Change the scales of random blocks, in place, so that every magnitude is below 2.

    ``blocks`` is uint8[rows, row_bytes] of a format with scales; the integers stay as they are."""
    form = LAYOUTS[dtype]
    parts = form.parts(blocks)
    for name in form.floats:
        parts[name].view("<u2")[...] &= 0xBFFF
    if not form.floats:
        parts["e"] = 96 | parts["e"] & 31
