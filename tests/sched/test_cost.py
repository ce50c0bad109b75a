"""The cost model: it learns what steps take, and says how many tokens fit so many seconds."""

import math
import random
from bisect import bisect_right
from functools import cache
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference.sched.cost import CELLS_MAX, CHOICES, Load, StepCost


class Truth(NamedTuple):
    """A machine: what its steps really take."""

    fixed: float
    per_token: float
    per_position: float

    def seconds(self, tokens: int, attended: int) -> float:
        return self.fixed + self.per_token * tokens + self.per_position * attended


TRUTHS = st.builds(
    Truth, st.floats(1e-4, 1e-1), st.floats(1e-6, 1e-2), st.just(0.0) | st.floats(1e-9, 1e-5)
)


def prefill_attends(start: int, count: int) -> int:
    """Positions that ``count`` tokens after ``start`` attend to, each to itself and all before."""
    return sum(start + i + 1 for i in range(count))


@cache
def seen(steps: int, seed: int) -> list[tuple[Load, float]]:
    """Decode steps and mixed ones of all sizes, each with a number between -1 and 1."""
    random_, loads = random.Random(seed), []
    for _ in range(steps):
        decoding = random_.randint(1, 16)
        attended = decoding * random_.randint(1, 4000)
        prefill = random_.choice((0, 0, 1 << random_.randint(0, 9)))
        attended += prefill_attends(random_.randint(0, 2000), prefill)
        loads.append((Load(decoding + prefill, attended), random_.uniform(-1, 1)))
    return loads


def learned(truth: Truth, *, noise: float = 0.0, steps: int = 200, seed: int = 1) -> StepCost:
    """A model that saw such steps, with relative noise."""
    cost = StepCost()
    for load, deviation in seen(steps, seed):
        cost.observe(load, truth.seconds(*load) * (1 + noise * deviation))
    return cost


@given(TRUTHS, st.integers(1, 600), st.integers(0, 64_000))
def test_a_linear_machine_is_learned(truth, tokens, attended):
    predicted = learned(truth).predict(Load(tokens, attended))
    assert predicted == pytest.approx(truth.seconds(tokens, attended), rel=0.01)


@settings(max_examples=6)
@given(TRUTHS, st.integers(0, 4))
def test_noise_is_averaged(truth, seed):
    """Steps that vary by 20 % either way: what was seen is predicted within 10 %."""
    cost = learned(truth, noise=0.2, steps=1500, seed=seed)
    for tokens, attended in ((8, 16_000), (100, 200_000), (16, 32_000)):
        predicted = cost.predict(Load(tokens, attended))
        assert predicted == pytest.approx(truth.seconds(tokens, attended), rel=0.1)


def worst_with_hiccups() -> float:
    """By what factor predictions were too long at most, when about one step in fifty took a hundred
    times as long."""
    truth = Truth(5e-3, 1e-4, 0.0)
    cost, worst = learned(truth), 0.0
    for step in range(2000):
        tokens = 8 if step % 3 else 64
        hiccup = 100 if step % 47 == 0 else 1
        cost.observe(Load(tokens, 1000 * tokens), hiccup * truth.seconds(tokens, 1000 * tokens))
        for probe in (8, 64):
            predicted = cost.predict(Load(probe, 1000 * probe))
            assert predicted is not None
            worst = max(worst, predicted / truth.seconds(probe, 1000 * probe))
    return worst


def test_hiccups_do_not_move_it_far(monkeypatch):
    assert worst_with_hiccups() <= 1.2
    # Control: with every duration believed it is moved.
    monkeypatch.setattr("reference.sched.cost.OUTLIER_FACTOR", math.inf)
    assert worst_with_hiccups() > 1.5


def test_a_machine_that_becomes_slower_is_followed():
    before, after = Truth(5e-3, 1e-4, 1e-7), Truth(1e-2, 3e-4, 2e-7)
    cost, random_ = learned(before), random.Random(3)
    for _ in range(2000):
        tokens = random_.choice((4, 16, 64, 300))
        attended = tokens * random_.randint(100, 2000)
        cost.observe(Load(tokens, attended), after.seconds(tokens, attended))
    for tokens, attended in ((4, 4000), (300, 300_000)):
        assert cost.predict(Load(tokens, attended)) == pytest.approx(
            after.seconds(tokens, attended), rel=0.05
        )


