"""The table of fused ops. Each replaces several ops of a step, or one op in certain steps.

Only ``accel/kernels`` has kernels for them; ``fuse`` and the passes after it put them into a
step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from accel.packets.declarations import op
from accel.packets.device_op import DeviceOp, Units, pieces
from accel.packets.layouts import TILE_ROWS
from accel.packets.ops import TABLE
from contract.arithmetic import SEGMENT

GROUP_ROWS, GROUP_TOKENS = 128, 64
"""Rows and tokens of a product that a group of ``accel/kernels/matmul_tiles.k`` computes."""
WIDE_TILE = 128
"""Rows and tokens that a group of ``accel/kernels/matmul_wide.k`` computes."""
FEW_TOKENS = 16
"""Tokens that a group of ``accel/kernels/matmul_few.k`` computes."""
NARROW_TOKENS = 64
"""Tokens that a group of ``accel/kernels/matmul_narrow.k`` computes, with WIDE_TILE rows."""
NORMED_SEGMENTS = 8
"""Segments a group of ``accel/kernels/rms_norm_quantize.k`` quantizes at a time."""
ROW_QUERIES = 4
"""Most queries of a group of ``accel/kernels/row_attention.k``."""


def _product(name: str, units: Units) -> DeviceOp:
    """A product of quantized activations by one matrix."""
    read = "x, scale, sums, matrix float weight, bias?, residual?, *y"
    return op(name, read, "tokens rows columns", groups=units)


def _tiles(group_rows: int, group_tokens: int) -> Units:
    """A work-group for each tile of ``group_rows`` rows and ``group_tokens`` tokens."""
    return lambda tokens, rows, **_: pieces(rows, group_rows) * pieces(tokens, group_tokens)


def _row_groups(rows: int, **_: int) -> int:
    return pieces(rows, TILE_ROWS)


def _expanding_groups(columns: int, rows: int = 0, tokens: int = 0, **_: int) -> int:
    return pieces(rows or tokens, TILE_ROWS) * pieces(columns, SEGMENT)


def _segments(tokens: int, columns: int, **_: int) -> int:
    return tokens * pieces(columns, SEGMENT)


def _normed_segments(tokens: int, width: int, **_: int) -> int:
    return tokens * pieces(pieces(width, SEGMENT), NORMED_SEGMENTS)


def _query_groups(tokens: int, heads: int, kv_heads: int, max_parts: int, **_: int) -> int:
    return tokens * max_parts * kv_heads * pieces(heads // kv_heads, ROW_QUERIES)


_HEADS = "q, k, v, q_weight?, k_weight?, rope_table, query, page_table"
_ROWS = (
    _product("matmul_row", _row_groups),
    op(
        "norm_row",
        "x, factors?, matrix float weight, bias?, residual?, *y",
        "tokens rows columns",
        "eps",
        groups=_row_groups,
    ),
    op(
        "gate_row",
        "x, factors?, matrix float gate, matrix float up, *y",
        "tokens rows columns activation",
        "eps",
        groups=_row_groups,
    ),
    _product("matmul_tiles", _tiles(GROUP_ROWS, GROUP_TOKENS)),
    _product("matmul_wide", _tiles(WIDE_TILE, WIDE_TILE)),
    _product("matmul_few", _tiles(TILE_ROWS, FEW_TOKENS)),
    _product("matmul_narrow", _tiles(WIDE_TILE, NARROW_TOKENS)),
    replace(TABLE["flash_attn_batched"], name="flash_attn_tiles", source="flash_attn_tiles"),
    op("expand_weight", "matrix float weight, *planes", "rows columns", groups=_expanding_groups),
    op("expand_tokens", "m, scale, sums, *planes", "tokens columns", groups=_expanding_groups),
    op(
        "matmul_planes",
        "x, weight, bias?, residual?, *y",
        "tokens rows columns",
        groups=_tiles(GROUP_ROWS, GROUP_ROWS),
    ),
    op(
        "rms_norm_quantize",
        "x, factors?, *y?, *m, *scale, *sums",
        "tokens width",
        "eps",
        groups=_normed_segments,
    ),
    op(
        "swiglu_quantize",
        "gate, up, *m, *scale, *sums",
        "tokens columns activation",
        groups=_segments,
    ),
    op(
        "flash_attn_quantize",
        "parts, query, sinks?, *m, *scale, *sums",
        "tokens heads head_dim window max_parts",
        groups=lambda tokens, heads, head_dim, **_: _segments(tokens, heads * head_dim),
    ),
    op(
        "head_rows",
        f"{_HEADS}, *y, *kv",
        "tokens heads kv_heads head_dim neox rotary_pairs",
        "q_eps k_eps",
        groups=lambda tokens, heads, kv_heads, **_: tokens * (heads + 2 * kv_heads),
    ),
    *(
        op(
            name,
            f"{_HEADS}, *kv, *parts",
            "tokens heads kv_heads head_dim neox max_parts",
            "scale eps",
            groups=_query_groups,
        )
        for name in ("flash_attn_row", "flash_attn_row_wide")
    ),
)
FUSED: Mapping[str, DeviceOp] = {one.name: one for one in _ROWS}
"""The fused ops by name; the name is also that of the kernel file."""
