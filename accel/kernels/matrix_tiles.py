"""Names of the kernels for Vulkan's matrix units, and the weight formats they read."""

from __future__ import annotations

from accel.packets.device_op import pieces
from accel.packets.layouts import UNIT_COLUMNS
from contract.dtypes import Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, DType

FEW_PRODUCT = "matmul_few"
"""The kernel for tiles of 32 rows and 16 tokens."""
WIDE_PRODUCT, NARROW_PRODUCT = "matmul_wide", "matmul_narrow"
"""The kernels for tiles of 128 rows and 128 tokens, or 64."""
WIDE_PRODUCTS = (WIDE_PRODUCT, NARROW_PRODUCT)
WIDE_FORMATS = (Q4_K, Q5_K)
"""Formats with super-blocks of 32-blocks with minima."""
EXPANDED_FORMATS = (Q2_K, Q3_K, Q4_K, Q6_K)
"""Formats that can be expanded to planes of bytes: their integers times the scales of their
sub-blocks are below 2^13."""
WITH_MINIMA = (Q2_K, Q4_K)
PRODUCT_FORMATS = (Q4_K, Q6_K)
"""Formats of the kernels that multiply planes, with minima and without."""
GROUP_ROWS = 128
"""Rows and tokens of a group of ``matmul_planes.k``."""
STEP_BYTES, UNIT_BYTES = 128, 6 * 128 + 48
"""Bytes of a row in planes: of a step of columns, and of a unit with its sums."""


def plane_bytes(rows: int, columns: int) -> int:
    """Bytes of a matrix of ``rows`` rows or tokens in planes. Kernels load one step more than the
    last."""
    units, padded = pieces(columns, UNIT_COLUMNS), pieces(rows, GROUP_ROWS) * GROUP_ROWS
    return padded * (UNIT_BYTES * units + STEP_BYTES)


def product_format(dtype: DType) -> DType:
    """The format among PRODUCT_FORMATS whose kernel multiplies planes of ``dtype``."""
    return Q4_K if dtype in WITH_MINIMA else Q6_K
