"""RMS_NORM_FUSED_ROPE_KV_WRITE: the bits of its parts run one after another."""

import numpy as np
import pytest

from reference.exact.rotary import rotary_table
from reference.ops.rms_norm_fused_rope_kv_write import rms_norm_fused_rope_kv_write
from tests.ops.scalar import F, rms_norm_row

HEADS, KV_HEADS, HEAD_DIM, PAIRS, EPS = 4, 2, 16, 6, 1e-6
TOKENS = [(1, 17), (0, 3), (1, 18)]


def turned(row: list[np.float32], table: np.ndarray, neox: int) -> list[np.float32]:
    """One head rotated pair by pair."""
    result = list(row)
    for pair in range(PAIRS):
        i, j = (pair, pair + PAIRS) if neox else (2 * pair, 2 * pair + 1)
        cosine, sine = table[0, pair], table[1, pair]
        result[i] = F(F(row[i] * cosine) - F(row[j] * sine))
        result[j] = F(F(row[i] * sine) + F(row[j] * cosine))
    return result


@pytest.mark.parametrize("neox", [0, 1])
@pytest.mark.parametrize("normed", [True, False])
def test_scalar_rule(neox, normed):
    """Queries come back, keys and values are in their pages, other pages are untouched."""
    rng = np.random.default_rng(3)
    qkv = rng.standard_normal((3, (HEADS + 2 * KV_HEADS) * HEAD_DIM), dtype=np.float32)
    norms = rng.standard_normal((2, HEAD_DIM), dtype=np.float32) if normed else (None, None)
    table = rotary_table(32, 10_000.0, 2 * PAIRS)
    page_table = np.array([[4, 1], [0, 3]], np.int32)
    kv = np.full((5, 2, 16, KV_HEADS, HEAD_DIM), np.nan, np.float16)
    query = np.array([(0, slot, position, 0) for slot, position in TOKENS], np.int32)
    q = rms_norm_fused_rope_kv_write(
        qkv=qkv, rope_table=table, query=query, page_table=page_table, kv=kv, heads=HEADS,
        kv_heads=KV_HEADS, head_dim=HEAD_DIM, neox=neox, eps=EPS, q_norm=norms[0], k_norm=norms[1],
    )  # fmt: skip
    written = np.zeros(kv.shape, bool)
    for token, (slot, position) in enumerate(TOKENS):
        heads = qkv[token].reshape(-1, HEAD_DIM)
        page, offset = page_table[slot, position // 16], position % 16
        written[page, :, offset] = True
        for head in range(HEADS + KV_HEADS):
            norm = norms[0] if head < HEADS else norms[1]
            row = list(heads[head]) if norm is None else rms_norm_row(heads[head], norm, EPS)
            expected = turned(row, table[position], neox)
            if head < HEADS:
                assert q[token].reshape(HEADS, -1)[head].tolist() == expected
            else:
                stored = kv[page, 0, offset, head - HEADS]
                assert stored.tolist() == np.array(expected).astype(np.float16).tolist()
        values = heads[HEADS + KV_HEADS :].astype(np.float16)
        assert (kv[page, 1, offset] == values).all()
    assert np.isnan(kv[~written]).all()
