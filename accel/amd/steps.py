"""Lowers a graph to the ops of a step on AMD GPUs (docs/simulated.md)."""

from __future__ import annotations

from accel.packets.fused import fuse
from accel.packets.rules import ROW_PARTS, lower_graph
from accel.packets.shape_buckets import shape_buckets
from accel.packets.step import Step
from contract.ir.nodes import Graph
from contract.shape_key import ShapeKey

SPLIT_TOKENS = 16
"""Most tokens for which attention divides the context."""
BUCKET_TOKENS = (1, 4, SPLIT_TOKENS)
"""Tokens of the buckets below the largest."""


def buckets_of(largest: ShapeKey) -> tuple[ShapeKey, ...]:
    """See ``contract.tier.Tier.buckets``."""
    return shape_buckets(largest, BUCKET_TOKENS)


def for_matrices(bucket: ShapeKey) -> bool:
    """Whether matrix instructions, which take 64 tokens at a time, are faster for the products of
    ``bucket``."""
    return bucket.tokens > SPLIT_TOKENS


def step_of(
    graph: Graph, bucket: ShapeKey, tier: str, matrices: bool, split_tokens: int = SPLIT_TOKENS
) -> Step:
    """The step of a bucket; ``matrices`` says whether the GPU has matrix instructions. Raises
    UnsupportedOp."""
    lowered = lower_graph(graph, bucket, ROW_PARTS, tier, split_tokens)
    return fuse(lowered, matrices and for_matrices(bucket))
