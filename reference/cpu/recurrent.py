"""Recurrent layers of the CPU tier: SSM_CONV1D, SSM_DELTA_NET and SSM_SCAN in fewer passes.

The convolution computes all tokens of a run at once. The recurrence loops over tokens for a few
heads at a time, whose state stays in a core's cache with the key axis first, so that a sum over
keys is a few long additions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from contract.arithmetic import SEGMENT
from contract.arrays import Floats, Ints
from reference.cpu.threads import Scratch, for_each
from reference.exact.elementary import exp, sigmoid, silu, softplus
from reference.ops.ssm_delta_net import decays, key_head_of, l2_norm, split_heads
from reference.ops.ssm_scan import split_values

CONV_ELEMENTS = 1 << 16
"""Elements of one intermediate array of the convolution, and of one thread's part of the work."""
STATE_ELEMENTS = 1 << 15
"""Elements of the states one thread updates at a time; with their products they fit a second-level
cache."""

_scratch = Scratch()


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens of one slot; the first one is at ``position``."""

    slot: int
    tokens: slice
    position: int

    @property
    def starts(self) -> bool:
        """Whether the run begins a sequence."""
        return self.position == 0

    def before(self, states: int) -> int:
        """The row of the state that the run begins with, of ``states`` rows of each slot."""
        return self.slot * states + (self.position - 1) % states

    def stored(self, states: int) -> Iterator[tuple[int, int]]:
        """The tokens whose states remain, counted from the run's first, and the rows of these."""
        count = self.tokens.stop - self.tokens.start
        for token in range(max(0, count - states), count):
            yield token, self.slot * states + (self.position + token) % states


def runs_of(query: Ints) -> Iterator[Run]:
    """Split ``query`` [tokens, 4] where the slot changes and before every position 0."""
    slots, positions = query[:, 1], query[:, 2]
    cuts = np.flatnonzero((np.diff(slots) != 0) | (positions[1:] == 0)) + 1
    bounds = [0, *cuts.tolist(), len(query)] if len(query) else []
    for first, stop in pairwise(bounds):
        yield Run(int(slots[first]), slice(first, stop), int(positions[first]))


