"""SSM_CONV1D against binary64, and the rules of its state."""

import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from contract.dtypes import F32
from contract.errors import VerifyError
from contract.ir.graph import BufferKind, GraphBuilder
from contract.opcodes import Opcode
from reference.exact.elementary import silu
from reference.ops.ssm_conv1d import ssm_conv1d
from tests.ops import recurrent_float64
from tests.ops.steps import Token, assert_slots_are_apart, queries, schedules

Float32 = NDArray[np.float32]
CHANNELS, HISTORY, SLOTS = 6, 3, 3
CLOSE = 1e-5


def inputs(seed: int, tokens: int, history: int = HISTORY) -> tuple[Float32, Float32]:
    """x and taps."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, CHANNELS), dtype=np.float32)
    return x, rng.standard_normal((CHANNELS, history + 1), dtype=np.float32)


def advance(state: Float32, tokens: list[Token], x: Float32, weight: Float32) -> Float32:
    """One step."""
    query, history = queries(tokens), state.shape[1]
    return ssm_conv1d(x=x, weight=weight, query=query, state=state, history=history)


def sequence(x: Float32, weight: Float32) -> Float32:
    """One slot from position 0 in a single step."""
    state = np.full((1, weight.shape[1] - 1, CHANNELS), np.nan, np.float32)
    return advance(state, [(0, p) for p in range(len(x))], x, weight)


@pytest.mark.parametrize("history", [1, 3, 8])
def test_close_to_binary64(history):
    """Causal taps, oldest first, silu last."""
    x, weight = inputs(history, 20, history)
    exact = recurrent_float64.conv1d(x.astype(np.float64), weight.astype(np.float64))
    assert np.abs(sequence(x, weight) - exact).max() < CLOSE


@pytest.mark.parametrize("mistake", recurrent_float64.CONV_MISTAKES)
def test_mistakes_are_not_close(mistake):
    """The negative control of the comparison above."""
    x, weight = inputs(3, 20)
    wrong = recurrent_float64.conv1d(x.astype(np.float64), weight.astype(np.float64), mistake)
    assert np.abs(sequence(x, weight) - wrong).max() > 1000 * CLOSE


def test_scalar_rule():
    """Every bit of the left fold, one rounding an operation."""
    x, weight = inputs(4, HISTORY + 1)
    total = np.float32(0.0)
    for tap in range(HISTORY + 1):
        total = np.float32(total + np.float32(weight[0, tap] * x[tap, 0]))
    assert sequence(x, weight)[-1, 0] == silu(np.array([total]))[0]


def test_bias_and_gates():
    """The gate of the input before the taps, the bias after them, the gate of the output last and
    without silu: bit by bit from the convolution without them."""
    x, weight = inputs(8, 9)
    rng = np.random.default_rng(9)
    query = np.array([(7, 0, p, 0) for p in range(9)], np.int32)
    before, after = rng.standard_normal((2, 9, CHANNELS), dtype=np.float32)
    bias = rng.standard_normal(CHANNELS, dtype=np.float32)

    def convolved(**extras: Float32) -> tuple[Float32, Float32]:
        state = np.full((1, HISTORY, CHANNELS), np.nan, np.float32)
        y = ssm_conv1d(x=x, weight=weight, query=query, state=state, history=HISTORY, **extras)
        return y, state[0]

    ones = np.ones_like(x)
    sums, kept = convolved(output_gate=ones)
    assert (silu(sums) == sequence(x, weight)).all()
    assert (kept == x[-HISTORY:]).all()
    assert (convolved(output_gate=after)[0] == after * sums).all()
    assert (convolved(bias=bias)[0] == silu(sums + bias)).all()
    both, kept = convolved(input_gate=before, output_gate=ones)
    assert (both == advance_gated(before * x, weight)).all()
    assert (kept == (before * x)[-HISTORY:]).all()
    everything, _ = convolved(bias=bias, input_gate=before, output_gate=after)
    assert (everything == after * (both + bias)).all()
    assert (everything != after * both + bias).any()


def advance_gated(u: Float32, weight: Float32) -> Float32:
    """The sums of the taps over a whole sequence, one rounding an operation."""
    padded = np.concatenate([np.zeros((HISTORY, CHANNELS), np.float32), u])
    total = np.zeros_like(u)
    for tap in range(HISTORY + 1):
        total = total + weight[:, tap] * padded[tap : tap + len(u)]
    return total


@given(steps=schedules(SLOTS))
@settings(max_examples=60, deadline=None)
def test_any_schedule_gives_every_slot_its_own_sequence(steps):
    """Chunks and neighbours change no bit, whatever the slots held before."""
    tokens = sum(map(len, steps))
    x, weight = inputs(tokens, tokens)
    state = np.full((SLOTS, HISTORY, CHANNELS), np.nan, np.float32)
    assert_slots_are_apart(
        steps,
        lambda step, rows: advance(state, step, x[rows], weight),
        lambda rows: sequence(x[rows], weight),
    )


def test_state_is_the_last_inputs_oldest_first():
    """Raw inputs, not outputs; positions before the first are zeros."""
    x, weight = inputs(5, 5)
    state = np.full((2, HISTORY, CHANNELS), np.nan, np.float32)
    advance(state, [(1, 0), (1, 1)], x[:2], weight)
    assert (state[1] == np.concatenate([np.zeros((1, CHANNELS), np.float32), x[:2]])).all()
    advance(state, [(1, p) for p in range(2, 5)], x[2:], weight)
    assert (state[1] == x[2:]).all()
    assert np.isnan(state[0]).all()


def test_a_broken_token_stays_in_its_slot():
    """A NaN reaches the next tokens of its own sequence only, and leaves with its history."""
    x, weight = inputs(6, 12)
    x[1, 0] = np.nan
    state = np.zeros((2, HISTORY, CHANNELS), np.float32)
    got = advance(state, [(row % 2, row // 2) for row in range(12)], x, weight)
    broken = np.isnan(got[:, 0])
    assert broken.tolist() == [row in (1, 3, 5, 7) for row in range(12)]
    assert not np.isnan(got[:, 1:]).any()


def test_an_empty_step():
    """Nothing happens to the state."""
    x, weight = inputs(7, 0)
    state = np.ones((1, HISTORY, CHANNELS), np.float32)
    assert advance(state, [], x, weight).shape == (0, CHANNELS)
    assert (state == 1).all()


def test_taps_that_do_not_fit_the_history_are_refused():
    """One tap more than tokens kept."""
    b = GraphBuilder("g")
    b.emit(
        Opcode.SSM_CONV1D,
        x=b.buffer("x", BufferKind.REQUEST, F32, ("tokens", 8)),
        weight=b.buffer("w", BufferKind.WEIGHT, F32, (8, 4)),
        query=b.request("query", "tokens", 4),
        state=b.buffer("state", BufferKind.STATE, F32, (2, 2, 8)),
        history=2,
    )
    with pytest.raises(VerifyError, match="4 taps need a history of one less, not 2"):
        b.build()
