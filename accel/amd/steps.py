"""How a graph becomes the ops of a step on these GPUs, see docs/amd.md for what was weighed."""

from __future__ import annotations

from accel.packets.forms import step_forms
from accel.packets.fused import fuse
from accel.packets.rules import ROW_PARTS, lower_graph
from accel.packets.step import Step
from contract.ir.nodes import Graph
from contract.shape_key import ShapeKey

SPLIT_TOKENS = 16
"""Attention of at most so many tokens divides the context."""
FORM_TOKENS = (1, 4, SPLIT_TOKENS)
"""Tokens of the forms smaller than the largest."""


def forms_of(largest: ShapeKey) -> tuple[ShapeKey, ...]:
    """See ``contract.tier.Tier.forms``."""
    return step_forms(largest, FORM_TOKENS)


def for_matrices(form: ShapeKey) -> bool:
    """Whether products of so many tokens are worth matrix instructions, which take 64 at a time."""
    return form.tokens > SPLIT_TOKENS


def step_of(
    graph: Graph, form: ShapeKey, tier: str, matrices: bool, split_tokens: int = SPLIT_TOKENS
) -> Step:
    """``matrices`` says whether the GPU has instructions for them.

    Raises UnsupportedOp.
    """
    lowered = lower_graph(graph, form, ROW_PARTS, tier, split_tokens)
    return fuse(lowered, matrices and for_matrices(form))
