"""The table of fused ops: each replaces several ops of a step, or one op in certain steps.

Only ``accel/kernels`` has kernels for them; ``fuse`` and the passes after it put them into a step.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from accel.packets.device_op import DeviceOp, DeviceOperand, Units, pieces
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


def _row(
    name: str,
    read: str,
    written: str,
    sizes: str,
    reals: str,
    units: Units,
    matrices: tuple[str, ...] = ("weight",),
) -> DeviceOp:
    operands = [
        DeviceOperand(o.rstrip("?"), optional=o.endswith("?"), matrix=o in matrices)
        for o in read.split()
    ]
    operands += [
        DeviceOperand(o.rstrip("?"), written=True, optional=o.endswith("?"))
        for o in written.split()
    ]
    return DeviceOp(
        name,
        tuple(operands),
        tuple(sizes.split()),
        tuple(reals.split()),
        units,
        by_groups=True,
        by_columns=False,
        source=name,
    )


def _expanding_groups(rows: int, columns: int) -> int:
    return pieces(rows, TILE_ROWS) * pieces(columns, SEGMENT)


FUSED = MappingProxyType(
    {
        op.name: op
        for op in (
            _row(
                "matmul_row",
                "x scale sums weight bias? residual?",
                "y",
                "tokens rows columns",
                "",
                lambda rows, **_: pieces(rows, TILE_ROWS),
            ),
            _row(
                "norm_row",
                "x factors? weight bias? residual?",
                "y",
                "tokens rows columns",
                "eps",
                lambda rows, **_: pieces(rows, TILE_ROWS),
            ),
            _row(
                "gate_row",
                "x factors? gate up",
                "y",
                "tokens rows columns activation",
                "eps",
                lambda rows, **_: pieces(rows, TILE_ROWS),
                ("gate", "up"),
            ),
            _row(
                "matmul_tiles",
                "x scale sums weight bias? residual?",
                "y",
                "tokens rows columns",
                "",
                lambda tokens, rows, **_: pieces(rows, GROUP_ROWS) * pieces(tokens, GROUP_TOKENS),
            ),
            _row(
                "matmul_wide",
                "x scale sums weight bias? residual?",
                "y",
                "tokens rows columns",
                "",
                lambda tokens, rows, **_: pieces(rows, WIDE_TILE) * pieces(tokens, WIDE_TILE),
            ),
            _row(
                "matmul_few",
                "x scale sums weight bias? residual?",
                "y",
                "tokens rows columns",
                "",
                lambda tokens, rows, **_: pieces(rows, TILE_ROWS) * pieces(tokens, FEW_TOKENS),
            ),
            _row(
                "matmul_narrow",
                "x scale sums weight bias? residual?",
                "y",
                "tokens rows columns",
                "",
                lambda tokens, rows, **_: pieces(rows, WIDE_TILE) * pieces(tokens, NARROW_TOKENS),
            ),
            replace(
                TABLE["flash_attn_batched"], name="flash_attn_tiles", source="flash_attn_tiles"
            ),
            _row(
                "expand_weight",
                "weight",
                "planes",
                "rows columns",
                "",
                lambda rows, columns, **_: _expanding_groups(rows, columns),
            ),
            _row(
                "expand_tokens",
                "m scale sums",
                "planes",
                "tokens columns",
                "",
                lambda tokens, columns, **_: _expanding_groups(tokens, columns),
            ),
            _row(
                "matmul_planes",
                "x weight bias? residual?",
                "y",
                "tokens rows columns",
                "",
                lambda tokens, rows, **_: pieces(rows, GROUP_ROWS) * pieces(tokens, GROUP_ROWS),
                (),
            ),
            _row(
                "rms_norm_quantize",
                "x factors?",
                "y? m scale sums",
                "tokens width",
                "eps",
                lambda tokens, width, **_: tokens * pieces(pieces(width, SEGMENT), NORMED_SEGMENTS),
            ),
            _row(
                "swiglu_quantize",
                "gate up",
                "m scale sums",
                "tokens columns activation",
                "",
                lambda tokens, columns, **_: tokens * pieces(columns, SEGMENT),
            ),
            _row(
                "flash_attn_quantize",
                "parts query sinks?",
                "m scale sums",
                "tokens heads head_dim window most_parts",
                "",
                lambda tokens, heads, head_dim, **_: tokens * pieces(heads * head_dim, SEGMENT),
            ),
            _row(
                "head_rows",
                "q k v q_weight? k_weight? rope_table query page_table",
                "y kv",
                "tokens heads kv_heads head_dim neox rotary_pairs",
                "q_eps k_eps",
                lambda tokens, heads, kv_heads, **_: tokens * (heads + 2 * kv_heads),
            ),
            *(
                _row(
                    name,
                    "q k v q_weight? k_weight? rope_table query page_table",
                    "kv parts",
                    "tokens heads kv_heads head_dim neox most_parts",
                    "scale eps",
                    lambda tokens, heads, kv_heads, most_parts, **_: (
                        tokens * most_parts * kv_heads * pieces(heads // kv_heads, ROW_QUERIES)
                    ),
                )
                for name in ("flash_attn_row", "flash_attn_row_wide")
            ),
        )
    }
)
"""The fused ops by name; the name is also that of the kernel file."""
