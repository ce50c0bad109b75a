"""MOE_GATE_TOPK: chooses the experts of each token and their weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference.exact.elementary import exp
from reference.exact.sums import sum_axis
from reference.matrix import Matrix
from reference.quant.dot import matmul

SMALLEST_SUM = np.float32(2.0**-14)
SMALLEST_NORMAL = np.float32(2.0**-126)


def moe_gate_topk(
    *,
    x: NDArray[np.float32],
    gate_weight: Matrix,
    used: int,
    bias: NDArray[np.float32] | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
    """p = softmax(x gate_weight^T + bias); the ``used`` largest p, renormalized (rules R4, R7).

    x is [tokens, hidden], bias [experts]. Returns logits [tokens, experts], then the ids and
    weights of ``route``.
    """
    logits = matmul(gate_weight.blocks, gate_weight.dtype, x)
    if bias is not None:
        logits = logits + bias
    return (logits, *route(logits, used))


def route(logits: NDArray[np.float32], used: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The ids int32 [tokens, used] of the chosen experts and their weights, from logits [tokens,
    experts].

    ids are ordered by falling probability, equal ones by rising index; a probability below 2^-126
    counts as +0, so that a device that flushes subnormals finds the same ties. The weights are p /
    max(sum of the used p, 2^-14), where the sum adds from left to right in that order. A token
    whose largest logit is NaN or infinite gets experts 0, 1, ... with NaN weights.
    """
    exponentials = exp(logits - logits.max(axis=-1, keepdims=True))
    p = exponentials / sum_axis(exponentials)[:, None]
    p[p < SMALLEST_NORMAL] = 0.0
    ids = np.argsort(-p, axis=-1, kind="stable")[:, :used].astype(np.int32)
    chosen = np.take_along_axis(p, ids, axis=-1)
    total = np.zeros(len(logits), np.float32)
    for rank in range(used):
        total = total + chosen[:, rank]
    bounded: NDArray[np.float32] = np.maximum(total, SMALLEST_SUM)
    return ids, chosen / bounded[:, None]
