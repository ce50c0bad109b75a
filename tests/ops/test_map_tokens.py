"""MAP_TOKENS against a plain loop."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reference.ops.map_tokens import map_tokens


@given(st.lists(st.integers(0, 1 << 20), min_size=1, max_size=9), st.data())
def test_each_token_is_looked_up(table, data):
    tokens = data.draw(st.lists(st.integers(-1, len(table) - 1), max_size=9))
    mapped = map_tokens(token=np.array(tokens, np.int32), table=np.array(table, np.int32))
    assert mapped.dtype == np.int32
    assert mapped.tolist() == [-1 if token < 0 else table[token] for token in tokens]
