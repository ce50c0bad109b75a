"""FLASH_ATTN: attention of one query token per slot, the decode case of FLASH_ATTN_BATCHED."""

from __future__ import annotations

from contract.arrays import Array, Floats, Ints
from reference.ops.flash_attn_batched import flash_attn_batched


def flash_attn(
    *,
    q: Floats,
    kv: Array,
    page_table: Ints,
    query: Ints,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Floats | None = None,
) -> Floats:
    """FLASH_ATTN_BATCHED for a ``query`` with at most one token per slot. Returns the shape of
    q."""
    if len(set(query[:, 1].tolist())) != len(query):
        raise AssertionError("a decode step holds one query a slot")
    return flash_attn_batched(
        q=q,
        kv=kv,
        page_table=page_table,
        query=query,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
    )
