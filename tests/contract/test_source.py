"""Row slices of tensors: text form and meaning."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.ir.source import RowSlice, WeightSource, parse_source


@given(st.lists(st.integers(0, 1 << 20), min_size=3, max_size=3, unique=True), st.booleans())
def test_text_and_back(numbers: list[int], whole: bool) -> None:
    """parse_source inverts str."""
    start, stop, group = sorted(numbers)
    source = WeightSource("blk.0.attn_q.weight", None if whole else RowSlice(start, stop, group))
    assert parse_source(str(source)) == source


@pytest.mark.parametrize("text", ["", "a[0:1]", "a[1:1/2]", "a[0:3/2]", "a[0:1/2]b", "[0:1/2]"])
def test_what_is_no_source(text: str) -> None:
    """Malformed text and empty or overlong slices are refused."""
    with pytest.raises(ValueError, match=r"names no tensor|rows"):
        parse_source(text)


def test_rows_of_every_group() -> None:
    """Rows 1 and 2 of every three."""
    rows = np.arange(12, dtype=np.uint8).reshape(6, 2)
    assert RowSlice(1, 3, 3).take(rows).tolist() == rows[[1, 2, 4, 5]].tolist()
