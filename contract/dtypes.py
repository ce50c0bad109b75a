"""Storage types: the bytes of a block of elements, and how rule R5 treats it.

A number is GGML's type id; types that no model file holds are numbered from 1000. ``INTEGER32``
blocks have one scale per 32 elements. A ``SUPERBLOCK`` has 256 elements, which are one segment of
R5, and integer scales for its sub-blocks."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from contract.lazy_dataclass import dataclass


class StorageClass(Enum):
    """The summation of a segment in a product with a matrix of this type (rules R4 and R5)."""

    FLOAT = "float"
    INTEGER32 = "integer32"
    SUPERBLOCK = "superblock"
    INDEX = "index"
    PAGES = "pages"
    """Keys and values of attention heads as integers (rule R6), in KV pages only."""


@dataclass(frozen=True, slots=True)
class DType:
    """One storage type.

    A row of K elements takes ``K / block_elements * block_bytes + row_extra_bytes`` bytes."""

    name: str
    ggml_id: int
    block_elements: int
    block_bytes: int
    storage: StorageClass
    row_extra_bytes: int = 0

    def row_bytes(self, elements: int) -> int:
        """Bytes of one row; raises ValueError when the row is not a whole number of blocks."""
        if elements % self.block_elements:
            raise ValueError(
                f"{elements} elements are not a multiple of the {self.block_elements} "
                f"in a {self.name} block"
            )
        return elements // self.block_elements * self.block_bytes + self.row_extra_bytes

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        # Types are keys of many tables, and names tell them apart.
        return hash(self.name)


F32 = DType("f32", 0, 1, 4, StorageClass.FLOAT)
F16 = DType("f16", 1, 1, 2, StorageClass.FLOAT)
BF16 = DType("bf16", 30, 1, 2, StorageClass.FLOAT)
Q4_0 = DType("q4_0", 2, 32, 18, StorageClass.INTEGER32)
Q4_1 = DType("q4_1", 3, 32, 20, StorageClass.INTEGER32)
Q5_0 = DType("q5_0", 6, 32, 22, StorageClass.INTEGER32)
Q5_1 = DType("q5_1", 7, 32, 24, StorageClass.INTEGER32)
Q8_0 = DType("q8_0", 8, 32, 34, StorageClass.INTEGER32)
IQ4_NL = DType("iq4_nl", 20, 32, 18, StorageClass.INTEGER32)
MXFP4 = DType("mxfp4", 39, 32, 17, StorageClass.INTEGER32)
Q2_K = DType("q2_k", 10, 256, 84, StorageClass.SUPERBLOCK)
Q3_K = DType("q3_k", 11, 256, 110, StorageClass.SUPERBLOCK)
Q4_K = DType("q4_k", 12, 256, 144, StorageClass.SUPERBLOCK)
Q5_K = DType("q5_k", 13, 256, 176, StorageClass.SUPERBLOCK)
Q6_K = DType("q6_k", 14, 256, 210, StorageClass.SUPERBLOCK)
IQ4_XS = DType("iq4_xs", 23, 256, 136, StorageClass.SUPERBLOCK)
I32 = DType("i32", 26, 1, 4, StorageClass.INDEX)
I12 = DType("i12", 1012, 2, 3, StorageClass.PAGES, row_extra_bytes=1)
I4R = DType("i4r", 1004, 32, 19, StorageClass.PAGES, row_extra_bytes=1)
I3R = DType("i3r", 1003, 32, 15, StorageClass.PAGES, row_extra_bytes=1)

WEIGHT_DTYPES = (
    *(F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K),
    *(Q2_K, Q3_K, IQ4_NL, IQ4_XS, MXFP4),
)
KV_DTYPES = (F32, F16, Q8_0, I12, I4R, I3R)
DEFAULT_KV = I12
"""The default type of stored keys and values. It holds exactly the integers rule R6 makes of a row,
so storing loses nothing, and takes a quarter less memory than F16."""
ROTATED_KV: Mapping[DType, tuple[int, int]] = {I4R: (5, 4), I3R: (4, 3)}
"""Types that store rotated keys and values (rule R13), and the bits of a channel of a key and of a
value. Attention rotates queries and results."""
BY_NAME = {dtype.name: dtype for dtype in (*WEIGHT_DTYPES, I32, I12, *ROTATED_KV)}
BY_GGML_ID = {dtype.ggml_id: dtype for dtype in (*WEIGHT_DTYPES, I32)}
"""The types a model file may hold."""
