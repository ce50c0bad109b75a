"""SSM_DELTA_NET against binary64, and the rules of its state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from contract.dtypes import F32
from contract.errors import VerifyError
from contract.ir.graph import BufferKind, GraphBuilder
from contract.opcodes import Opcode
from reference.exact.elementary import exp, sigmoid, softplus
from reference.ops.ssm_delta_net import ssm_delta_net
from tests.ops import recurrent_float64
from tests.ops.scalar import F, halves
from tests.ops.steps import Token, assert_slots_are_apart, queries, schedules

Float32 = NDArray[np.float32]
SLOTS = 3
EPS = 1e-6
CLOSE = 1e-5


@dataclass(frozen=True)
class Heads:
    """One layer's shape and parameters."""

    keys: int
    values: int
    size: int
    grouped: int = 0
    eps: float = EPS
    by_key: bool = False

    @property
    def rates(self) -> int:
        """The numbers of alpha of a token."""
        return self.values * (self.size if self.by_key else 1)


@dataclass(frozen=True)
class Inputs:
    """What a list of tokens brings: x, alpha, beta, and the layer's decay and dt_bias."""

    x: Float32
    alpha: Float32
    beta: Float32
    decay: Float32
    dt_bias: Float32

    def rows(self, rows: list[int] | slice) -> Inputs:
        """Some of the tokens."""
        return Inputs(self.x[rows], self.alpha[rows], self.beta[rows], self.decay, self.dt_bias)


def random_inputs(seed: int, tokens: int, heads: Heads) -> Inputs:
    """Moderate numbers; decays as models store them, -exp(A)."""
    rng = np.random.default_rng(seed)
    return Inputs(
        rng.standard_normal(
            (tokens, heads.size * (2 * heads.keys + heads.values)), dtype=np.float32
        ),
        rng.standard_normal((tokens, heads.rates), dtype=np.float32),
        rng.standard_normal((tokens, heads.values), dtype=np.float32),
        -np.exp(rng.standard_normal(heads.values, dtype=np.float32)),
        rng.standard_normal(heads.rates, dtype=np.float32),
    )


def advance(state: Float32, tokens: list[Token], given: Inputs, heads: Heads) -> Float32:
    """One step."""
    with np.errstate(all="ignore"):
        return ssm_delta_net(
            x=given.x, alpha=given.alpha, beta=given.beta, decay=given.decay, dt_bias=given.dt_bias,
            query=queries(tokens), state=state, key_heads=heads.keys, value_heads=heads.values,
            state_size=heads.size, grouped=heads.grouped, eps=heads.eps,
        )  # fmt: skip


def broken_state(slots: int, heads: Heads) -> Float32:
    """What a slot may hold before a sequence begins in it."""
    return np.full((slots, heads.values, heads.size, heads.size), np.nan, np.float32)


def sequence(given: Inputs, heads: Heads) -> Float32:
    """One slot from position 0 in a single step."""
    tokens = [(0, position) for position in range(len(given.x))]
    return advance(broken_state(1, heads), tokens, given, heads)


def exact_sequence(given: Inputs, heads: Heads, mistake: str = "") -> NDArray[np.float64]:
    """The same in binary64, head by head."""
    tokens, size = len(given.x), heads.size
    parts = given.x.astype(np.float64).reshape(tokens, -1, size)
    outputs = []
    for head in range(heads.values):
        grouped = heads.grouped != (mistake == "other head order")
        key = head // (heads.values // heads.keys) if grouped else head % heads.keys
        rates = given.alpha.astype(np.float64) + given.dt_bias.astype(np.float64)
        rate = rates.reshape(tokens, heads.values, -1)[:, head]
        outputs.append(
            recurrent_float64.delta_head(
                parts[:, key], parts[:, heads.keys + key], parts[:, 2 * heads.keys + head],
                (rate, given.beta[:, head].astype(np.float64)), float(given.decay[head]), heads.eps,
                mistake,
            )
        )  # fmt: skip
    return np.concatenate(outputs, axis=1)


