"""Falcon-H1 in plain float64: attention and Mamba-2 side by side in every layer."""

import numpy as np
from numpy.typing import NDArray

from tests.peer.float64_granite_hybrid import Mamba2
from tests.peer.float64_llama import Float64


class Float64FalconH1(Mamba2):
    """Both read the same norm; their results are added."""

    def _attention(self, h: Float64, layer: int, positions: NDArray[np.int64]) -> Float64:
        attended = super()._attention(h, layer, positions)
        return attended + self._mamba(h, f"blk.{layer}.ssm_")
