"""RMS_NORM_FUSED_MLP_GATE_UP: the norm is rounded to binary32, then two products read it."""

import numpy as np

from contract import dtypes
from reference.ops.rms_norm_fused_mlp_gate_up import rms_norm_fused_mlp_gate_up
from tests.ops.products import exact_product, fractions, random_matrix
from tests.ops.scalar import rms_norm_row


def test_every_bit():
    """Gate first, up second."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, 512), dtype=np.float32)
    norm = rng.standard_normal(512, dtype=np.float32)
    gate, up = random_matrix(dtypes.Q5_K, 3, 512, 1), random_matrix(dtypes.Q4_1, 3, 512, 2)
    got = rms_norm_fused_mlp_gate_up(
        x=x, norm_weight=norm, gate_weight=gate, up_weight=up, eps=1e-6
    )
    h = np.array([rms_norm_row(row, norm, 1e-6) for row in x], np.float32)
    assert fractions(got[0]) == exact_product(h, gate)
    assert fractions(got[1]) == exact_product(h, up)
