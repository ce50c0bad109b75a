"""Which kernels steps of so many tokens are made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.amd.steps import SPLIT_TOKENS, buckets_of, step_of
from contract.shape_key import ShapeKey
from reference.limits import Limits
from reference.model.open import open_model

LIMITS = Limits(64, 64, 256, step_tokens=128, step_rows=64)


@pytest.mark.parametrize(
    ("tokens", "product", "attention"),
    [
        (1, "matmul_row", "flash_attn_part"),
        (4, "matmul", "flash_attn_part"),
        (SPLIT_TOKENS, "matmul", "flash_attn_part"),
        (SPLIT_TOKENS + 1, "matmul_tiles", "flash_attn_batched"),
    ],
)
def test_kernels_by_tokens(
    tiny_model_path: Path, tokens: int, product: str, attention: str
) -> None:
    """Of quantized layers; without matrix instructions packed dots stay."""
    graph = open_model(tiny_model_path).graph(LIMITS)
    bucket = ShapeKey(tokens, min(tokens, 64))
    names = {op.name for op in step_of(graph, bucket, "t1", matrices=True).ops}
    assert {product, attention} <= names
    plain = {op.name for op in step_of(graph, bucket, "t1", matrices=False).ops}
    assert "matmul_tiles" not in plain


def test_a_form_for_every_choice() -> None:
    """So that a step of 16 slots is not one of many tokens."""
    assert [bucket.tokens for bucket in buckets_of(ShapeKey(128, 64))] == [1, 4, SPLIT_TOKENS, 128]
    assert [bucket.tokens for bucket in buckets_of(ShapeKey(2, 2))] == [1, 2]
