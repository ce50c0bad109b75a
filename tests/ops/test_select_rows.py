"""SELECT_ROWS: rows by index, in the order asked for."""

import numpy as np

from reference.ops.select_rows import select_rows


def test_rows_in_order():
    """Repeats and any order; bits are copied, a NaN and the sign of zero included."""
    x = np.arange(20, dtype=np.float32).reshape(5, 4)
    x[2, 1] = np.nan
    x[2, 2] = -0.0
    got = select_rows(x=x, output_rows=np.array([4, 2, 2], np.int32))
    assert got.view(np.uint32).tolist() == [x[i].view(np.uint32).tolist() for i in (4, 2, 2)]


def test_no_rows():
    """A step that wants no logits."""
    x = np.zeros((3, 4), np.float32)
    assert select_rows(x=x, output_rows=np.empty(0, np.int32)).shape == (0, 4)
