"""RMS_NORM_FUSED_ROPE_KV_WRITE: per-head norms, rotation and the KV write of a packed qkv
buffer."""

from __future__ import annotations

from functools import partial

import numpy as np

from contract.arrays import Array, Floats, Ints
from reference.ops.kv_write_batched import kv_write_batched
from reference.ops.rms_norm import rms_norm
from reference.ops.rope import rope


def rms_norm_fused_rope_kv_write(
    *,
    qkv: Floats,
    rope_table: Floats,
    query: Ints,
    page_table: Ints,
    kv: Array,
    heads: int,
    kv_heads: int,
    head_dim: int,
    neox: int,
    eps: float,
    q_norm: Floats | None = None,
    k_norm: Floats | None = None,
) -> Floats:
    """Rotate queries and keys, write keys and values to ``kv``, and return the queries.

    ``qkv`` is [tokens, (heads + 2 kv_heads) * head_dim], the result [tokens, heads * head_dim]. A
    norm that is absent is skipped."""
    q_width, kv_width = heads * head_dim, kv_heads * head_dim
    q, k, v = np.split(qkv, [q_width, q_width + kv_width], axis=1)
    if q_norm is not None:
        q = rms_norm(x=q, weight=q_norm, eps=eps, groups=heads)
    if k_norm is not None:
        k = rms_norm(x=k, weight=k_norm, eps=eps, groups=kv_heads)
    rotated = partial(rope, rope_table=rope_table, query=query, head_dim=head_dim, neox=neox)
    k = rotated(x=k, heads=kv_heads)
    kv_write_batched(
        k=k, v=v, query=query, page_table=page_table, kv=kv, kv_heads=kv_heads, head_dim=head_dim
    )
    return rotated(x=q, heads=heads)
