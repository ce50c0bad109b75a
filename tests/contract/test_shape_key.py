"""ShapeKeys pack into 64 bits and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.shape_key import MAX_SIZE, SYMBOLS, ShapeKey

SIZES = st.integers(0, MAX_SIZE)


@given(SIZES, SIZES)
def test_a_key_survives_packing(tokens, rows):
    key = ShapeKey(tokens, rows)
    assert 0 <= key.pack() < 2**64
    assert ShapeKey.unpack(key.pack()) == key


@given(SIZES, SIZES, SIZES, SIZES)
def test_packed_keys_sort_by_tokens_then_rows(a, b, c, d):
    assert ((a, b) < (c, d)) == (ShapeKey(a, b).pack() < ShapeKey(c, d).pack())


def test_the_symbols_are_the_fields():
    assert tuple(ShapeKey(3, 2).sizes()) == SYMBOLS
    assert ShapeKey(3, 2).sizes() == {"tokens": 3, "rows": 2}


@pytest.mark.parametrize("sizes", [(-1, 0), (0, -1), (2**32, 0), (0, 2**32)])
def test_a_size_that_does_not_pack(sizes):
    with pytest.raises(ValueError, match="outside"):
        ShapeKey(*sizes)
