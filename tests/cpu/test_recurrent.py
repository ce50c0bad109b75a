"""The CPU tier's delta-net kernels have the bits of the definitions."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reference.cpu import recurrent
from reference.cpu.recurrent import Run, conv1d, delta_net, runs_of, scan
from reference.ops.ssm_conv1d import ssm_conv1d
from reference.ops.ssm_delta_net import ssm_delta_net
from reference.ops.ssm_scan import ssm_scan
from tests.cpu.steps import same

SLOTS = 3
Float32 = NDArray[np.float32]


@st.composite
def queries(draw: st.DrawFn) -> NDArray[np.int32]:
    """Tokens of interleaved slots; now and then a slot begins another sequence."""
    positions = [draw(st.integers(0, 5)) for _ in range(SLOTS)]
    records = []
    for slot in draw(st.lists(st.integers(0, SLOTS - 1), max_size=24)):
        if draw(st.integers(0, 7)) == 0:
            positions[slot] = 0
        records.append((0, slot, positions[slot], 0))
        positions[slot] += 1
    return np.array(records, np.int32).reshape(-1, 4)


def normal(rng: np.random.Generator, *shape: int) -> Float32:
    """Random numbers as columns of a wider array, as a view of a buffer is."""
    wide = rng.standard_normal((*shape[:-1], shape[-1] + 3), dtype=np.float32)
    return wide[..., 1 : shape[-1] + 1]


CONV_EXTRAS = ("bias", "input_gate", "output_gate")


@given(
    query=queries(),
    seed=st.integers(0, 2**32 - 1),
    history=st.integers(1, 5),
    extras=st.sets(st.sampled_from(CONV_EXTRAS)),
)
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("threads", [1, 2])
def test_convolution_equals_definition(query, seed, history, extras, threads):
    """Any step, with any of the optional operands; more channels than a thread takes at a time."""
    rng = np.random.default_rng(seed)
    channels = 300
    x, weight = normal(rng, len(query), channels), normal(rng, channels, history + 1)
    state = rng.standard_normal((SLOTS, history, channels), dtype=np.float32)
    state[rng.integers(SLOTS)] = np.nan
    shapes = {name: x.shape[name == "bias" :] for name in sorted(extras)}
    given = {name: normal(rng, *shape) for name, shape in shapes.items()}
    expected_state, y = state.copy(), np.empty_like(x)
    with np.errstate(all="ignore"):
        expected = ssm_conv1d(
            x=x, weight=weight, query=query, state=expected_state, history=history, **given
        )
    conv1d(x, weight, query, state, y, history, threads=threads, **given)
    assert same(y, expected)
    assert same(state, expected_state)


@given(
    query=queries(),
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from((1, 16, 24, 40, 131)),
    ratio=st.integers(1, 3),
    grouped=st.integers(0, 1),
    by_key=st.booleans(),
)
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("threads", [1, 2])
def test_recurrence_equals_definition(query, seed, size, ratio, grouped, by_key, threads):
    """Any step, heads that fill no block of a thread, a slot that holds NaN."""
    rng = np.random.default_rng(seed)
    keys, values = 2, 2 * ratio
    x = normal(rng, len(query), size * (2 * keys + values))
    rates = values * (size if by_key else 1)
    alpha, beta = normal(rng, len(query), rates), normal(rng, len(query), values)
    decay, dt_bias = -np.exp(normal(rng, values)), normal(rng, rates)
    state = rng.standard_normal((SLOTS, values, size, size), dtype=np.float32)
    state[rng.integers(SLOTS)] = np.nan
    expected_state = state.copy()
    y = normal(rng, len(query), values * size)
    sizes = {"key_heads": keys, "value_heads": values, "state_size": size, "grouped": grouped}
    operands = {"x": x, "alpha": alpha, "beta": beta, "decay": decay, "dt_bias": dt_bias}
    shared: dict[str, Any] = {**operands, **sizes, "query": query, "eps": 1e-6}
    with np.errstate(all="ignore"):
        expected = ssm_delta_net(**shared, state=expected_state)
        delta_net(**shared, state=state, y=y, threads=threads)
    assert same(y, expected)
    assert same(state, expected_state)


def test_runs_end_where_another_sequence_begins():
    """At a change of the slot and at position 0, even in one slot."""
    slots_positions = [(1, 4), (1, 5), (1, 0), (1, 1), (0, 0), (0, 0), (1, 2)]
    query = np.array([(0, slot, position, 0) for slot, position in slots_positions], np.int32)
    assert list(runs_of(query)) == [
        Run(1, slice(0, 2), 4),
        Run(1, slice(2, 4), 0),
        Run(0, slice(4, 5), 0),
        Run(0, slice(5, 6), 0),
        Run(1, slice(6, 7), 2),
    ]
    assert list(runs_of(query[:0])) == []


def test_blocks_of_heads_change_nothing(monkeypatch):
    """One head at a time, or all: the same bits."""
    rng = np.random.default_rng(3)
    query = np.array([(0, 0, p, 0) for p in range(5)], np.int32)
    x, alpha, beta = normal(rng, 5, 16 * 7), normal(rng, 5, 5), normal(rng, 5, 5)
    decay, dt_bias = -np.exp(normal(rng, 5)), normal(rng, 5)
    results = []
    for elements in (1, 2 * 16 * 16, 1 << 20):
        monkeypatch.setattr(recurrent, "STATE_ELEMENTS", elements)
        state, y = np.zeros((1, 5, 16, 16), np.float32), np.empty((5, 80), np.float32)
        delta_net(x, alpha, beta, decay, dt_bias, query, state, y, 1, 5, 16, 0, 1e-6)
        results.append((state, y))
    for state, y in results[1:]:
        assert (state == results[0][0]).all()
        assert (y == results[0][1]).all()


@given(
    query=queries(),
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from((1, 16, 40, 131)),
    width=st.sampled_from((1, 24, 200)),
    ratio=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("threads", [1, 2])
def test_scan_equals_definition(query, seed, size, width, ratio, threads):
    """Any step; all heads at once or a few at a time."""
    rng = np.random.default_rng(seed)
    groups, heads = 2, 2 * ratio
    x = normal(rng, len(query), heads * width + 2 * groups * size)
    dt, (decay, dt_bias, passing) = normal(rng, len(query), heads), normal(rng, 3, heads)
    state = rng.standard_normal((SLOTS, heads, width, size), dtype=np.float32)
    state[rng.integers(SLOTS)] = np.nan
    expected_state, y = state.copy(), np.empty((len(query), heads * width), np.float32)
    sizes = {"heads": heads, "groups": groups, "head_dim": width, "state_size": size}
    operands = {"x": x, "dt": dt, "decay": -np.abs(decay), "dt_bias": dt_bias, "skip": passing}
    shared: dict[str, Any] = {**operands, **sizes, "query": query}
    with np.errstate(all="ignore"):
        expected = ssm_scan(**shared, state=expected_state)
        scan(**shared, state=state, y=y, threads=threads)
    assert same(y, expected)
    assert same(state, expected_state)
