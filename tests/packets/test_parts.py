"""Free ranges of memory, launches cut into pieces, and a tier without arithmetic."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.packets import work
from accel.packets.free_ranges import FreeRanges
from contract.types import FinishReason
from reference.engine import Engine
from reference.model.open import open_model
from reference.runner import LOGITS, ModelRunner
from tests.engine.small_engine import LIMITS, events_of, request
from tests.null_tier import NullTier


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=40))
def test_allocations_never_overlap_and_all_can_be_freed(requests):
    """In any order: allocations are disjoint, and once all are freed, one free range is left."""
    ranges = FreeRanges(24)
    allocated: list[tuple[int, int]] = []
    for size, frees in requests:
        if frees and allocated:
            ranges.free(*allocated.pop(len(allocated) // 2))
        elif (start := ranges.allocate(size)) is not None:
            allocated.append((start, size))
        used = sorted(allocated)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(used))
        assert ranges.free_bytes + sum(size for _, size in allocated) == 24
    for each in allocated:
        ranges.free(*each)
    assert ranges.all_free


def test_runs_of_launches_hold_no_more_than_allowed():
    """Each run is within the limit or a single launch, and together they are all launches."""
    assert work.split_launches([], 5) == [range(0)]
    assert work.split_launches([9, 1, 2, 3, 1, 9, 9], 5) == [
        range(1), range(1, 3), range(3, 5), range(5, 6), range(6, 7)
    ]  # fmt: skip


def test_launches_side_by_side_stay_together():
    waits = [True, True, False, False, True]
    assert work.split_launches([3, 1, 1, 1, 1], 5, waits) == [range(1), range(1, 5)]
    assert work.split_launches([3, 1, 1, 1, 1], 5) == [range(3), range(3, 5)]


def test_those_of_more_than_a_run_do_not():
    waits = [True, True, False, False]
    assert work.split_launches([1, 3, 2, 3], 5, waits) == [range(2), range(2, 4)]


@pytest.mark.parametrize("token", [0, 65])
def test_every_row_samples_the_token(tiny_model_path, token):
    model = open_model(tiny_model_path)
    with model.file, NullTier(token) as tier, ModelRunner(model, tier, LIMITS) as runner:
        engine = Engine(runner)
        for number in range(8):
            engine.submit(request(number, length=20, max_tokens=6))
        events = events_of(engine)
        assert {n: [e.token for e in found] for n, found in events.items()} == {
            n: [token] * 6 for n in range(8)
        }
        assert all(found[-1].finish_reason is FinishReason.LENGTH for found in events.values())
        assert not runner.buffer(LOGITS).any()
