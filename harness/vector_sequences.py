"""Recurrent opcodes over one whole sequence, for the stored vectors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from contract.records import QUERY_TOKEN
from reference.ops.ssm_conv1d import ssm_conv1d
from reference.ops.ssm_delta_net import ssm_delta_net
from reference.ops.ssm_scan import ssm_scan

Float32 = NDArray[np.float32]


def convolved(x: Float32, weight: Float32, **extras: Float32) -> Float32:
    """The convolution with any of its optional operands, from an empty state."""
    history = weight.shape[1] - 1
    state = np.zeros((1, history, x.shape[1]), np.float32)
    query = _query(len(x))
    return ssm_conv1d(
        x=x, weight=weight, query=query, state=state, history=history, states=1, **extras
    )


def delta_rule(
    x: Float32, alpha: Float32, beta: Float32, decay: Float32, dt_bias: Float32, grouped: int
) -> Float32:
    """Two key heads and four value heads of eight elements, from an empty state."""
    return ssm_delta_net(
        x=x, alpha=alpha, beta=beta, decay=-np.abs(decay), dt_bias=dt_bias, query=_query(len(x)),
        state=np.zeros((1, 4, 8, 8), np.float32), key_heads=2, value_heads=4, state_size=8,
        eps=1e-6, grouped=grouped,
    )  # fmt: skip


def scanned(x: Float32, dt: Float32, decay: Float32, dt_bias: Float32, skip: Float32) -> Float32:
    """Four heads of three values in two groups, eight elements of state, from an empty state."""
    return ssm_scan(
        x=x, dt=dt, decay=-np.abs(decay), dt_bias=dt_bias, skip=skip, query=_query(len(x)),
        state=np.zeros((1, 4, 3, 8), np.float32), heads=4, groups=2, head_dim=3, state_size=8,
    )  # fmt: skip


def _query(length: int) -> NDArray[np.int32]:
    query = np.zeros((length, 1), QUERY_TOKEN)
    query["position"] = np.arange(length)[:, None]
    return query.view(np.int32).reshape(length, 4)
