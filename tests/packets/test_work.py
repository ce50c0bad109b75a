"""Steps cut into pieces."""

from __future__ import annotations

from accel.packets import work


def test_runs_of_launches_hold_no_more_than_allowed() -> None:
    """Each run is within the limit or a single launch, and together they are all launches."""
    assert work.split_launches([], 5) == [range(0)]
    assert work.split_launches([9, 1, 2, 3, 1, 9, 9], 5) == [
        range(1), range(1, 3), range(3, 5), range(5, 6), range(6, 7)
    ]  # fmt: skip


def test_launches_side_by_side_stay_together() -> None:
    waits = [True, True, False, False, True]
    assert work.split_launches([3, 1, 1, 1, 1], 5, waits) == [range(1), range(1, 5)]
    assert work.split_launches([3, 1, 1, 1, 1], 5) == [range(3), range(3, 5)]


def test_those_of_more_than_a_run_do_not() -> None:
    waits = [True, True, False, False]
    assert work.split_launches([1, 3, 2, 3], 5, waits) == [range(2), range(2, 4)]
