"""SSM_SCAN against binary64, and the rules of its state."""

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
from reference.exact.elementary import exp, softplus
from reference.ops.ssm_scan import ssm_scan
from tests.ops import recurrent_float64
from tests.ops.scalar import F, halves
from tests.ops.steps import Token, assert_slots_are_apart, queries, schedules

Float32 = NDArray[np.float32]
SLOTS = 3
CLOSE = 1e-5


@dataclass(frozen=True)
class Sizes:
    """One layer's shape."""

    heads: int = 4
    groups: int = 2
    head_dim: int = 6
    state: int = 16

    @property
    def channels(self) -> int:
        """Values, then b and c."""
        return self.heads * self.head_dim + 2 * self.groups * self.state


@dataclass(frozen=True)
class ScanInputs:
    """What a list of tokens brings, and the layer's parameters."""

    x: Float32
    dt: Float32
    decay: Float32
    dt_bias: Float32
    passing: Float32

    def rows(self, rows: list[int] | slice) -> ScanInputs:
        """Some of the tokens."""
        return ScanInputs(self.x[rows], self.dt[rows], self.decay, self.dt_bias, self.passing)


def random_inputs(seed: int, tokens: int, sizes: Sizes) -> ScanInputs:
    """Moderate numbers; decays as models store them, -exp(A)."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Float32:
        return rng.standard_normal(shape, dtype=np.float32)

    x, dt = normal(tokens, sizes.channels), normal(tokens, sizes.heads)
    decay, dt_bias, passing = normal(3, sizes.heads)
    return ScanInputs(x, dt, -np.exp(decay), dt_bias, passing)


def advance(state: Float32, tokens: list[Token], given: ScanInputs, sizes: Sizes) -> Float32:
    """One step."""
    with np.errstate(all="ignore"):
        return ssm_scan(
            x=given.x, dt=given.dt, decay=given.decay, dt_bias=given.dt_bias, skip=given.passing,
            query=queries(tokens), state=state, heads=sizes.heads, groups=sizes.groups,
            head_dim=sizes.head_dim, state_size=sizes.state,
        )  # fmt: skip


def broken_state(slots: int, sizes: Sizes) -> Float32:
    """What a slot may hold before a sequence begins in it."""
    return np.full((slots, sizes.heads, sizes.head_dim, sizes.state), np.nan, np.float32)


def sequence(given: ScanInputs, sizes: Sizes) -> Float32:
    """One slot from position 0 in a single step."""
    tokens = [(0, position) for position in range(len(given.x))]
    return advance(broken_state(1, sizes), tokens, given, sizes)


def exact_sequence(given: ScanInputs, sizes: Sizes, mistake: str = "") -> NDArray[np.float64]:
    """The same in binary64, head by head."""
    x = given.x.astype(np.float64)
    inner, width = sizes.heads * sizes.head_dim, sizes.groups * sizes.state
    outputs = []
    for head in range(sizes.heads):
        cyclic = mistake == "other group order"
        group = head % sizes.groups if cyclic else head // (sizes.heads // sizes.groups)
        b = inner + group * sizes.state
        outputs.append(
            recurrent_float64.scan_head(
                x[:, head * sizes.head_dim : (head + 1) * sizes.head_dim],
                x[:, b : b + sizes.state],
                x[:, b + width : b + width + sizes.state],
                given.dt[:, head].astype(np.float64) + float(given.dt_bias[head]),
                (float(given.decay[head]), float(given.passing[head])),
                mistake,
            )
        )
    return np.concatenate(outputs, axis=1)


@pytest.mark.parametrize("state", [16, 33, 128, 256])
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 1), (4, 2), (6, 3)])
def test_close_to_binary64(state, heads, groups):
    """A whole sequence, every ratio of heads and groups."""
    sizes = Sizes(heads, groups, 5, state)
    given = random_inputs(state + heads, 12, sizes)
    truth = exact_sequence(given, sizes)
    assert np.abs(sequence(given, sizes) - truth).max() < CLOSE * np.abs(truth).max()


@pytest.mark.parametrize("mistake", [*recurrent_float64.SCAN_MISTAKES, "other group order"])
def test_mistakes_are_not_close(mistake):
    """The negative control of the comparison above."""
    sizes = Sizes()
    given = random_inputs(5, 12, sizes)
    got = sequence(given, sizes)
    assert np.abs(got - exact_sequence(given, sizes)).max() < 10 * CLOSE
    assert np.abs(got - exact_sequence(given, sizes, mistake)).max() > 1000 * CLOSE


def test_scalar_rule():
    """Every bit of two tokens of one head: the order of roundings, sums folded in halves."""
    sizes = Sizes(1, 1, 3, 5)
    given = random_inputs(8, 2, sizes)
    got = advance(broken_state(1, sizes), [(0, 0), (0, 1)], given, sizes)
    memory = [[F(0.0)] * 5 for _ in range(3)]
    for t in range(2):
        v, b, c = np.split(given.x[t], [3, 8])
        step = softplus(given.dt[t] + given.dt_bias)
        g = F(exp(step * given.decay)[0])
        for row in range(3):
            change = F(step[0] * v[row])
            memory[row] = [F(F(m * g) + F(change * k)) for m, k in zip(memory[row], b, strict=True)]
            read = halves([F(m * k) for m, k in zip(memory[row], c, strict=True)])
            assert got[t, row] == F(read + F(given.passing[0] * v[row]))


@given(steps=schedules(SLOTS))
@settings(max_examples=40, deadline=None)
def test_any_schedule_gives_every_slot_its_own_sequence(steps):
    """Chunks and neighbours change no bit, whatever the slots held before."""
    sizes = Sizes(2, 1, 3, 9)
    tokens = sum(map(len, steps))
    given, state = random_inputs(tokens, tokens, sizes), broken_state(SLOTS, sizes)
    assert_slots_are_apart(
        steps,
        lambda step, rows: advance(state, step, given.rows(rows), sizes),
        lambda rows: sequence(given.rows(rows), sizes),
    )


def test_an_empty_step():
    """Nothing happens to the state."""
    sizes = Sizes()
    state = np.ones((1, sizes.heads, sizes.head_dim, sizes.state), np.float32)
    y = advance(state, [], random_inputs(1, 0, sizes), sizes)
    assert y.shape == (0, sizes.heads * sizes.head_dim)
    assert (state == 1).all()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"channels": 90}, "channels is 90, expected 88"),
        ({"groups": 3, "channels": 120}, r"heads \(4\) is not a multiple of groups \(3\)"),
        ({"state_size": 257, "channels": 24 + 4 * 257}, r"state_size \(257\) is more than the 256"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changed, said):
    sizes = {"heads": 4, "groups": 2, "head_dim": 6, "state_size": 16, "channels": 88} | changed
    channels = sizes.pop("channels")
    b = GraphBuilder("g")
    vectors = {name: b.buffer(name, BufferKind.WEIGHT, F32, (4,)) for name in ("decay", "skip")}
    b.emit(
        Opcode.SSM_SCAN,
        x=b.buffer("x", BufferKind.REQUEST, F32, ("tokens", channels)),
        dt=b.buffer("dt", BufferKind.REQUEST, F32, ("tokens", 4)),
        dt_bias=b.buffer("dt_bias", BufferKind.WEIGHT, F32, (4,)),
        query=b.request("query", "tokens", 4),
        state=b.buffer("state", BufferKind.STATE, F32, (2, 4, 6, sizes["state_size"])),
        **vectors,
        **sizes,
    )
    with pytest.raises(VerifyError, match=said):
        b.build()
