"""VERIFY_K against a plain loop."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reference.ops.verify_k import verify_k

BITS = st.lists(st.integers(0, 1), min_size=6, max_size=6)


@given(rows=st.lists(st.tuples(BITS, BITS), min_size=1, max_size=8))
def test_common_prefix(rows: list[tuple[list[int], list[int]]]) -> None:
    """An agreement after the first difference does not count."""
    draft = np.array([row[0] for row in rows], np.int32)
    target = np.array([row[1] for row in rows], np.int32)
    expected = []
    for a, b in rows:
        length = 0
        while length < 6 and a[length] == b[length]:
            length += 1
        expected.append(length)
    got = verify_k(draft=draft, target=target)
    assert got.tolist() == expected
    assert got.dtype == np.int32