@pytest.mark.parametrize("size", [16, 40, 128])
@pytest.mark.parametrize(("keys", "values"), [(2, 2), (2, 4), (2, 6), (1, 3)])
@pytest.mark.parametrize("grouped", [0, 1])
@pytest.mark.parametrize("by_key", [False, True])
def test_close_to_binary64(size, keys, values, grouped, by_key):
    """A whole sequence, every ratio of heads, both orders of heads, one decay a head or a key."""
    heads = Heads(keys, values, size, grouped, by_key=by_key)
    given = random_inputs(size + values, 12, heads)
    assert np.abs(sequence(given, heads) - exact_sequence(given, heads)).max() < CLOSE


@pytest.mark.parametrize(
    ("mistake", "by_key"),
    [
        *((mistake, False) for mistake in recurrent_float64.DELTA_MISTAKES),
        *(("other head order", by_key) for by_key in (False, True)),
        *((mistake, True) for mistake in recurrent_float64.BY_KEY_MISTAKES),
    ],
)
def test_mistakes_are_not_close(mistake, by_key):
    """The negative control of the comparison above; a large eps shows where it is added."""
    heads = Heads(2, 6, 16, 1, eps=0.1, by_key=by_key)
    given = random_inputs(5, 12, heads)
    got = sequence(given, heads)
    assert np.abs(got - exact_sequence(given, heads)).max() < CLOSE
    assert np.abs(got - exact_sequence(given, heads, mistake)).max() > 50 * CLOSE


@pytest.mark.parametrize("by_key", [False, True])
def test_scalar_rule(by_key):
    """Every bit of two tokens of one head: the order of roundings, sums folded in halves."""
    heads = Heads(1, 1, 5, by_key=by_key)
    given = random_inputs(8, 2, heads)
    state = broken_state(1, heads)
    got = advance(state, [(0, 0), (0, 1)], given, heads)
    size = heads.size
    memory = [[F(0.0)] * size for _ in range(size)]
    for t in range(2):
        q, k, v = given.x[t].reshape(3, size)
        norms = [F(F(1.0) / np.sqrt(F(halves([F(e * e) for e in r]) + F(EPS)))) for r in (q, k)]
        query = [F(F(e * norms[0]) * F(1.0 / np.sqrt(float(size)))) for e in q]
        key = [F(e * norms[1]) for e in k]
        g = np.broadcast_to(exp(softplus(given.alpha[t] + given.dt_bias) * given.decay), size)
        b = sigmoid(given.beta[t])[0]
        for row in range(size):
            decayed = [F(m * e) for m, e in zip(memory[row], g, strict=True)]
            error = F(v[row] - halves([F(m * e) for m, e in zip(decayed, key, strict=True)]))
            change = F(b * error)
            memory[row] = [F(m + F(change * e)) for m, e in zip(decayed, key, strict=True)]
            products = [F(m * e) for m, e in zip(memory[row], query, strict=True)]
            assert got[t, row] == halves(products)
    assert state[0, 0].tolist() == memory


@given(steps=schedules(SLOTS))
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("by_key", [False, True])
def test_any_schedule_gives_every_slot_its_own_sequence(steps, by_key):
    """Chunks and neighbours change no bit, whatever the slots held before."""
    heads = Heads(2, 4, 16, by_key=by_key)
    tokens = sum(map(len, steps))
    given, state = random_inputs(tokens, tokens, heads), broken_state(SLOTS, heads)
    assert_slots_are_apart(
        steps,
        lambda step, rows: advance(state, step, given.rows(rows), heads),
        lambda rows: sequence(given.rows(rows), heads),
    )


