"""FLASH_ATTN: the decode form has the bits of FLASH_ATTN_BATCHED and refuses a prefill."""

from typing import Any

import numpy as np
import pytest

from reference.ops.flash_attn import flash_attn
from reference.ops.flash_attn_batched import flash_attn_batched
from tests.ops.paged import pool_of, random_sequence


def operands(tokens: list[tuple[int, int]]) -> dict[str, Any]:
    """A step over two sequences of 70 positions."""
    kv, page_table = pool_of([random_sequence(seed, 70, 1, 24) for seed in range(2)])
    rng = np.random.default_rng(1)
    return {
        "q": rng.standard_normal((len(tokens), 48), dtype=np.float32), "kv": kv,
        "page_table": page_table,
        "query": np.array([(0, slot, position, 0) for slot, position in tokens], np.int32),
        "heads": 2, "kv_heads": 1, "head_dim": 24, "scale": 0.2, "window": 66, "soft_cap": 9.0,
    }  # fmt: skip


def test_same_bits_as_batched():
    """One query a slot."""
    step = operands([(1, 69), (0, 64)])
    assert (flash_attn(**step) == flash_attn_batched(**step)).all()


def test_two_queries_of_a_slot_break_an_invariant():
    """A graph for decode never sees a chunk."""
    with pytest.raises(AssertionError, match="one query a slot"):
        flash_attn(**operands([(0, 63), (0, 64)]))
