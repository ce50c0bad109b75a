"""RESIDUAL_RMS_NORM: the sum is rounded before it is normalized, and returned."""

import numpy as np

from reference.ops.residual_rms_norm import residual_rms_norm
from tests.ops.scalar import rms_norm_row


def test_scalar_rule():
    """Both outputs, every bit."""
    rng = np.random.default_rng(4)
    x, residual = rng.standard_normal((2, 3, 577), dtype=np.float32)
    weight = rng.standard_normal(577, dtype=np.float32)
    total, y = residual_rms_norm(x=x, residual=residual, norm_weight=weight, eps=1e-6)
    for row in range(3):
        added = [np.float32(r + v) for r, v in zip(residual[row], x[row], strict=True)]
        assert total[row].tolist() == added
        assert y[row].tolist() == rms_norm_row(added, weight, 1e-6)
