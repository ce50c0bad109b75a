"""What attention becomes: blocks of queries, or with few tokens parts of the context."""

from __future__ import annotations

from collections.abc import Mapping

from accel.packets.lowering import ANY, ROWS, Lowering, cheap
from accel.packets.step import Op, Tensor
from contract.arithmetic import KV_SPAN, KV_TILE, PAGE_TOKENS
from contract.ir.nodes import Node

SPLIT_TOKENS = 4
"""Attention of at most this many tokens divides the context among workers."""
PART_HEADER = 2
"""Floats before the values of one part, see ``kernels/flash_attn.cl``."""


def lower_attention(low: Lowering, node: Node) -> None:
    """FLASH_ATTN and FLASH_ATTN_BATCHED."""
    dims = low.dims(node)
    if 0 < dims["tokens"] <= SPLIT_TOKENS and low.parts > 1:
        _split_attention(low, node, dims)
        return
    q, kv, page_table, query, y = _tensors(low, node)
    low.add(
        Op(
            "flash_attn_batched",
            (q, kv, page_table, query, y, _sinks(low, node)),
            (ANY,) * 6,
            (4,),
            tuple(dims[name] for name in ("tokens", "heads", "kv_heads", "head_dim", "window")),
            (node.params["scale"], node.params["soft_cap"]),
            dtype=low.dtype(node.operands["kv"]),
        )
    )


def _tensors(low: Lowering, node: Node) -> tuple[Tensor, ...]:
    """Operands in the order of the opcode table."""
    q, page_table, query, y = (
        low.tensor(node.operands[name]) for name in ("q", "page_table", "query", "y")
    )
    return q, low.pages(node.operands["kv"]), page_table, query, y


def _sinks(low: Lowering, node: Node) -> Tensor | None:
    return low.tensor(node.operands["sinks"]) if "sinks" in node.operands else None


def part_slots(positions: int, parts: int) -> int:
    """Parts the context of a query of ``positions`` is cut into at most.

    Enough for its spans, and for single tiles of a short context or where ``parts`` workers want
    them: a span of 16 tiles is the smallest part whose results take little beside the KV pages.
    """
    tiles, spans = -(-positions // KV_TILE), -(-positions // KV_SPAN)
    return min(tiles, max(KV_SPAN // KV_TILE, spans, parts))


def _split_attention(low: Lowering, node: Node, dims: Mapping[str, int]) -> None:
    """Parts in parallel, then their merge: what keeps all workers busy with few tokens."""
    q, kv, page_table, query, y = _tensors(low, node)
    tokens, heads, head_dim, window = (
        dims[name] for name in ("tokens", "heads", "head_dim", "window")
    )
    slots = part_slots(page_table.columns * PAGE_TOKENS, low.parts)
    part = PART_HEADER + -(-head_dim // 16) * 16
    parts = low.new(f"{node.name}.parts", tokens, heads * slots * part)
    low.add(
        Op(
            "flash_attn_part",
            (q, kv, page_table, query, parts),
            (ANY,) * 5,
            (4,),
            (tokens, heads, dims["kv_heads"], head_dim, window, slots),
            (node.params["scale"], node.params["soft_cap"]),
            dtype=low.dtype(node.operands["kv"]),
        )
    )
    low.add(
        Op(
            "flash_attn",
            (parts, query, y, _sinks(low, node)),
            (ANY, ANY, ROWS, ANY),
            (2,),
            (tokens, heads, head_dim, window, slots),
            private=cheap(tokens, y.columns),
        )
    )
