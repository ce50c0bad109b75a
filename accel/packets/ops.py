"""The table of device ops, which kernels, packets and lowering share.

An op's number is its index in OPS. The layout of a packet, the accessors by which kernels read it
(``accessors``), launch grids, and the fields that ``Lowering.add`` accepts are all derived from
this table.
"""

from __future__ import annotations

from types import MappingProxyType

from accel.packets.device_op import (
    ANY,
    COLUMNS,
    ROWS,
    DeviceOp,
    DeviceOperand,
    Split,
    Units,
    pieces,
)
from accel.packets.layouts import TILE_ROWS
from contract.arithmetic import SEGMENT, SPAN
from contract.dtypes import BF16, F16, F32

SLOTS = 8
"""Tokens that a group of ``accel/kernels/matmul.k`` computes at a time."""
SUM_SPANS = 2
"""Spans of a row a group of ``accel/kernels/log_probabilities_sum.k`` sums at a time."""
DIGEST_SPANS = 4
"""Spans of a row that a worker digests at a time."""
QUANTIZED_SEGMENTS = 4
"""Segments that a group of ``accel/kernels/quantizer.k`` computes at a time."""
STATE_ROWS = 16
"""Rows of a head's state that a group of ``ssm_delta_net.k`` or ``ssm_scan.k`` computes."""
GROUP_QUERIES = 8
GROUP_CHANNELS = 1024
"""Queries of a group of ``accel/kernels/attention_group.k``, and their channels in all."""
FLOATS = (F32.ggml_id, F16.ggml_id, BF16.ggml_id)


def _operand(declared: str, split: Split, written: bool = False) -> DeviceOperand:
    """Parses ``name`` or ``element name``; a final ``?`` marks an optional operand."""
    *element, name = declared.split()
    optional = name.endswith("?")
    kind = element[0] if element else "float"
    return DeviceOperand(name.rstrip("?"), kind, split, written, optional)


def _rows(*names: str) -> tuple[DeviceOperand, ...]:
    return tuple(_operand(name, ROWS) for name in names)


def _columns(*names: str) -> tuple[DeviceOperand, ...]:
    return tuple(_operand(name, COLUMNS) for name in names)


def _any(*names: str) -> tuple[DeviceOperand, ...]:
    return tuple(_operand(name, ANY) for name in names)


def _to_rows(*names: str) -> tuple[DeviceOperand, ...]:
    return tuple(_operand(name, ROWS, written=True) for name in names)


def _to_columns(*names: str) -> tuple[DeviceOperand, ...]:
    return tuple(_operand(name, COLUMNS, written=True) for name in names)


def _to_any(*names: str) -> tuple[DeviceOperand, ...]:
    return tuple(_operand(name, ANY, written=True) for name in names)


def _matrix(name: str) -> tuple[DeviceOperand, ...]:
    return (DeviceOperand(name, "uchar", ANY, matrix=True),)


def _op(
    name: str,
    *operands: tuple[DeviceOperand, ...],
    sizes: str,
    reals: str = "",
    groups: Units | None = None,
    items: Units | None = None,
    by_columns: bool = False,
    source: str = "",
) -> DeviceOp:
    """An op of the table; without units it has one for each count and 16 elements of its second
    size."""
    names = tuple(sizes.split())
    units = groups or items or (lambda **s: s[names[0]] * pieces(s[names[1]], 16))
    flat = tuple(operand for group in operands for operand in group)
    by_groups = groups is not None
    return DeviceOp(
        name, flat, names, tuple(reals.split()), units, by_groups, by_columns, source or name
    )


def _elementwise(name: str, operands: str, sizes: str = "", reals: str = "") -> DeviceOp:
    sizes = f"tokens width {sizes}"
    parts = _rows(*operands.split()), _to_rows("y")
    return _op(name, *parts, sizes=sizes, reals=reals, by_columns=True)


