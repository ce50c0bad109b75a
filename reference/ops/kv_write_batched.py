"""KV_WRITE_BATCHED: stores the keys and values of the step's tokens in their KV pages."""

from __future__ import annotations

from contract.arithmetic import PAGE_TOKENS
from contract.arrays import Array, Floats, Ints
from reference.exact.kv_storage import store


def kv_write_batched(
    *, k: Floats, v: Floats, query: Ints, page_table: Ints, kv: Array, kv_heads: int, head_dim: int
) -> None:
    """kv[page, 0 or 1, position mod 16] = k or v, in place.

    ``k`` and ``v`` are [tokens, kv_heads * head_dim]. ``kv`` holds pages in one of the storage
    types of ``reference.exact.kv_storage``. The page is ``page_table[slot, position // 16]``."""
    slot, position = query[:, 1], query[:, 2]
    page = page_table[slot, position // PAGE_TOKENS]
    offset = position % PAGE_TOKENS
    rows = (len(k), kv_heads, head_dim)
    store(kv, page, offset, k.reshape(rows), v.reshape(rows))
