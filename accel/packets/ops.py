"""The table of device ops, which kernels, packets and lowering share.

An op's number is its index in OPS. The layout of a packet, the accessors by which kernels read it
(``accessors``), launch grids, and the fields that ``Lowering.add`` accepts are all derived from
this table.
"""

from __future__ import annotations

from types import MappingProxyType

from accel.packets.declarations import (
    columns,
    elementwise,
    matrix,
    op,
    rows,
    to_columns,
    to_rows,
    to_unsplit,
    unsplit,
)
from accel.packets.device_op import pieces
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


_QUERIES = unsplit("q", "uchar kv", "int page_table", "int query")

OPS = (
    op(
        "embed",
        unsplit("int query"),
        matrix("table"),
        to_rows("y"),
        sizes="tokens hidden",
        items=lambda tokens, hidden, **_: tokens * hidden,
    ),
    op(
        "select_rows",
        unsplit("x", "int output_rows"),
        to_rows("y"),
        sizes="rows hidden",
        items=lambda rows, hidden, **_: rows * hidden,
    ),
    op(
        "rms_norm",
        rows("x"),
        unsplit("weight?"),
        to_rows("y"),
        sizes="tokens groups width",
        reals="eps",
        groups=lambda tokens, groups, **_: tokens * groups,
    ),
    op(
        "quantize_activation",
        rows("x"),
        to_rows("short m", "scale", "uint sums"),
        sizes="tokens columns",
        groups=lambda tokens, columns, **_: pieces(
            tokens * pieces(columns, SEGMENT), QUANTIZED_SEGMENTS
        ),
    ),
    op(
        "matmul",
        unsplit("void x", "scale?", "uint sums?"),
        matrix("weight"),
        to_columns("y"),
        unsplit("int ids?", "CHUNK chunks?", "int order?", "bias?"),
        columns("residual?"),
        sizes="tokens rows columns places used most_chunks",
        groups=_product_units,
    ),
    op(
        "rope",
        rows("x"),
        unsplit("rope_table", "int query"),
        to_rows("y"),
        sizes="tokens heads head_dim neox rotary_pairs",
        items=lambda tokens, heads, rotary_pairs, **_: tokens * heads * pieces(rotary_pairs, 16),
    ),
    op(
        "kv_write_batched",
        rows("k", "v"),
        unsplit("int query", "int page_table"),
        to_unsplit("uchar kv"),
        sizes="tokens width page_tokens head_dim",
        items=lambda tokens, width, **_: 2 * tokens * width,
    ),
    op(
        "flash_attn_part",
        _QUERIES,
        to_unsplit("parts"),
        sizes="tokens heads kv_heads head_dim window most_parts",
        reals="scale soft_cap",
        groups=lambda tokens, most_parts, **s: tokens * most_parts * _head_blocks(**s),
        source="flash_attn",
    ),
    op(
        "flash_attn",
        unsplit("parts", "int query"),
        to_rows("y"),
        unsplit("sinks?"),
        sizes="tokens heads head_dim window most_parts",
        items=lambda tokens, heads, head_dim, **_: tokens * heads * head_dim,
    ),
    op(
        "flash_attn_batched",
        _QUERIES,
        to_unsplit("y"),
        unsplit("sinks?"),
        sizes="tokens heads kv_heads head_dim window",
        reals="scale soft_cap",
        groups=lambda tokens, **s: tokens * _head_blocks(**s),
    ),
    elementwise("add", "a b"),
    elementwise("scale", "x", reals="factor"),
    elementwise("bias_add", "x bias"),
    elementwise("soft_cap", "x", reals="cap"),
    elementwise("swiglu", "gate up", sizes="activation"),
    op(
        "sample_part",
        unsplit("logits", "SAMPLING sampling", "int recent", "uint allowed?", "LOGIT_BIAS bias?"),
        to_unsplit("values", "BEST best"),
        sizes="rows vocab parts recent_tokens",
        groups=lambda rows, parts, **_: rows * parts,
        source="sample",
    ),
    op(
        "sample",
        to_rows("values"),
        unsplit("SAMPLING sampling", "BEST best"),
        to_rows("int ids", "uint weights", "int token"),
        sizes="rows vocab parts",
        groups=lambda rows, **_: rows,
    ),
    op(
        "log_probabilities_part",
        unsplit("logits"),
        to_unsplit("BEST best"),
        sizes="rows vocab parts top",
        groups=lambda rows, parts, **_: rows * parts,
        source="log_probabilities",
    ),
    op(
        "log_probabilities_sum",
        unsplit("logits", "BEST best"),
        to_unsplit("spans"),
        sizes="rows vocab parts top",
        groups=lambda rows, vocab, **_: rows * pieces(vocab, SUM_SPANS * SPAN),
        source="log_probabilities",
    ),
    op(
        "log_probabilities",
        unsplit("logits", "BEST best", "spans"),
        rows("int token"),
        to_rows("chosen", "int top_ids", "top_logs"),
        sizes="rows vocab parts top",
        groups=lambda rows, **_: rows,
    ),
    op(
        "stream_out",
        unsplit("int token", "int output_rows", "int query", "uint step"),
        to_unsplit("int ring"),
        sizes="rows ring_events",
        items=lambda rows, **_: rows,
    ),
    op(
        "load_request_state",
        rows("int query"),
        unsplit("int slot_table"),
        to_unsplit("int recent"),
        to_rows("int resolved"),
        sizes="tokens recent_tokens",
        items=lambda tokens, **_: tokens,
    ),
    op(
        "store_request_state",
        unsplit("int token", "int output_rows", "int query"),
        to_unsplit("int slot_table"),
        sizes="rows",
        items=lambda rows, **_: rows,
    ),
    op(
        "copy_rows",
        unsplit("uint source", "int pairs"),
        to_unsplit("uint target"),
        sizes="rows width",
        items=lambda rows, width, **_: rows * width,
    ),
    op(
        "verify_k",
        unsplit("int token", "int output_rows", "int query", "uint step"),
        to_unsplit("int ring"),
        sizes="rows ring_events draft_tokens",
        items=lambda rows, **_: rows,
    ),
    elementwise("scale_columns", "x factors", sizes="factor_count"),
    op(
        "ssm_conv1d",
        columns("x"),
        unsplit("weight", "int query"),
        unsplit("bias?"),
        columns("input_gate?", "output_gate?"),
        to_unsplit("state"),
        to_columns("y"),
        sizes="tokens channels history states",
        items=lambda channels, **_: channels,
    ),
    op(
        "ssm_delta_inputs",
        rows("x", "alpha", "beta"),
        unsplit("decay", "dt_bias"),
        to_rows("qk", "gates"),
        sizes="tokens key_heads value_heads state_size",
        reals="eps query_scale",
        groups=lambda tokens, key_heads, **_: 2 * tokens * key_heads,
    ),
    op(
        "ssm_delta_net",
        unsplit("x", "qk", "gates", "int query"),
        to_unsplit("state", "y"),
        sizes="tokens key_heads value_heads state_size grouped states",
        groups=lambda value_heads, state_size, **_: value_heads * pieces(state_size, STATE_ROWS),
    ),
    op(
        "ssm_gated_norm",
        rows("x", "gate"),
        unsplit("weight"),
        to_rows("y"),
        sizes="tokens heads width",
        reals="eps",
        groups=lambda tokens, heads, **_: tokens * heads,
    ),
    op(
        "ssm_scan_gates",
        rows("dt"),
        unsplit("decay", "dt_bias"),
        to_rows("gates"),
        sizes="tokens heads",
        items=lambda tokens, heads, **_: tokens * heads,
        source="ssm_delta_net",
    ),
    op(
        "ssm_scan",
        unsplit("x", "gates", "skip", "int query"),
        to_unsplit("state", "y"),
        sizes="tokens heads groups head_dim state_size states",
        groups=lambda heads, head_dim, **_: heads * pieces(head_dim, STATE_ROWS),
        source="ssm_delta_net",
    ),
    op(
        "expert_topk",
        rows("logits"),
        to_rows("p", "int ids", "weights"),
        sizes="tokens experts used",
        groups=lambda tokens, **_: tokens,
    ),
    op(
        "expert_group",
        unsplit("int ids"),
        to_unsplit("int starts", "CHUNK chunks", "int order"),
        sizes="tokens used experts",
        groups=lambda **_: 1,
    ),
    op(
        "expert_sum",
        columns("products"),
        unsplit("int ids", "weights", "expert_scale?"),
        columns("residual?"),
        to_columns("y"),
        sizes="tokens width used",
    ),
    op(
        "gated_add",
        columns("residual"),
        unsplit("gate?"),
        columns("x"),
        to_columns("y"),
        sizes="tokens width",
    ),
    op(
        "row_digest",
        unsplit("logits", "int digested"),
        to_unsplit("uint digest"),
        sizes="rows vocab",
        groups=lambda rows, vocab, **_: rows * pieces(vocab, DIGEST_SPANS * SPAN),
    ),
    op(
        "expert_bias",
        columns("x"),
        unsplit("int ids", "bias"),
        to_columns("y"),
        sizes="tokens width used",
    ),
    op(
        "rotate_heads",
        rows("x"),
        to_rows("y"),
        sizes="tokens heads head_dim back",
        groups=lambda tokens, heads, **_: tokens * heads,
    ),
    op(
        "expert_choice",
        rows("logits"),
        unsplit("bias"),
        to_rows("s", "int ids", "weights"),
        sizes="tokens experts used",
        groups=lambda tokens, **_: tokens,
        source="expert_topk",
    ),
)
"""Every op; ``packet.op`` is an index of this tuple."""

TABLE = MappingProxyType({each.name: each for each in OPS})
NUMBERS = MappingProxyType({each.name: number for number, each in enumerate(OPS)})
