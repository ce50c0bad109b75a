"""ARGMAX: ties, and rows that cannot be trusted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.ops.argmax import NO_TOKEN, argmax

FEW = st.sampled_from([-2.0, -1.0, -0.0, 0.0, 1.0, 2.0])


@given(row=st.lists(FEW, min_size=1, max_size=50))
def test_lowest_id_of_the_largest(row: list[float]) -> None:
    """Python's own index of the maximum; -0 and +0 tie."""
    assert argmax(logits=np.array([row], np.float32))[0] == row.index(max(row))


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 3, 6])
def test_broken_row_has_no_token(broken: float, place: int) -> None:
    """One NaN or infinity anywhere, and only in that row."""
    logits = np.tile(np.arange(7, dtype=np.float32), (3, 1))
    logits[1, place] = broken
    assert argmax(logits=logits).tolist() == [6, NO_TOKEN, 6]


def test_no_rows() -> None:
    """A step that wants no logits."""
    got = argmax(logits=np.empty((0, 5), np.float32))
    assert got.shape == (0,)
    assert got.dtype == np.int32
