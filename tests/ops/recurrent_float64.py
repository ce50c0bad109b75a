"""Recurrent layers in binary64, one sequence and one head at a time, as papers write them.

``mistake`` breaks one formula on purpose, so that a test can show that it would have noticed."""

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

CONV_MISTAKES = ("taps reversed", "silu before", "no silu", "one token late")
DELTA_MISTAKES = (
    *("decay after update", "prediction before decay", "no prediction", "read before update"),
    *("key and value transposed", "query not scaled", "eps outside the root"),
    *("decay not by softplus", "raw beta"),
)
BY_KEY_MISTAKES = ("decay by value", "one decay")
SCAN_MISTAKES = (
    *("decay after update", "step not by softplus", "step not in the update"),
    *("read before update", "skip times the step"),
)
NORM_MISTAKES = ("gate first", "sigmoid", "all heads together", "eps outside the root")


def sigmoid(x: Float64) -> Float64:
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + np.exp(-x))


def silu(x: Float64) -> Float64:
    """x sigmoid(x)."""
    return x * sigmoid(x)


def conv1d(x: Float64, weight: Float64, mistake: str = "") -> Float64:
    """A whole sequence x [tokens, channels] through taps [channels, taps], the last one now."""
    taps = weight.shape[1]
    if mistake == "taps reversed":
        weight = weight[:, ::-1]
    if mistake == "silu before":
        x = silu(x)
    late = int(mistake == "one token late")
    y = np.zeros_like(x)
    for t in range(len(x)):
        for tap in range(taps):
            source = t - (taps - 1) + tap - late
            if source >= 0:
                y[t] += weight[:, tap] * x[source]
    return y if mistake in ("no silu", "silu before") else silu(y)


def unit(x: Float64, eps: float, mistake: str) -> Float64:
    """x / sqrt(sum(x^2) + eps)."""
    total = float(np.sum(x * x))
    if mistake == "eps outside the root":
        return x / (np.sqrt(total) + eps)
    return x / np.sqrt(total + eps)


def delta_head(
    q: Float64, k: Float64, v: Float64, rates: tuple[Float64, Float64], decay: float, eps: float,
    mistake: str = "",
) -> Float64:  # fmt: skip
    """One value head over a whole sequence; q, k, v are [tokens, S], ``rates`` alpha + dt, beta.

    The state is [key, value]; alpha is a number of the head, or one of each key."""
    size = q.shape[1]
    memory = np.zeros((size, size))
    outputs = np.zeros_like(v)
    for t in range(len(q)):
        query, key = unit(q[t], eps, mistake), unit(k[t], eps, mistake)
        if mistake != "query not scaled":
            query = query / np.sqrt(size)
        rate = np.log1p(np.exp(rates[0][t]))
        if mistake == "decay not by softplus":
            rate = np.exp(rates[0][t])
        g = np.exp(np.atleast_1d(rate) * decay)[:, None]
        if mistake == "decay by value":
            g = g.T
        if mistake == "one decay":
            g = g.mean()
        beta = rates[1][t] if mistake == "raw beta" else sigmoid(rates[1][t])
        decayed = memory if mistake == "decay after update" else g * memory
        predicted = key @ (memory if mistake == "prediction before decay" else decayed)
        if mistake == "no prediction":
            predicted = np.zeros(size)
        error = v[t] - predicted
        update = beta * np.outer(key, error)
        updated = decayed + (update.T if mistake == "key and value transposed" else update)
        outputs[t] = query @ (decayed if mistake == "read before update" else updated)
        memory = g * updated if mistake == "decay after update" else updated
    return outputs


def scan_head(
    v: Float64, b: Float64, c: Float64, rate: Float64, parameters: tuple[float, float],
    mistake: str = "",
) -> Float64:  # fmt: skip
    """One head of Mamba-2 over a whole sequence; v is [tokens, values], b and c are [tokens,
    state], ``rate`` is dt + dt_bias, ``parameters`` are decay and passing."""
    decay, passing = parameters
    memory = np.zeros((v.shape[1], b.shape[1]))
    outputs = np.zeros_like(v)
    for t in range(len(v)):
        step = np.exp(rate[t]) if mistake == "step not by softplus" else np.log1p(np.exp(rate[t]))
        g = np.exp(step * decay)
        written = v[t] if mistake == "step not in the update" else step * v[t]
        update = np.outer(written, b[t])
        before, memory = memory, g * memory + update
        if mistake == "decay after update":
            memory = g * (before + update)
        passed = passing * (step * v[t] if mistake == "skip times the step" else v[t])
        outputs[t] = (before if mistake == "read before update" else memory) @ c[t] + passed
    return outputs


def gated_norm(
    x: Float64, gate: Float64, weight: Float64, eps: float, heads: int, mistake: str = ""
) -> Float64:
    """rms_norm(x) weight silu(gate) in each head of [tokens, heads width]."""
    grouped = x.reshape(len(x), heads, -1)
    gates = gate.reshape(grouped.shape)
    if mistake == "gate first":
        grouped = grouped * silu(gates)
    mean = (grouped**2).mean(axis=-1, keepdims=True)
    if mistake == "all heads together":
        mean = mean.mean(axis=1, keepdims=True)
    root = np.sqrt(mean) + eps if mistake == "eps outside the root" else np.sqrt(mean + eps)
    y = grouped / root * weight
    if mistake == "sigmoid":
        y = y * sigmoid(gates)
    elif mistake != "gate first":
        y = y * silu(gates)
    return y.reshape(x.shape)