def _head_blocks(heads: int, kv_heads: int, head_dim: int, **_: int) -> int:
    """Work-groups for the heads of all KV heads, each with as many heads as a group can take."""
    together = min(GROUP_QUERIES, GROUP_CHANNELS // head_dim)
    return kv_heads * pieces(heads // kv_heads, together)


def _product_units(
    *, tokens: int, rows: int, places: int, most_chunks: int, dtype: int, **_: int
) -> int:
    if dtype in FLOATS:
        return tokens * rows
    return pieces(rows, TILE_ROWS) * (most_chunks if places else pieces(tokens, SLOTS))


_QUERIES = _any("q", "uchar kv", "int page_table", "int query")

OPS = (
    _op(
        "embed",
        _any("int query"),
        _matrix("table"),
        _to_rows("y"),
        sizes="tokens hidden",
        items=lambda tokens, hidden, **_: tokens * hidden,
    ),
    _op(
        "select_rows",
        _any("x", "int output_rows"),
        _to_rows("y"),
        sizes="rows hidden",
        items=lambda rows, hidden, **_: rows * hidden,
    ),
    _op(
        "rms_norm",
        _rows("x"),
        _any("weight?"),
        _to_rows("y"),
        sizes="tokens groups width",
        reals="eps",
        groups=lambda tokens, groups, **_: tokens * groups,
    ),
    _op(
        "quantize_activation",
        _rows("x"),
        _to_rows("short m", "scale", "uint sums"),
        sizes="tokens columns",
        groups=lambda tokens, columns, **_: pieces(
            tokens * pieces(columns, SEGMENT), QUANTIZED_SEGMENTS
        ),
    ),
    _op(
        "matmul",
        _any("void x", "scale?", "uint sums?"),
        _matrix("weight"),
        _to_columns("y"),
        _any("int ids?", "CHUNK chunks?", "int order?", "bias?"),
        _columns("residual?"),
        sizes="tokens rows columns places used most_chunks",
        groups=_product_units,
    ),
    _op(
        "rope",
        _rows("x"),
        _any("rope_table", "int query"),
        _to_rows("y"),
        sizes="tokens heads head_dim neox rotary_pairs",
        items=lambda tokens, heads, rotary_pairs, **_: tokens * heads * pieces(rotary_pairs, 16),
    ),
    _op(
        "kv_write_batched",
        _rows("k", "v"),
        _any("int query", "int page_table"),
        _to_any("uchar kv"),
        sizes="tokens width page_tokens head_dim",
        items=lambda tokens, width, **_: 2 * tokens * width,
    ),
    _op(
        "flash_attn_part",
        _QUERIES,
        _to_any("parts"),
        sizes="tokens heads kv_heads head_dim window most_parts",
        reals="scale soft_cap",
        groups=lambda tokens, most_parts, **s: tokens * most_parts * _head_blocks(**s),
        source="flash_attn",
    ),
    _op(
        "flash_attn",
        _any("parts", "int query"),
        _to_rows("y"),
        _any("sinks?"),
        sizes="tokens heads head_dim window most_parts",
        items=lambda tokens, heads, head_dim, **_: tokens * heads * head_dim,
    ),
    _op(
        "flash_attn_batched",
        _QUERIES,
        _to_any("y"),
        _any("sinks?"),
        sizes="tokens heads kv_heads head_dim window",
        reals="scale soft_cap",
        groups=lambda tokens, **s: tokens * _head_blocks(**s),
    ),
    _elementwise("add", "a b"),
    _elementwise("scale", "x", reals="factor"),
    _elementwise("bias_add", "x bias"),
    _elementwise("soft_cap", "x", reals="cap"),
    _elementwise("swiglu", "gate up", sizes="activation"),
    _op(
        "sample_part",
        _any("logits", "SAMPLING sampling", "int recent", "uint allowed?", "LOGIT_BIAS bias?"),
        _to_any("values", "BEST best"),
        sizes="rows vocab parts recent_tokens",
        groups=lambda rows, parts, **_: rows * parts,
        source="sample",
    ),
    _op(
        "sample",
        _to_rows("values"),
        _any("SAMPLING sampling", "BEST best"),
        _to_rows("int ids", "uint weights", "int token"),
        sizes="rows vocab parts",
        groups=lambda rows, **_: rows,
    ),
    _op(
        "log_probabilities_part",
        _any("logits"),
        _to_any("BEST best"),
        sizes="rows vocab parts top",
        groups=lambda rows, parts, **_: rows * parts,
        source="log_probabilities",
    ),
    _op(
        "log_probabilities_sum",
        _any("logits", "BEST best"),
        _to_any("spans"),
        sizes="rows vocab parts top",
        groups=lambda rows, vocab, **_: rows * pieces(vocab, SUM_SPANS * SPAN),
        source="log_probabilities",
    ),
    _op(
        "log_probabilities",
        _any("logits", "BEST best", "spans"),
        _rows("int token"),
        _to_rows("chosen", "int top_ids", "top_logs"),
        sizes="rows vocab parts top",
        groups=lambda rows, **_: rows,
    ),
    _op(
        "stream_out",
        _any("int token", "int output_rows", "int query", "uint step"),
        _to_any("int ring"),
        sizes="rows ring_events",
        items=lambda rows, **_: rows,
    ),
    _op(
        "load_request_state",
        _rows("int query"),
        _any("int slot_table"),
        _to_any("int recent"),
        _to_rows("int resolved"),
        sizes="tokens recent_tokens",
        items=lambda tokens, **_: tokens,
    ),
    _op(
        "store_request_state",
        _any("int token", "int output_rows", "int query"),
        _to_any("int slot_table"),
        sizes="rows",
        items=lambda rows, **_: rows,
    ),
    _op(
        "copy_rows",
        _any("uint source", "int pairs"),
        _to_any("uint target"),
        sizes="rows width",
        items=lambda rows, width, **_: rows * width,
    ),
    _op(
        "verify_k",
        _rows("int draft", "int target"),
        _to_rows("int accepted"),
        sizes="rows draft_tokens",
        items=lambda rows, **_: rows,
    ),
    _elementwise("scale_columns", "x factors", sizes="factor_count"),
    _op(
        "ssm_conv1d",
        _columns("x"),
        _any("weight", "int query"),
        _any("bias?"),
        _columns("input_gate?", "output_gate?"),
        _to_any("state"),
        _to_columns("y"),
        sizes="tokens channels history",
        items=lambda channels, **_: channels,
    ),
    _op(
        "ssm_delta_inputs",
        _rows("x", "alpha", "beta"),
        _any("decay", "dt_bias"),
        _to_rows("qk", "gates"),
        sizes="tokens key_heads value_heads state_size",
        reals="eps query_scale",
        groups=lambda tokens, key_heads, **_: 2 * tokens * key_heads,
    ),
    _op(
        "ssm_delta_net",
        _any("x", "qk", "gates", "int query"),
        _to_any("state", "y"),
        sizes="tokens key_heads value_heads state_size grouped",
        groups=lambda value_heads, state_size, **_: value_heads * pieces(state_size, STATE_ROWS),
    ),
    _op(
        "ssm_gated_norm",
        _rows("x", "gate"),
        _any("weight"),
        _to_rows("y"),
        sizes="tokens heads width",
        reals="eps",
        groups=lambda tokens, heads, **_: tokens * heads,
    ),
    _op(
        "ssm_scan_gates",
        _rows("dt"),
        _any("decay", "dt_bias"),
        _to_rows("gates"),
        sizes="tokens heads",
        items=lambda tokens, heads, **_: tokens * heads,
        source="ssm_delta_net",
    ),
    _op(
        "ssm_scan",
        _any("x", "gates", "skip", "int query"),
        _to_any("state", "y"),
        sizes="tokens heads groups head_dim state_size",
        groups=lambda heads, head_dim, **_: heads * pieces(head_dim, STATE_ROWS),
        source="ssm_delta_net",
    ),
    _op(
        "expert_topk",
        _rows("logits"),
        _to_rows("p", "int ids", "weights"),
        sizes="tokens experts used",
        groups=lambda tokens, **_: tokens,
    ),
    _op(
        "expert_group",
        _any("int ids"),
        _to_any("int starts", "CHUNK chunks", "int order"),
        sizes="tokens used experts",
        groups=lambda **_: 1,
    ),
    _op(
        "expert_sum",
        _columns("products"),
        _any("int ids", "weights", "expert_scale?"),
        _columns("residual?"),
        _to_columns("y"),
        sizes="tokens width used",
    ),
    _op(
        "gated_add",
        _columns("residual"),
        _any("gate?"),
        _columns("x"),
        _to_columns("y"),
        sizes="tokens width",
    ),
    _op(
        "row_digest",
        _any("logits", "int digested"),
        _to_any("uint digest"),
        sizes="rows vocab",
        groups=lambda rows, vocab, **_: rows * pieces(vocab, DIGEST_SPANS * SPAN),
    ),
    _op(
        "expert_bias",
        _columns("x"),
        _any("int ids", "bias"),
        _to_columns("y"),
        sizes="tokens width used",
    ),
    _op(
        "rotate_heads",
        _rows("x"),
        _to_rows("y"),
        sizes="tokens heads head_dim back",
        groups=lambda tokens, heads, **_: tokens * heads,
    ),
    _op(
        "expert_choice",
        _rows("logits"),
        _any("bias"),
        _to_rows("s", "int ids", "weights"),
        sizes="tokens experts used",
        groups=lambda tokens, **_: tokens,
        source="expert_topk",
    ),
)
"""Every op; ``packet.op`` is an index of this tuple."""

TABLE = MappingProxyType({op.name: op for op in OPS})
NUMBERS = MappingProxyType({op.name: number for number, op in enumerate(OPS)})
