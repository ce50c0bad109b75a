"""MOE_GATE_TOPK: which experts a token uses, and how much of each."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference.exact.elementary import exp
from reference.exact.sums import sum_axis
from reference.matrix import Matrix
from reference.quant.dot import matmul

SMALLEST_SUM = np.float32(2.0**-14)


def moe_gate_topk(
    *, x: NDArray[np.float32], gate_weight: Matrix, used: int
) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
    """p = softmax(x gate_weight^T); the ``used`` largest p, renormalized (rules R4, R7).

    x is [tokens, hidden]. Returns logits [tokens, experts], ids int32 [tokens, used] by falling
    probability, equal ones by rising index, and weights [tokens, used] = p / max(sum of the used
    p, 2^-14), the sum being the left fold in that order. A token whose logits hold a NaN or
    +infinity gets experts 0, 1, ... with NaN weights.
    """
    logits = matmul(gate_weight.blocks, gate_weight.dtype, x)
    exponentials = exp(logits - logits.max(axis=-1, keepdims=True))
    p = exponentials / sum_axis(exponentials)[:, None]
    ids = np.argsort(-p, axis=-1, kind="stable")[:, :used].astype(np.int32)
    chosen = np.take_along_axis(p, ids, axis=-1)
    total = np.zeros(len(x), np.float32)
    for place in range(used):
        total = total + chosen[:, place]
    return logits, ids, chosen / np.maximum(total, SMALLEST_SUM)[:, None]
