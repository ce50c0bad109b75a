"""Lowers attention to blocks of queries or, for few tokens, to parts of the context."""

from __future__ import annotations

from accel.packets.lowering import Lowering
from accel.packets.step import Tensor
from contract.arithmetic import KV_SPAN, KV_TILE, PAGE_TOKENS
from contract.dtypes import ROTATED_KV
from contract.ir.nodes import Node

PART_HEADER = 2
"""Floats before the values of one part, see ``accel/kernels/flash_attn_part.k``."""


def lower_attention(low: Lowering, node: Node) -> None:
    """Lowers FLASH_ATTN and FLASH_ATTN_BATCHED.

    Over pages of rotated rows queries are rotated first, and results are rotated back (R13)."""
    y = low.tensor(node.operands["y"])
    if low.dtype(node.operands["kv"]) not in ROTATED_KV:
        _attend(low, node, low.tensor(node.operands["q"]), y)
        return
    rotated = low.new(f"{node.name}.rotated_y", low.count(node).maximum, y.columns)
    q = low.rotated(low.tensor(node.operands["q"]), node, "rotated_q")
    _attend(low, node, q, rotated)
    low.rotate_heads(rotated, node, y, back=True)


def _attend(low: Lowering, node: Node, q: Tensor, y: Tensor) -> None:
    if 0 < low.count(node).maximum <= low.split_tokens and low.parts > 1:
        _split_attention(low, node, q, y)
        return
    dtype = low.dtype(node.operands["kv"])
    low.lower(node, "flash_attn_batched", q=q, y=y, dtype=dtype)


def part_slots(positions: int, parts: int) -> int:
    """Most parts into which a context of ``positions`` positions is divided.

    There are enough for its spans, and for single tiles if the context is short or ``parts``
    workers would be idle. A span of 16 tiles is the smallest part whose results are small compared
    with its KV pages."""
    tiles, spans = -(-positions // KV_TILE), -(-positions // KV_SPAN)
    return min(tiles, max(KV_SPAN // KV_TILE, spans, parts))


def _split_attention(low: Lowering, node: Node, q: Tensor, y: Tensor) -> None:
    """Compute parts of the context in parallel and then merge them, so that few tokens occupy all
    workers."""
    dims = low.dims(node)
    heads, head_dim = dims["heads"], dims["head_dim"]
    positions = low.tensor(node.operands["page_table"]).columns * PAGE_TOKENS
    dtype = low.dtype(node.operands["kv"])
    most_parts = part_slots(positions, low.parts)
    part = PART_HEADER + -(-head_dim // 16) * 16
    rows = low.count(node).maximum
    parts = low.new(f"{node.name}.parts", rows, heads * most_parts * part)
    low.lower(node, "flash_attn_part", q=q, parts=parts, most_parts=most_parts, dtype=dtype)
    low.lower(node, "flash_attn", y=y, parts=parts, most_parts=most_parts, private="y")
