"""The bytes of a graph's weights: a tensor with a broken scale is refused at the first one."""

import numpy as np
import pytest

from contract.dtypes import F32, Q8_0
from reference.model import weights
from tests.quant.samples import random_blocks

NAN_HALF = 0x7E00


@pytest.mark.parametrize("shared_bytes", [0, 1 << 26], ids=["all cores", "one"])
@pytest.mark.parametrize("piece_bytes", [1, 100, 1000, 1 << 20])
@pytest.mark.parametrize("broken", [(), (63,), (5, 40), (40, 5, 6), tuple(range(64))], ids=str)
def test_the_first_broken_scale_is_found(monkeypatch, piece_bytes, broken, shared_bytes):
    """However many pieces the tensor is checked in, and whichever is checked first."""
    monkeypatch.setattr(weights, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(weights, "SHARED_BYTES", shared_bytes)
    data = random_blocks(Q8_0, 64, 96, 1)
    for row in broken:
        data[row].view("<u2").reshape(3, -1)[1, 0] = NAN_HALF
    expected = (min(broken), 1) if broken else None
    assert weights._first_broken(Q8_0, data) == expected


def test_no_rows_hold_nothing_broken():
    """A tensor of nothing."""
    assert weights._first_broken(F32, np.zeros((0, 16), np.uint8)) is None