def conv1d(
    x: Floats,
    weight: Floats,
    query: Ints,
    state: Floats,
    y: Floats,
    history: int,
    *,
    bias: Floats | None = None,
    input_gate: Floats | None = None,
    output_gate: Floats | None = None,
    states: int = 1,
    threads: int | None = None,
) -> None:
    """Compute ``y`` and update ``state``; the operands are those of
    ``reference.ops.ssm_conv1d``."""
    runs = list(runs_of(query))
    longest = max((run.tokens.stop - run.tokens.start for run in runs), default=1)
    width = max(SEGMENT, CONV_ELEMENTS // longest)

    @np.errstate(all="ignore")
    def piece(first: int) -> None:
        channels = slice(first, first + width)
        taps = np.ascontiguousarray(weight[channels].T)
        for run in runs:
            past = state[run.before(states), :, channels]
            if run.starts:
                past = np.zeros_like(past)
            now = x[run.tokens, channels]
            if input_gate is not None:
                now = input_gate[run.tokens, channels] * now
            window = np.concatenate([past, now])
            tokens = run.tokens.stop - run.tokens.start
            total = taps[0] * window[:tokens]
            for tap in range(1, len(taps)):
                total += taps[tap] * window[tap : tap + tokens]
            if bias is not None:
                total += bias[channels]
            gate = None if output_gate is None else output_gate[run.tokens, channels]
            y[run.tokens, channels] = silu(total) if gate is None else gate * total
            for token, row in run.stored(states):
                state[row, :, channels] = window[token + 1 : token + len(taps)]

    for_each(piece, range(0, x.shape[1], width), threads)


def delta_net(
    x: Floats,
    alpha: Floats,
    beta: Floats,
    decay: Floats,
    dt_bias: Floats,
    query: Ints,
    state: Floats,
    y: Floats,
    key_heads: int,
    value_heads: int,
    state_size: int,
    grouped: int,
    eps: float,
    states: int = 1,
    threads: int | None = None,
) -> None:
    """Compute ``y`` and update ``state``; the operands are those of
    ``reference.ops.ssm_delta_net``."""
    size = state_size
    q, k, v = split_heads(x, key_heads, value_heads, size)
    q = l2_norm(q, eps) * np.float32(1.0 / math.sqrt(size))
    k = l2_norm(k, eps)
    key_of = key_head_of(key_heads, value_heads, grouped)
    g = decays(alpha, dt_bias, decay)
    b = sigmoid(beta)
    runs = list(runs_of(query))
    result = y.reshape(len(y), value_heads, size)
    count = max(1, STATE_ELEMENTS // size**2)

    @np.errstate(all="ignore")
    def advance(first: int) -> None:
        heads = slice(first, first + count)
        keys, queries = (np.moveaxis(part[:, key_of[heads], None], -1, 1) for part in (k, q))
        factors = np.moveaxis(g[:, heads, None], -1, 1)
        strengths, values = b[:, heads, None], v[:, heads]
        memory = _scratch.take("memory", (size, values.shape[1], size))
        products = _scratch.take("products", memory.shape)
        for run in runs:
            if run.starts:
                memory[...] = 0.0
            else:
                memory[...] = np.moveaxis(state[run.before(states), heads], -1, 0)
            stored = dict(run.stored(states))
            for t in range(run.tokens.start, run.tokens.stop):
                memory *= factors[t]
                np.multiply(memory, keys[t], out=products)
                change = strengths[t] * (values[t] - _fold(products))
                np.multiply(change, keys[t], out=products)
                memory += products
                np.multiply(memory, queries[t], out=products)
                result[t, heads] = _fold(products)
                row = stored.get(t - run.tokens.start)
                if row is not None:
                    state[row, heads] = np.moveaxis(memory, 0, -1)

    for_each(advance, range(0, value_heads, count), threads)


def scan(
    x: Floats,
    dt: Floats,
    decay: Floats,
    dt_bias: Floats,
    skip: Floats,
    query: Ints,
    state: Floats,
    y: Floats,
    heads: int,
    groups: int,
    head_dim: int,
    state_size: int,
    states: int = 1,
    threads: int | None = None,
) -> None:
    """Compute ``y`` and update ``state``; the operands are those of ``reference.ops.ssm_scan``."""
    size, width = state_size, head_dim
    v, b, c = split_values(x, heads, groups, size)
    step = softplus(dt + dt_bias)
    g = exp(step * decay)
    group_of = np.arange(heads) // (heads // groups)
    runs = list(runs_of(query))
    result = y.reshape(len(y), heads, width)
    count = max(1, STATE_ELEMENTS // (size * width))

    @np.errstate(all="ignore")
    def advance(first: int) -> None:
        part = slice(first, first + count)
        keys, queries = (np.moveaxis(some[:, group_of[part], None], -1, 1) for some in (b, c))
        decays, values = g[:, part, None], v[:, part]
        changes, skipped = step[:, part, None] * values, skip[part, None] * values
        memory = _scratch.take("memory", (size, values.shape[1], width))
        products = _scratch.take("products", memory.shape)
        for run in runs:
            if run.starts:
                memory[...] = 0.0
            else:
                memory[...] = np.moveaxis(state[run.before(states), part], -1, 0)
            stored = dict(run.stored(states))
            for t in range(run.tokens.start, run.tokens.stop):
                memory *= decays[t]
                np.multiply(changes[t], keys[t], out=products)
                memory += products
                np.multiply(memory, queries[t], out=products)
                result[t, part] = _fold(products) + skipped[t]
                row = stored.get(t - run.tokens.start)
                if row is not None:
                    state[row, part] = np.moveaxis(memory, 0, -1)

    for_each(advance, range(0, heads, count), threads)


def _fold(products: Floats) -> Floats:
    """R4 over the first axis, which is overwritten: f32[n, ...] with n <= 256 -> f32[...].

    The padding would only add +0, so it is left out."""
    length, half = len(products), SEGMENT // 2
    while half:
        if length > half:
            products[: length - half] += products[half:length]
            length = half
        half //= 2
    folded: Floats = products[0]
    return folded
