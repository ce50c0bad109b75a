"""What the reference makes of the vectors of attention and rotated storage (rules R6, R13)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.arithmetic import KV_ROW_BITS, PAGE_TOKENS
from contract.dtypes import BY_NAME
from reference.exact.attention_rows import row_integers
from reference.exact.coded_rows import coded, decoded
from reference.exact.kv_storage import page_view, store
from reference.exact.rotation import rotated, rotated_back
from reference.ops.flash_attn_batched import flash_attn_batched

Float32 = NDArray[np.float32]


def attend(q: Float32, k: Float32, v: Float32, storage: str, scale: float, **more: Any) -> Float32:
    """Two heads of one query at the last position, over one KV head."""
    length, width = k.shape
    pages, dtype = -(-length // PAGE_TOKENS), BY_NAME[storage]
    octets = np.zeros(pages * PAGE_TOKENS * dtype.row_bytes(width) * 2, np.uint8)
    kv = page_view(octets, dtype, (pages, 2, PAGE_TOKENS, 1, width))
    positions = np.arange(length, dtype=np.int32)
    store(kv, positions // PAGE_TOKENS, positions % PAGE_TOKENS, k[:, None], v[:, None])
    table = np.arange(pages, dtype=np.int32)[None]
    query = np.array([(0, 0, length - 1, 0)], np.int32)
    sizes = {"heads": 2, "kv_heads": 1, "head_dim": width}
    y = flash_attn_batched(
        q=q.reshape(1, -1), kv=kv, page_table=table, query=query, scale=scale, **sizes, **more
    )
    return y.reshape(q.shape)


def rotate(x: Float32) -> dict[str, Any]:
    """A rotated head, and what rotating it back gives."""
    y = rotated(x)
    return {"y": y, "back": rotated_back(y)}


def codes(x: Float32, bits: int) -> dict[str, Any]:
    """The integers that codes of the rows of ``x`` stand for."""
    return {"m": decoded(coded(row_integers(x, KV_ROW_BITS).m, bits), bits)}
