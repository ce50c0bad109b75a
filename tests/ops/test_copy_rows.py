"""COPY_ROWS: the named rows, to the bit, and no other."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reference.ops.copy_rows import copy_rows


@given(data=st.data(), sources=st.integers(1, 6), targets=st.integers(1, 6))
def test_rows_arrive_and_the_others_stay(data, sources, targets):
    """NaN payloads and zeros of either sign included."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    source, target = (
        rng.integers(0, 2**32, (rows, 3), dtype=np.uint32).view(np.float32)
        for rows in (sources, targets)
    )
    into = data.draw(st.lists(st.integers(0, targets - 1), unique=True))
    pairs = np.array(
        [(data.draw(st.integers(0, sources - 1)), row) for row in into], np.int32
    ).reshape(-1, 2)
    expected = target.view(np.uint32).copy()
    for from_, to in pairs:
        expected[to] = source.view(np.uint32)[from_]
    copy_rows(source=source, pairs=pairs, target=target)
    assert (target.view(np.uint32) == expected).all()
