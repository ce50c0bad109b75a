"""KV_WRITE_BATCHED: store the keys and values of the step's tokens in their pages."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from contract.arithmetic import PAGE_TOKENS
from reference.exact.kv_storage import stored


def kv_write_batched(
    *,
    k: NDArray[np.float32],
    v: NDArray[np.float32],
    query: NDArray[np.int32],
    page_table: NDArray[np.int32],
    kv: NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint8],
    kv_heads: int,
    head_dim: int,
) -> None:
    """kv[page, 0 or 1, position mod 16] = k or v, in place.

    ``k``, ``v`` are [tokens, kv_heads * head_dim]; ``kv`` is [pages, 2, 16, kv_heads * head_dim],
    or as many bytes as the Q8_0 blocks of a row take; the page is
    ``page_table[slot, position // 16]``. Values are kept as ``reference.exact.kv_storage`` says.
    """
    slot, position = query[:, 1], query[:, 2]
    page = page_table[slot, position // PAGE_TOKENS]
    offset = position % PAGE_TOKENS
    kv[page, 0, offset] = stored(k, kv.dtype)
    kv[page, 1, offset] = stored(v, kv.dtype)
