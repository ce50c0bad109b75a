"""Lowers attention to blocks of queries or, with few tokens, to parts of the context."""

from __future__ import annotations

from collections.abc import Mapping

from accel.packets.lowering import Field, Lowering, cheap
from accel.packets.step import Tensor
from contract.arithmetic import KV_SPAN, KV_TILE, PAGE_TOKENS
from contract.dtypes import ROTATED_KV
from contract.ir.nodes import Node

PART_HEADER = 2
"""Floats before the values of one part, see ``accel/kernels/flash_attn_part.k``."""
CARD_PARTS, CODED_PARTS = 64, 128
"""Fewest parts on a graphics card, and parts of a context whose keys and values are coded: decoding
those takes longer than a part costs."""


def lower_attention(low: Lowering, node: Node) -> None:
    """Lowers FLASH_ATTN and FLASH_ATTN_BATCHED.

    Over pages of rotated rows queries are rotated first, and results are rotated back (R13).
    """
    fields, y = _fields(low, node), low.tensor(node.operands["y"])
    if low.dtype(node.operands["kv"]) not in ROTATED_KV:
        _attend(low, node, fields, y)
        return
    rotated = low.new(f"{node.name}.rotated_y", low.count(node).most, y.columns)
    fields["q"] = low.rotated(low.tensor(node.operands["q"]), node, "rotated_q")
    _attend(low, node, fields, rotated)
    low.rotate_heads(rotated, node, y, back=True)


def _attend(low: Lowering, node: Node, fields: dict[str, Field], y: Tensor) -> None:
    tokens = low.count(node)
    if 0 < tokens.most <= low.split_tokens and low.parts > 1:
        _split_attention(low, node, fields, y)
        return
    fields |= _sinks(low, node)
    dtype = low.dtype(node.operands["kv"])
    low.add("flash_attn_batched", fields, y=y, tokens=tokens, dtype=dtype)


def part_slots(positions: int, parts: int) -> int:
    """Most parts into which the context of ``positions`` positions is divided.

    Enough for its spans, and for single tiles where the context is short or ``parts`` workers have
    nothing else to do. A span of 16 tiles is the smallest part whose results are small compared
    with its KV pages.
    """
    tiles, spans = -(-positions // KV_TILE), -(-positions // KV_SPAN)
    return min(tiles, max(KV_SPAN // KV_TILE, spans, parts))


def _split_attention(low: Lowering, node: Node, fields: Mapping[str, Field], y: Tensor) -> None:
    """Computes parts in parallel and then merges them, so that few tokens occupy all workers."""
    tokens, dims = low.count(node), low.dims(node)
    heads, head_dim = dims["heads"], dims["head_dim"]
    positions = low.tensor(node.operands["page_table"]).columns * PAGE_TOKENS
    dtype = low.dtype(node.operands["kv"])
    coded_on_card = dtype in ROTATED_KV and low.parts >= CARD_PARTS
    most_parts = part_slots(positions, CODED_PARTS if coded_on_card else low.parts)
    part = PART_HEADER + -(-head_dim // 16) * 16
    parts = low.new(f"{node.name}.parts", tokens.most, heads * most_parts * part)
    low.add(
        "flash_attn_part", fields, parts=parts, tokens=tokens, most_parts=most_parts, dtype=dtype
    )
    low.add(
        "flash_attn",
        _sinks(low, node),
        parts=parts,
        query=low.tensor(node.operands["query"]),
        y=y,
        tokens=tokens,
        heads=heads,
        head_dim=head_dim,
        window=dims["window"],
        most_parts=most_parts,
        private=cheap(tokens, y.columns),
    )


def _fields(low: Lowering, node: Node) -> dict[str, Field]:
    """The operands and sizes that all ops over KV pages share."""
    dims = low.dims(node)
    return {
        **{name: low.tensor(node.operands[name]) for name in ("q", "page_table", "query")},
        "kv": low.pages(node.operands["kv"]),
        **{name: dims[name] for name in ("heads", "kv_heads", "head_dim", "window")},
        **{name: node.params[name] for name in ("scale", "soft_cap")},
    }


def _sinks(low: Lowering, node: Node) -> dict[str, Field]:
    return {"sinks": low.tensor(node.operands["sinks"])} if "sinks" in node.operands else {}
