"""SSM_SCAN: Mamba-2's selective scan, one token at a time."""

from __future__ import annotations

import numpy as np

from contract.arrays import Floats, Ints
from contract.records import QUERY_TOKEN
from reference.exact.elementary import exp, softplus
from reference.exact.sums import sum_axis
from reference.ops.ssm_conv1d import state_rows


def ssm_scan(
    *,
    x: Floats,
    dt: Floats,
    decay: Floats,
    dt_bias: Floats,
    skip: Floats,
    query: Ints,
    state: Floats,
    heads: int,
    groups: int,
    head_dim: int,
    state_size: int,
    states: int = 1,
) -> Floats:
    """Advance the state of every token's slot and read it (rule R8).

    x is [tokens, heads head_dim + 2 groups state_size]: values v, then b and c of every group. dt
    is [tokens, heads]; decay, dt_bias and skip are [heads]. ``state`` [slots, heads, head_dim,
    state_size] holds the latest ``states`` states of each slot (see ``state_rows``); the tokens of
    a slot come in order of position, and position 0 starts from zeros. Consecutive heads share a
    group. Sums over the state's last axis are R4 segments. Returns [tokens, heads head_dim]."""
    v, b, c = split_values(x, heads, groups, state_size)
    step = softplus(dt + dt_bias)
    g = exp(step * decay)
    group_of = np.arange(heads) // (heads // groups)
    y = np.empty((len(x), heads, head_dim), np.float32)
    for t, token in enumerate(query.view(QUERY_TOKEN)[:, 0]):
        before, after = state_rows(token, states)
        memory = state[after]
        previous = np.zeros_like(memory) if token["position"] == 0 else state[before]
        change = (step[t, :, None] * v[t])[..., None] * b[t, group_of][:, None, :]
        memory[...] = previous * g[t, :, None, None] + change
        read = sum_axis(memory * c[t, group_of][:, None, :])
        y[t] = read + skip[:, None] * v[t]
    return y.reshape(len(x), heads * head_dim)


def split_values(x: Floats, heads: int, groups: int, state_size: int) -> tuple[Floats, ...]:
    """Values [tokens, heads, head_dim], and b and c, each [tokens, groups, state_size]."""
    width = groups * state_size
    v, b, c = x[:, : -2 * width], x[:, -2 * width : -width], x[:, -width:]
    shape = (len(x), groups, state_size)
    return v.reshape(len(x), heads, v.shape[1] // heads), b.reshape(shape), c.reshape(shape)
