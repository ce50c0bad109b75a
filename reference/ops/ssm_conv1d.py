"""SSM_CONV1D: the short causal convolution of a recurrent layer."""

from __future__ import annotations

import numpy as np

from contract.arrays import Floats, Ints
from contract.records import QUERY_TOKEN
from reference.exact.elementary import silu


def ssm_conv1d(
    *,
    x: Floats,
    weight: Floats,
    query: Ints,
    state: Floats,
    history: int,
    bias: Floats | None = None,
    input_gate: Floats | None = None,
    output_gate: Floats | None = None,
    states: int = 1,
) -> Floats:
    """y[t] = silu(sum_i weight[:, i] * u[t - history + i] + bias), u = x, added from left to right
    (rule R8).

    x is [tokens, channels], weight [channels, history + 1]. With ``input_gate`` u is input_gate *
    x; with ``output_gate`` the sum is multiplied by it instead of passing through silu. state
    [slots, history, channels] holds the last u after each of a slot's latest ``states`` positions,
    oldest first (see ``state_rows``). The tokens of a slot come in order of position; position 0
    starts from zeros."""
    y = np.empty_like(x)
    u = x if input_gate is None else input_gate * x
    for t, token in enumerate(query.view(QUERY_TOKEN)[:, 0]):
        before, after = state_rows(token, states)
        past = np.zeros_like(state[after]) if token["position"] == 0 else state[before]
        window = np.concatenate([past, u[t : t + 1]])
        total = np.zeros(x.shape[1], np.float32)
        for tap in range(history + 1):
            total = total + weight[:, tap] * window[tap]
        if bias is not None:
            total = total + bias
        y[t] = silu(total) if output_gate is None else output_gate[t] * total
        state[after] = window[1:]
    return y


def state_rows(token: np.void, states: int) -> tuple[int, int]:
    """The rows of a state that a QUERY_TOKEN reads and writes. A slot has ``states`` rows, and the
    state after a position is in the row of its remainder, so that the latest ones remain."""
    first, position = int(token["slot"]) * states, int(token["position"])
    return first + (position - 1) % states, first + position % states
