"""The curve of a step's seconds by its tokens: it rises, knows the steps that were seen,
and tries few sizes."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from reference.sched.step_time_curve import (
    AGING_STEPS,
    CAREFUL_STEPS,
    FACTOR_MAX,
    FREE_STEPS,
    StepTimeCurve,
)

FIXED, TOKEN = 10e-3, 1e-3


def tiled(tokens: int, tile: int = 8) -> float:
    """Seconds where tokens fill tiles."""
    return FIXED + TOKEN * -(-tokens // tile) * tile


def between(found: StepTimeCurve, first: int, last: int) -> NDArray[np.float64]:
    """What may be chosen, from ``first`` to ``last`` tokens."""
    return np.array([found.predict_cautiously(tokens) for tokens in range(first, last + 1)])


def step_time_curve() -> StepTimeCurve:
    """Nothing seen, and the line known."""
    found = StepTimeCurve()
    found.set_line(FIXED, TOKEN)
    return found


def test_without_a_step_it_is_the_line():
    assert step_time_curve().predict(10) == pytest.approx(FIXED + 10 * TOKEN)
    assert between(step_time_curve(), 3, 600) == pytest.approx(FIXED + TOKEN * np.arange(3, 601))


def test_stairs_are_learned():
    found, random_ = step_time_curve(), random.Random(1)
    for _ in range(1000):
        tokens = random_.randint(1, 64)
        found.observe(tokens, tiled(tokens))
    assert [found.predict(n) for n in range(1, 65)] == pytest.approx(
        [tiled(n) for n in range(1, 65)]
    )
    # Beyond what was seen it goes on as the line does.
    assert found.predict(100) == pytest.approx(tiled(64) + 36 * TOKEN)


def test_noise_and_hiccups_are_averaged():
    found, random_ = step_time_curve(), random.Random(2)
    for step in range(4000):
        tokens = random_.randint(1, 32)
        hiccup = 100 if step % 97 == 0 else 1
        found.observe(tokens, hiccup * tiled(tokens) * random_.uniform(0.9, 1.1))
    for tokens in range(1, 33):
        assert found.predict(tokens) == pytest.approx(tiled(tokens), rel=0.1)


@given(st.lists(st.tuples(st.integers(1, 600), st.floats(-1.0, 10.0)), max_size=80))
def test_more_tokens_never_cost_less(steps):
    """Whatever was seen, and also among those that may be chosen."""
    found = step_time_curve()
    for tokens, seconds in steps:
        found.observe(tokens, seconds)
    curve = [found.predict(n) for n in range(1, 700)]
    assert (np.diff(curve) >= -1e-12).all()
    assert (np.diff(between(found, 1, 699)) >= -1e-12).all()
    assert 0 <= curve[0] <= curve[-1] <= FACTOR_MAX * (FIXED + 700 * TOKEN)


def test_what_was_seen_long_ago_gives_way():
    """A stair that was higher once, and those below it that are now as high."""
    found = step_time_curve()
    for _ in range(20):
        found.observe(12, 1.4 * (FIXED + 12 * TOKEN))
    for _ in range(20 * AGING_STEPS):
        found.observe(16, FIXED + 16 * TOKEN)
    assert found.predict(12) == pytest.approx(FIXED + 16 * TOKEN, rel=0.03)


def test_a_machine_that_becomes_slower_takes_its_stairs_along():
    """Those nobody stood on since stay as high beside the others as they were."""
    found = step_time_curve()
    for tokens in range(1, 33):
        found.observe(tokens, tiled(tokens))
    found.set_line(2 * FIXED, 2 * TOKEN)
    assert [found.predict(n) for n in range(1, 33)] == pytest.approx(
        [2 * tiled(n) for n in range(1, 33)]
    )


def test_after_a_surprise_nobody_tries_another_for_a_while():
    """A step on a new stair that takes far longer than expected: for CAREFUL_STEPS what lies
    between two stairs counts as the higher one."""
    found = step_time_curve()
    for _ in range(FREE_STEPS):
        found.observe(8, FIXED + 8 * TOKEN)
    found.observe(20, 1.3 * (FIXED + 20 * TOKEN))
    high = found.predict(20)
    assert between(found, 9, 20) == pytest.approx([high] * 12)
    assert found.predict(10) < 0.8 * high
    for _ in range(CAREFUL_STEPS):
        found.observe(8, FIXED + 8 * TOKEN)
    assert between(found, 9, 20)[1] == pytest.approx(found.predict(10))


def test_at_first_any_may_be_tried():
    found = step_time_curve()
    found.observe(8, FIXED + 8 * TOKEN)
    found.observe(20, 1.3 * (FIXED + 20 * TOKEN))
    assert between(found, 10, 10)[0] == pytest.approx(found.predict(10))
