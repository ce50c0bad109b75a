"""Rows of the opcode table: recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping

from contract.arithmetic import SEGMENT
from contract.opcodes import Opcode
from contract.ops.common import EPS, SILU_FLOPS, active_slots, each, operands
from contract.spec import Dim, OpSpec, Param, Scalar

STATES = Param("states", int, "latest states of a slot, by position modulo states", 1, 1)


def _ring(dims: Mapping[str, Dim], params: Mapping[str, Scalar]) -> str | None:
    slots, states = int(dims["slots"]), int(params["states"])
    if slots % states:
        return f"slots is {slots}, which is not a multiple of the {states} states of a slot"
    return None


def _taps(dims: Mapping[str, Dim], params: Mapping[str, Scalar]) -> str | None:
    if isinstance(dims["taps"], str) or dims["taps"] != int(params["history"]) + 1:
        return f"{dims['taps']} taps need a history of one less, not {params['history']}"
    return _ring(dims, params)


def _delta_heads(dims: Mapping[str, Dim], params: Mapping[str, Scalar]) -> str | None:
    size, keys, values = (int(params[name]) for name in ("state_size", "key_heads", "value_heads"))
    expected = size * (2 * keys + values)
    if dims["channels"] != expected:
        return (
            f"channels is {dims['channels']}, expected {expected} = "
            "state_size (2 key_heads + value_heads)"
        )
    if size > SEGMENT:
        return f"state_size ({size}) is more than the {SEGMENT} elements of a segment"
    if values % keys:
        return f"value_heads ({values}) is not a multiple of key_heads ({keys})"
    if dims["rates"] not in (values, values * size):
        return f"rates is {dims['rates']}, expected {values} or {values * size}"
    return _ring(dims, params)


def _scan_heads(dims: Mapping[str, Dim], params: Mapping[str, Scalar]) -> str | None:
    names = ("heads", "groups", "head_dim", "state_size")
    heads, groups, head_dim, size = (int(params[name]) for name in names)
    expected = heads * head_dim + 2 * groups * size
    if dims["channels"] != expected:
        return (
            f"channels is {dims['channels']}, expected {expected} = "
            "heads head_dim + 2 groups state_size"
        )
    if size > SEGMENT:
        return f"state_size ({size}) is more than the {SEGMENT} elements of a segment"
    if heads % groups:
        return f"heads ({heads}) is not a multiple of groups ({groups})"
    return _ring(dims, params)


DELTA_FLOPS = 7
"""Operations per state element of a delta net: decay 1, prediction 2, update 2, read-out 2."""
SCAN_FLOPS = 5
"""Operations per state element of a scan: decay 1, update 2, read-out 2."""
_scan_state = each(1, "heads", "head_dim", "state_size")

RECURRENT = (
    OpSpec(
        Opcode.SSM_CONV1D,
        operands(
            "x[tokens, channels], weight[channels, taps], query, bias[channels]?, "
            "input_gate[tokens, channels]?, output_gate[tokens, channels]?, "
            "&state[slots, history, channels], *y[tokens, channels]"
        ),
        (Param("history", int, "earlier tokens kept", minimum=1), STATES),
        rule="R0 R2 R8",
        formula="position 0 starts from a zero state; u = input_gate * x, or x; "
        "z = left fold of weight[:, i] * u[t - history + i], then + bias; "
        "y = output_gate * z, or silu(z); state keeps the last u, oldest first",
        flops=lambda work: work["tokens"] * work["channels"] * (2 * work["taps"] + SILU_FLOPS),
        touched={"state": lambda work: active_slots(work) * work["history"] * work["channels"]},
        constraint=_taps,
    ),
    OpSpec(
        Opcode.SSM_DELTA_NET,
        operands(
            "x[tokens, channels], alpha[tokens, rates], beta[tokens, value_heads], "
            "decay[value_heads], dt_bias[rates], query, "
            "&state[slots, value_heads, state_size, state_size], "
            "*y[tokens, value_heads*state_size]"
        ),
        (
            Param("key_heads", int, "key heads", minimum=1),
            Param("value_heads", int, "value heads", minimum=1),
            Param("state_size", int, "elements of a key and of a value", minimum=1),
            Param(
                "grouped",
                int,
                "key head of value head j: j // (nv/nk) if 1, j mod nk if 0",
                0,
                0,
                ("tiled", "grouped"),
            ),
            EPS,
            STATES,
        ),
        rule="R0 R2 R4 R8",
        formula="position 0 starts from M = 0; q, k, v = split(x); "
        "q = l2_norm(q) / sqrt(state_size); k = l2_norm(k); "
        "g = exp(softplus(alpha + dt_bias) * decay), one a head or one a head and key; "
        "b = sigmoid(beta); M = g M, each column by its g; r = v - M k; M = M + (b r) k^T; "
        "y = M q; a row of M is a value, a column a key",
        flops=each(DELTA_FLOPS, "tokens", "value_heads", "state_size", "state_size"),
        touched={
            "state": lambda work: active_slots(work) * work["value_heads"] * work["state_size"] ** 2
        },
        constraint=_delta_heads,
    ),
    OpSpec(
        Opcode.SSM_SCAN,
        operands(
            "x[tokens, channels], dt[tokens, heads], decay[heads], dt_bias[heads], skip[heads], "
            "query, &state[slots, heads, head_dim, state_size], *y[tokens, heads*head_dim]"
        ),
        (
            Param("heads", int, "heads of the state", minimum=1),
            Param("groups", int, "groups of heads that share b and c", minimum=1),
            Param("head_dim", int, "elements of a head's value", minimum=1),
            Param("state_size", int, "elements of b and of c", minimum=1),
            STATES,
        ),
        rule="R0 R2 R4 R8",
        formula="position 0 starts from M = 0; v, b, c = split(x); s = softplus(dt + dt_bias); "
        "g = exp(s * decay); M = g M + (s v) b^T; y = M c + skip v; a row of M is a value; "
        "head j reads b and c of group j // (heads / groups)",
        flops=each(SCAN_FLOPS, "tokens", "heads", "head_dim", "state_size"),
        touched={"state": lambda work: active_slots(work) * _scan_state(work)},
        constraint=_scan_heads,
    ),
)
