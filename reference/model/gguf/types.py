"""The type numbers of the GGUF container: metadata value types and GGML tensor types."""

from __future__ import annotations

import struct
from enum import IntEnum

import numpy as np

from contract.dtypes import BY_GGML_ID
from contract.lazy_dataclass import dataclass


class GgufType(IntEnum):
    """The type of a metadata value, or of the items of an array."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_STRUCT_CODES = {
    GgufType.UINT8: "<B",
    GgufType.INT8: "<b",
    GgufType.UINT16: "<H",
    GgufType.INT16: "<h",
    GgufType.UINT32: "<I",
    GgufType.INT32: "<i",
    GgufType.FLOAT32: "<f",
    GgufType.BOOL: "<?",
    GgufType.UINT64: "<Q",
    GgufType.INT64: "<q",
    GgufType.FLOAT64: "<d",
}

SCALAR_STRUCTS = {kind: struct.Struct(code) for kind, code in _STRUCT_CODES.items()}
"""The layout of a scalar of every value type of fixed size."""

NUMERIC_DTYPES = {kind: np.dtype(code) for kind, code in _STRUCT_CODES.items()}
"""The array dtype of every value type of fixed size."""


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A tensor type by its GGML number: ``block_elements`` elements take ``block_bytes`` bytes."""

    name: str
    ggml_id: int
    block_elements: int
    block_bytes: int

    def __str__(self) -> str:
        return self.name


_TYPES = """
q8_1 9 32 40, q2_k 10 256 84, q3_k 11 256 110, q8_k 15 256 292, iq2_xxs 16 256 66,
iq2_xs 17 256 74, iq3_xxs 18 256 98, iq1_s 19 256 50, iq4_nl 20 32 18, iq3_s 21 256 110,
iq2_s 22 256 82, iq4_xs 23 256 136, i8 24 1 1, i16 25 1 2, i64 27 1 8, f64 28 1 8,
iq1_m 29 256 56, tq1_0 34 256 54, tq2_0 35 256 66, mxfp4 39 32 17, nvfp4 40 64 36,
q1_0 41 128 18
"""
"""Name, number, elements and bytes of a block, of the types that have no ``contract`` dtype."""
_WITHOUT_DTYPE = tuple(
    GgmlType(name, *map(int, numbers)) for name, *numbers in map(str.split, _TYPES.split(","))
)

GGML_TYPES = {kind.ggml_id: kind for kind in _WITHOUT_DTYPE} | {
    dtype.ggml_id: GgmlType(dtype.name, dtype.ggml_id, dtype.block_elements, dtype.block_bytes)
    for dtype in BY_GGML_ID.values()
}
"""Every tensor type whose size is known, with or without a ``contract`` dtype, by number."""

WITHDRAWN_GGML_TYPES = {
    4: "q4_2",
    5: "q4_3",
    31: "q4_0_4_4",
    32: "q4_0_4_8",
    33: "q4_0_8_8",
    36: "iq4_nl_4_4",
    37: "iq4_nl_4_8",
    38: "iq4_nl_8_8",
}
"""Numbers GGML has withdrawn, with names, so that the error for an old file is clear."""