def test_a_long_run_of_equal_steps_makes_nothing_forgotten():
    truth = Truth(5e-3, 1e-4, 1e-7)
    cost = learned(truth)
    for position in range(20_000):
        attended = 8 * (100 + position // 10)
        cost.observe(Load(8, attended), truth.seconds(8, attended))
    assert cost.predict(Load(512, 100_000)) == pytest.approx(truth.seconds(512, 100_000), rel=1e-3)


@given(
    TRUTHS, st.integers(1, 16), st.integers(1, 4000), st.integers(0, 4000), st.floats(1.0, 4.0),
    st.integers(1, 2000),
)  # fmt: skip
@example(Truth(1e-3, 1e-6, 1e-4), 1, 1, 0, 2.8165, 100)
def test_so_many_tokens_fit_and_no_more(truth, decoding, length, start, ratio, most):
    """A step with so many tokens more takes at most so long; with one more it would take longer."""
    attended = decoding * length
    allowed = ratio * truth.seconds(decoding, attended)
    load = Load(decoding, attended)
    more = learned(truth).tokens_within(allowed, load, most, start=start)
    assert 0 <= more <= most

    def mixed(prefill: int) -> float:
        positions = attended + prefill_attends(start, prefill)
        return truth.seconds(decoding + prefill, positions)

    assert mixed(more) <= allowed * (1 + 0.01)
    following = CHOICES[bisect_right(CHOICES, more)]
    assert more == most or mixed(min(most, following)) >= allowed * (1 - 0.01)


def test_without_knowledge_nothing_is_said():
    cost = StepCost()
    assert cost.predict(Load(1, 1)) is None
    assert cost.coefficients() is None
    with pytest.raises(ValueError, match="two sizes"):
        cost.tokens_within(1.0, Load(1, 1), 10)
    cost.observe(Load(4, 400), 1e-3)
    assert cost.predict(Load(4, 400)) is None
    cost.observe(Load(68, 2000), 9e-3)
    assert cost.predict(Load(4, 400)) == pytest.approx(1e-3, rel=0.01)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_duration_that_is_none_teaches_nothing(seconds):
    cost = StepCost()
    cost.observe(Load(1, 1), 1.0)
    cost.observe(Load(100, 100), seconds)
    assert cost.coefficients() is None


def test_memory_is_bounded_and_what_is_not_seen_goes_first():
    cost = StepCost()
    for step in range(1000):
        tokens = 1 << step % 12
        cost.observe(Load(tokens, tokens << step % 31), 1e-3 * tokens)
        cost.observe(Load(5000, 7), 5.0)
        assert len(cost._cells) <= CELLS_MAX
        assert cost._cells[(5000).bit_length(), (7).bit_length()].seen == min(step + 1, 32)


def test_a_new_kind_of_step_counts_at_once():
    cost = StepCost()
    cost.observe(Load(1, 10), 1e-3)
    cost.observe(Load(2, 20), 1e-3)
    assert cost.predict(Load(1000, 20)) == pytest.approx(1e-3, rel=0.01)
    cost.observe(Load(1000, 20), 1.0)
    predicted = cost.predict(Load(1000, 20))
    assert predicted is not None
    assert predicted > 0.5


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(1e-6, 10)), min_size=2, max_size=60))
def test_nothing_ever_costs_less_than_nothing(steps):
    """Whatever steps are said to take, no coefficient is negative and predictions are finite."""
    cost = StepCost()
    for tokens, seconds in steps:
        cost.observe(Load(tokens, tokens * 50), seconds)
    line = cost.coefficients()
    if line is not None:
        assert min(line.fixed, line.token, line.position) >= 0
        assert math.isfinite(line.fixed + line.token + line.position)
        seconds = cost.predict(Load(300, 15_000))
        assert seconds is not None
        assert 0 <= seconds < math.inf
        assert 0 <= cost.tokens_within(1.0, Load(3, 300), 256) <= 256
