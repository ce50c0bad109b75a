"""RMS_NORM_FUSED_QKV: the norm is rounded to binary32, then three products read it."""

import numpy as np

from contract import dtypes
from reference.ops.rms_norm_fused_qkv import rms_norm_fused_qkv
from tests.ops.products import exact_product, fractions, random_matrix
from tests.ops.scalar import rms_norm_row


def test_every_bit():
    """Three formats at once, as a mixed file has them."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, 512), dtype=np.float32)
    norm = rng.standard_normal(512, dtype=np.float32)
    weights = [
        random_matrix(dtype, rows, 512, rows)
        for dtype, rows in ((dtypes.Q4_K, 4), (dtypes.Q8_0, 2), (dtypes.Q6_K, 2))
    ]
    got = rms_norm_fused_qkv(
        x=x, norm_weight=norm, q_weight=weights[0], k_weight=weights[1], v_weight=weights[2],
        eps=1e-5,
    )  # fmt: skip
    h = np.array([rms_norm_row(row, norm, 1e-5) for row in x], np.float32)
    for output, weight in zip(got, weights, strict=True):
        assert fractions(output) == exact_product(h, weight)
