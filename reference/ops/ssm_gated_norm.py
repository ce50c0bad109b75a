"""SSM_GATED_NORM: the norm and output gate of a delta-net layer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference.exact.elementary import silu
from reference.ops.rms_norm import rms_norm


def ssm_gated_norm(
    *,
    x: NDArray[np.float32],
    gate: NDArray[np.float32],
    weight: NDArray[np.float32],
    eps: float,
    heads: int,
) -> NDArray[np.float32]:
    """y = rms_norm(x, weight) * silu(gate), per head (rule R4).

    x, gate and the result are [tokens, heads * width], weight [width]."""
    return rms_norm(x=x, weight=weight, eps=eps, groups=heads) * silu(gate)
