"""Row slices of tensors: text form and meaning."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.ir.source import ONES, RowSlice, WeightSource, parse_source


def drawn_slices(groups: st.SearchStrategy[int], depth: int) -> st.SearchStrategy[RowSlice]:
    """Slices of up to ``depth`` levels, of groups of these sizes."""

    @st.composite
    def draw_one(draw: st.DrawFn) -> RowSlice:
        group = draw(groups)
        start = draw(st.integers(0, group - 1))
        stop = draw(st.integers(start + 1, group))
        if depth == 1 or draw(st.booleans()):
            return RowSlice(start, stop, group)
        parts = [n for n in range(1, stop - start + 1) if (stop - start) % n == 0]
        inner = draw(drawn_slices(st.sampled_from(parts), depth - 1))
        return RowSlice(start, stop, group, inner)

    return draw_one()


@given(st.none() | drawn_slices(st.integers(1, 60), 3))
def test_text_and_back(rows):
    """parse_source inverts str."""
    source = WeightSource("blk.0.attn_q.weight", rows)
    assert parse_source(str(source)) == source


@pytest.mark.parametrize(
    "text", ["", "a[0:1]", "a[1:1/2]", "a[0:3/2]", "a[0:1/2]b", "[0:1/2]", "a[0:3/4][0:1/2]"]
)
def test_what_is_no_source(text):
    """Malformed text and empty or overlong slices are refused."""
    with pytest.raises(ValueError, match=r"names no tensor|rows"):
        parse_source(text)


def test_rows_of_every_group():
    """Rows 1 and 2 of every three."""
    rows = np.arange(12, dtype=np.uint8).reshape(6, 2)
    assert RowSlice(1, 3, 3).take(rows).tolist() == rows[[1, 2, 4, 5]].tolist()


def test_rows_of_rows():
    """Of rows 0 to 3 of every five, the first of every two."""
    rows = np.arange(20, dtype=np.uint8).reshape(10, 2)
    chosen = RowSlice(0, 4, 5, RowSlice(0, 1, 2))
    assert str(WeightSource("a", chosen)) == "a[0:4/5][0:1/2]"
    assert chosen.take(rows).tolist() == rows[[0, 2, 5, 7]].tolist()
    assert chosen.selected() == [0, 2]


@given(drawn_slices(st.integers(1, 60), 3), st.integers(1, 3))
def test_the_rows_kept_are_the_same_in_every_group(rows, groups):
    whole = np.arange(groups * rows.group)[:, None]
    expected = [group * rows.group + row for group in range(groups) for row in rows.selected()]
    assert rows.take(whole)[:, 0].tolist() == expected


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (WeightSource("w", None, (0, 0, -3, 5, 5)), "w*2^(0x2,-3x1,5x2)"),
        (WeightSource("w", RowSlice(0, 1, 2), (1,)), "w[0:1/2]*2^(1x1)"),
        (WeightSource(ONES, None, (-1,) * 300), "1*2^(-1x300)"),
    ],
)
def test_powers_of_two(source, text):
    """They survive as text, and multiply columns."""
    assert str(source) == text
    assert parse_source(text) == source
    ones = np.ones((2, len(source.powers)), np.float32)
    assert source.scaled(ones).tolist() == [[2.0**power for power in source.powers]] * 2
