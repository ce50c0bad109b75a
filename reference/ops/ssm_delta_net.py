"""SSM_DELTA_NET: the gated delta rule, one token at a time."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from contract.arrays import Floats, Ints
from contract.records import QUERY_TOKEN
from reference.exact.elementary import exp, sigmoid, softplus
from reference.exact.sums import sum_axis
from reference.ops.ssm_conv1d import state_rows

ONE = np.float32(1.0)


def ssm_delta_net(
    *,
    x: Floats,
    alpha: Floats,
    beta: Floats,
    decay: Floats,
    dt_bias: Floats,
    query: Ints,
    state: Floats,
    key_heads: int,
    value_heads: int,
    state_size: int,
    eps: float,
    grouped: int = 0,
    states: int = 1,
) -> Floats:
    """Advance the state of every token's slot and read it (rule R8).

    x is [tokens, (2 key_heads + value_heads) state_size]: queries, keys, values. beta is [tokens,
    value_heads], decay [value_heads]; alpha [tokens, rates] and dt_bias [rates] have a rate for
    each value head, or for each of its keys. ``state`` [slots, value_heads,
    value, key] holds the latest ``states`` states of each slot (see ``state_rows``); the tokens of
    a slot come in order of position, and position 0 starts from zeros. Value head j reads key head
    j // (value_heads / key_heads) when ``grouped``, else j mod key_heads. Sums over the key axis
    are R4 segments. Returns [tokens, value_heads * state_size]."""
    q, k, v = split_heads(x, key_heads, value_heads, state_size)
    q = l2_norm(q, eps) * np.float32(1.0 / math.sqrt(state_size))
    k = l2_norm(k, eps)
    key_of = key_head_of(key_heads, value_heads, grouped)
    g = decays(alpha, dt_bias, decay)
    b = sigmoid(beta)
    y = np.empty((len(x), value_heads, state_size), np.float32)
    for t, token in enumerate(query.view(QUERY_TOKEN)[:, 0]):
        before, after = state_rows(token, states)
        key, memory = k[t, key_of][:, None, :], state[after]
        previous = np.zeros_like(memory) if token["position"] == 0 else state[before]
        decayed = previous * g[t, :, None, :]
        error = v[t] - sum_axis(decayed * key)
        memory[...] = decayed + (b[t, :, None] * error)[..., None] * key
        y[t] = sum_axis(memory * q[t, key_of][:, None, :])
    return y.reshape(len(x), value_heads * state_size)


def split_heads(x: Floats, key_heads: int, value_heads: int, state_size: int) -> tuple[Floats, ...]:
    """Queries, keys and values of x, each [tokens, heads, state_size]."""
    heads = x.reshape(len(x), 2 * key_heads + value_heads, state_size)
    return heads[:, :key_heads], heads[:, key_heads : 2 * key_heads], heads[:, 2 * key_heads :]


def decays(alpha: Floats, dt_bias: Floats, decay: Floats) -> Floats:
    """What each token multiplies states by, [tokens, value_heads, 1 or keys]."""
    shape = len(alpha), len(decay), len(dt_bias) // len(decay)
    return exp(softplus(alpha + dt_bias).reshape(shape) * decay[:, None])


def key_head_of(key_heads: int, value_heads: int, grouped: int) -> NDArray[np.intp]:
    """The key head that each value head reads, [value_heads]."""
    heads = np.arange(value_heads)
    return heads // (value_heads // key_heads) if grouped else heads % key_heads


def l2_norm(x: Floats, eps: float) -> Floats:
    """x * (1 / sqrt(sum(x x) + eps)) over the last axis (rule R4)."""
    r: Floats = ONE / np.sqrt(sum_axis(x * x) + np.float32(eps))
    return x * r[..., None]