def test_position_zero_in_the_middle_of_a_step():
    """A slot that another sequence takes over within a step starts from zeros."""
    heads = Heads(1, 2, 16)
    given = random_inputs(9, 5, heads)
    state = broken_state(1, heads)
    got = advance(state, [(0, 0), (0, 1), (0, 0), (0, 1), (0, 2)], given, heads)
    assert (got[:2] == sequence(given.rows(slice(0, 2)), heads)).all()
    assert (got[2:] == sequence(given.rows(slice(2, 5)), heads)).all()
    # The control: without the reset the second sequence would see the first.
    onward = advance(broken_state(1, heads), [(0, p) for p in range(5)], given, heads)
    assert (onward[2:] != got[2:]).any()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_broken_token_stays_in_its_slot(poison):
    """Neighbours in the step keep their bits; the state of the broken sequence stays broken."""
    heads = Heads(1, 2, 16)
    given = random_inputs(10, 8, heads)
    tokens = [(row % 2, row // 2) for row in range(8)]
    clean = advance(broken_state(2, heads), tokens, given, heads)
    given.x[2, heads.size + 3] = poison  # of the key
    state = broken_state(2, heads)
    got = advance(state, tokens, given, heads)
    assert (got[1::2] == clean[1::2]).all()
    assert not np.isfinite(got[2::2]).all(axis=1).any()
    assert np.isfinite(state[1]).all()


def test_a_broken_query_breaks_its_own_token_only():
    """A query is read, never remembered."""
    heads = Heads(1, 2, 16)
    given = random_inputs(12, 4, heads)
    clean = sequence(given, heads)
    given.x[1, 3] = np.nan
    got = sequence(given, heads)
    assert np.isnan(got[1]).all()
    assert (np.delete(got, 1, 0) == np.delete(clean, 1, 0)).all()


def test_state_rows_are_values():
    """After one token from zeros the state is (b v) k^T: a row a value, a column a key."""
    heads = Heads(1, 1, 4, eps=0.0)
    given = random_inputs(11, 1, heads)
    state = broken_state(1, heads)
    advance(state, [(0, 0)], given, heads)
    k, v = given.x[0, 4:8].astype(np.float64), given.x[0, 8:].astype(np.float64)
    b = recurrent_float64.sigmoid(float(given.beta[0, 0]))
    assert np.abs(state[0, 0] - np.outer(b * v, k / np.linalg.norm(k))).max() < CLOSE


def test_an_empty_step():
    """Nothing happens to the state."""
    heads = Heads(1, 2, 16)
    state = np.ones((1, 2, 16, 16), np.float32)
    assert advance(state, [], random_inputs(0, 0, heads), heads).shape == (0, 32)
    assert (state == 1).all()


@pytest.mark.parametrize(
    ("heads", "rates", "problem"),
    [
        (Heads(2, 3, 16), 3, r"value_heads \(3\) is not a multiple of key_heads \(2\)"),
        (Heads(1, 1, 257), 1, r"state_size \(257\) is more than the 256 elements of a segment"),
        (Heads(1, 2, 16), 16, r"rates is 16, expected 2 or 32"),
    ],
)
def test_shapes_the_rule_does_not_cover_are_refused(heads, rates, problem):
    """With the sizes in the message."""
    b = GraphBuilder("g")
    size, values = heads.size, heads.values

    def activation(name: str, width: int):
        return b.buffer(name, BufferKind.REQUEST, F32, ("tokens", width))

    def vector(name: str, width: int):
        return b.buffer(name, BufferKind.WEIGHT, F32, (width,), name)

    b.emit(
        Opcode.SSM_DELTA_NET, x=activation("x", size * (2 * heads.keys + values)),
        alpha=activation("alpha", rates), beta=activation("beta", values),
        decay=vector("decay", values), dt_bias=vector("dt_bias", rates),
        query=b.request("query", "tokens", 4),
        state=b.buffer("state", BufferKind.STATE, F32, (2, values, size, size)),
        key_heads=heads.keys, value_heads=values, state_size=size, eps=EPS,
    )  # fmt: skip
    with pytest.raises(VerifyError, match=problem):
        b.build()
