"""Recurrent layers by rule R8 of docs/arithmetic.md, for independent.py."""

import math

import independent_rules as rules
import numpy as np

F = np.float32


def case_convolution(x, weight):
    taps, y = weight.shape[1], []
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1]), F), x])
    for at in range(len(x)):
        total = np.zeros(x.shape[1], F)
        for tap in range(taps):
            total = total + weight[:, tap] * padded[at + tap]
        y.append(rules.silu(total))
    return np.array(y)


def case_gated_convolution(x, weight, bias, input_gate, output_gate):
    padded = np.concatenate([np.zeros((weight.shape[1] - 1, x.shape[1]), F), input_gate * x])
    total = np.zeros_like(x)
    for tap in range(weight.shape[1]):
        total = total + weight[:, tap] * padded[tap : tap + len(x)]
    return output_gate * (total + bias)


def case_scan(x, dt, decay, dt_bias, skip):
    v, b, c = x[:, :12].reshape(-1, 4, 3), x[:, 12:28], x[:, 28:]
    memory, y = np.zeros((4, 3, 8), F), np.zeros(v.shape, F)
    s = rules.softplus(dt + dt_bias)
    g = rules.exp(s * -np.abs(decay))
    for t in range(len(x)):
        for head in range(4):
            of = slice(head // 2 * 8, head // 2 * 8 + 8)
            memory[head] = g[t, head] * memory[head] + (s[t, head] * v[t, head])[:, None] * b[t, of]
            y[t, head] = rules.total_of(memory[head] * c[t, of]) + skip[head] * v[t, head]
    return y.reshape(len(x), -1)


def case_delta(x, alpha, beta, decay, dt_bias, grouped, eps=1e-6):
    n, key_heads, value_heads = 8, 2, 4
    rows = x.reshape(len(x), -1, n)
    unit = lambda z: z * (F(1) / np.sqrt(rules.total_of(z * z) + F(eps)))[..., None]  # noqa: E731
    q = unit(rows[:, :key_heads]) * F(1 / math.sqrt(n))
    k, v = unit(rows[:, key_heads : 2 * key_heads]), rows[:, 2 * key_heads :]
    memory, y = np.zeros((value_heads, n, n), F), np.zeros((len(x), value_heads, n), F)
    rates = rules.softplus(alpha + dt_bias).reshape(len(x), value_heads, -1)
    g = rules.exp(rates * -np.abs(decay)[:, None])  # one a head, or one a key
    b = rules.sigmoid(beta)
    for t in range(len(x)):
        for head in range(value_heads):
            of = head // (value_heads // key_heads) if grouped else head % key_heads
            decayed = g[t, head] * memory[head]
            error = v[t, head] - rules.total_of(decayed * k[t, of])
            memory[head] = decayed + (b[t, head] * error)[:, None] * k[t, of]
            y[t, head] = rules.total_of(memory[head] * q[t, of])
    return y.reshape(len(x), -1)
