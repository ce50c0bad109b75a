"""How much prefill a step carries: a pure function of who runs and what steps cost."""

import math
import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.sched.cost import Load, StepCost
from reference.sched.planner import FIRST_PREFILL_TOKENS, SPREAD_STEPS, Pending, prefill_tokens

MOST = 512


def seconds(fixed: float, tokens: float, attended: float) -> float:
    """What a step takes on the machines of these tests."""
    return fixed + 1e-3 * tokens + 1e-7 * attended


@cache
def learned(fixed: float) -> StepCost:
    """A cost model of a machine whose steps of any size were seen."""
    cost, random_ = StepCost(), random.Random(1)
    for _ in range(2000):
        tokens = random_.choice((random_.randint(1, 64), random_.randint(1, 600)))
        attended = tokens * random_.randint(1, 2000)
        cost.observe(Load(tokens, attended), seconds(fixed, tokens, attended))
    return cost


def decoding(count: int, length: int = 200) -> list[Pending]:
    """Sequences of ``length`` tokens, all but the last computed."""
    return [Pending(slot, length - 1, length) for slot in range(count)]


def reading(count: int, left: int, start: int = 0) -> list[Pending]:
    """Sequences of which ``start`` tokens are computed and ``left`` follow."""
    return [Pending(100 + slot, start, start + left) for slot in range(count)]


def taken(fixed: float, decodes: int, prefill: float, start: int = 0, length: int = 200) -> float:
    """Seconds of a step with so much prefill."""
    attended = decodes * length + prefill * start + prefill * (prefill + 1) / 2
    return seconds(fixed, decodes + prefill, attended)


@given(
    st.sampled_from((1e-3, 5e-3, 2e-2, 0.2)), st.integers(1, 15), st.integers(1, 15),
    st.integers(2, 400), st.integers(0, 1000), st.floats(1.0, 4.0), st.booleans(),
)  # fmt: skip
def test_a_step_takes_no_longer_than_its_level(fixed, decodes, reads, left, start, ratio, spread):
    """The level: all that run get a token, or so many times what decoding takes."""
    pending = decoding(decodes) + reading(reads, left, start)
    found = prefill_tokens(pending, learned(fixed), ratio, MOST, spread=spread)
    assert 1 <= found <= min(MOST, reads * left)
    alone = taken(fixed, decodes, 0)
    pooled = taken(fixed, decodes, reads, start)
    assert found >= reads
    assert taken(fixed, decodes, found, start) <= 1.02 * max(ratio * alone, pooled)
    if not spread and found < min(MOST, reads * left):
        assert taken(fixed, decodes, 1.07 * found + 2, start) >= 0.98 * ratio * alone


def test_steps_take_the_same_whoever_reads_and_whoever_decodes():
    """The point of the level: sixteen sequences, of which any number reads."""
    times = []
    for reads in range(1, 12):
        pending = decoding(16 - reads) + reading(reads, 200)
        prefill = prefill_tokens(pending, learned(2e-3), 1.0, MOST)
        times.append(taken(2e-3, 16 - reads, prefill))
    assert max(times) < 1.1 * min(times)


def test_what_is_to_be_read_is_spread():
    """Where tokens are cheap beside the rest a prompt would fit one step, which would be long."""
    cost, decodes = learned(0.2), decoding(4)
    ratio = 1.3
    alone = taken(0.2, 4, 0)
    room = round((ratio - 1) * alone / 1e-3)
    short = prefill_tokens(decodes + reading(1, 55), cost, ratio, MOST)
    assert room / 3.5 < short < room / 2
    long = room * SPREAD_STEPS
    assert prefill_tokens(decodes + reading(1, long), cost, ratio, MOST) > 0.8 * room
    middle = prefill_tokens(decodes + reading(1, long // 2), cost, ratio, MOST)
    assert middle == pytest.approx(room / 2, abs=2)


def test_who_waits_for_nobody_takes_all():
    cost = learned(5e-3)
    assert prefill_tokens(reading(3, 400), cost, 1.3, MOST) == MOST
    assert prefill_tokens(decoding(2) + reading(3, 400), cost, math.inf, MOST) == MOST
    assert prefill_tokens(decoding(2), cost, 1.3, MOST) == MOST


def test_without_knowledge_it_is_careful():
    pending = decoding(4) + reading(1, 400)
    assert prefill_tokens(pending, StepCost(), 1.3, MOST) == FIRST_PREFILL_TOKENS
    assert prefill_tokens(pending, StepCost(), 1.3, 20) == 20


def test_each_that_reads_gets_a_token_whatever_is_known_of_so_many():
    """After a step that took far longer than expected, numbers nobody has seen count as a high one:
    what those that read have in any case does not depend on it."""
    cost = StepCost()
    for tokens in (*range(1, 9), 100) * 20:
        cost.observe(Load(tokens, 0), seconds(5e-3, tokens, 0))
    cost.observe(Load(40, 0), 1.9 * seconds(5e-3, 40, 0))
    pending = decoding(8) + reading(7, 100)
    assert prefill_tokens(pending, cost, 1.0, MOST) == 7
    assert prefill_tokens(pending, cost, 4.0, MOST) == 7
    # Careful only for the sake of a class above: what may be long is tried beside equals.
    assert prefill_tokens(pending, cost, 4.0, MOST, spread=False) > 14


def test_beside_equals_nothing_is_spread():
    """A prompt that would be read in eight steps is read in one, and no step exceeds the ratio."""
    cost, decodes, ratio = learned(0.2), decoding(4), 2.0

    def steps(left: int, spread: bool) -> int:
        count = 0
        while left > 1:
            left -= prefill_tokens(decodes + reading(1, left), cost, ratio, MOST, spread=spread)
            count += 1
        return count

    room = round((ratio - 1) * taken(0.2, 4, 0) / 1e-3)
    assert steps(room * 9 // 10, spread=True) >= 3
    assert steps(room * 9 // 10, spread=False) == 1
    assert steps(room * 19 // 10, spread=False) == 2
