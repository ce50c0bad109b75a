"""The table of device ops, shared by kernels, packets and lowering.

An op's number is its index in OPS. The layout of a packet, the accessors by which kernels read it
(``accessors``), launch grids, and the fields that ``Lowering.add`` accepts are derived from it."""

from __future__ import annotations

from collections.abc import Mapping

from accel.packets.declarations import elementwise, op
from accel.packets.device_op import DeviceOp, pieces
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
    """Work-groups for all heads; each takes as many heads of one KV head as it has room for."""
    together = min(GROUP_QUERIES, GROUP_CHANNELS // head_dim)
    return kv_heads * pieces(heads // kv_heads, together)


def _product_units(
    *, tokens: int, rows: int, row_pairs: int, max_chunks: int, dtype: int, **_: int
) -> int:
    if dtype in FLOATS:
        return tokens * rows
    return pieces(rows, TILE_ROWS) * (max_chunks if row_pairs else pieces(tokens, SLOTS))


def _quantized_groups(tokens: int, columns: int, **_: int) -> int:
    return pieces(tokens * pieces(columns, SEGMENT), QUANTIZED_SEGMENTS)


_QUERIES = "q, uchar kv, int page_table, int query"
_EVENTS = "int token, int output_rows, int query, uint step, int *ring"
_PARTS = "rows vocab parts top"

OPS = (
    op("embed", "int query, matrix table, rows *y", "tokens hidden", items="tokens hidden"),
    op("select_rows", "x, int output_rows, rows *y", "rows hidden", items="rows hidden"),
    op(
        "rms_norm", "rows x, weight?, rows *y", "tokens groups width", "eps", groups="tokens groups"
    ),
    op(
        "quantize_activation",
        "rows x, rows short *m, rows *scale, rows uint *sums",
        "tokens columns",
        groups=_quantized_groups,
    ),
    op(
        "matmul",
        "void x, scale?, uint sums?, matrix weight, columns *y, int ids?, CHUNK chunks?, "
        "int order?, bias?, columns residual?",
        "tokens rows columns row_pairs used max_chunks",
        groups=_product_units,
    ),
    op(
        "rope",
        "rows x, rope_table, int query, rows *y",
        "tokens heads head_dim neox rotary_pairs",
        items=lambda tokens, heads, rotary_pairs, **_: tokens * heads * pieces(rotary_pairs, 16),
    ),
    op(
        "kv_write_batched",
        "k, v, int query, int page_table, uchar *kv",
        "tokens width page_tokens head_dim",
        items="2 tokens width",
    ),
    op(
        "flash_attn_part",
        f"{_QUERIES}, *parts",
        "tokens heads kv_heads head_dim window max_parts",
        "scale soft_cap",
        groups=lambda tokens, max_parts, **s: tokens * max_parts * _head_blocks(**s),
        source="flash_attn",
    ),
    op(
        "flash_attn",
        "parts, int query, rows *y, sinks?",
        "tokens heads head_dim window max_parts",
        items="tokens heads head_dim",
    ),
    op(
        "flash_attn_batched",
        f"{_QUERIES}, *y, sinks?",
        "tokens heads kv_heads head_dim window",
        "scale soft_cap",
        groups=lambda tokens, **s: tokens * _head_blocks(**s),
    ),
    elementwise("add", "rows a, rows b"),
    elementwise("scale", "rows x", reals="factor"),
    elementwise("bias_add", "rows x, rows bias"),
    elementwise("soft_cap", "rows x", reals="cap"),
    elementwise("swiglu", "rows gate, rows up", "activation"),
    op(
        "sample_part",
        "logits, SAMPLING sampling, int recent, uint allowed?, LOGIT_BIAS bias?, *values, "
        "BEST *best",
        "rows vocab parts recent_tokens",
        groups="rows parts",
        source="sample",
    ),
    op(
        "sample",
        "rows *values, SAMPLING sampling, BEST best, rows int *ids, rows uint *weights, "
        "rows int *token",
        "rows vocab parts",
        groups="rows",
    ),
    op(
        "log_probabilities_part",
        "logits, BEST *best",
        _PARTS,
        groups="rows parts",
        source="log_probabilities",
    ),
    op(
        "log_probabilities_sum",
        "logits, BEST best, *spans",
        _PARTS,
        groups=lambda rows, vocab, **_: rows * pieces(vocab, SUM_SPANS * SPAN),
        source="log_probabilities",
    ),
    op(
        "log_probabilities",
        "logits, BEST best, spans, rows int token, rows *chosen, rows int *top_ids, rows *top_logs",
        _PARTS,
        groups="rows",
    ),
    op("stream_out", _EVENTS, "rows ring_events", items="rows"),
    op(
        "load_request_state",
        "rows int query, int slot_table, int *recent, rows int *resolved",
        "tokens recent_tokens",
        items="tokens",
    ),
    op(
        "store_request_state",
        "int token, int output_rows, int query, int *slot_table",
        "rows",
        items="rows",
    ),
    op("copy_rows", "uint source, int pairs, uint *target", "rows width", items="rows width"),
    op("verify_k", _EVENTS, "rows ring_events draft_tokens", items="rows"),
    elementwise("scale_columns", "rows x, rows factors", "factor_count"),
    op(
        "ssm_conv1d",
        "columns x, weight, int query, bias?, columns input_gate?, columns output_gate?, *state, "
        "columns *y",
        "tokens channels history states",
        items="channels",
    ),
    op(
        "ssm_delta_inputs",
        "rows x, rows alpha, rows beta, decay, dt_bias, rows *qk, rows *gates",
        "tokens key_heads value_heads state_size",
        "eps query_scale",
        groups="2 tokens key_heads",
    ),
    op(
        "ssm_delta_net",
        "x, qk, gates, int query, *state, *y",
        "tokens key_heads value_heads state_size grouped states",
        groups=lambda value_heads, state_size, **_: value_heads * pieces(state_size, STATE_ROWS),
    ),
    op(
        "ssm_gated_norm",
        "rows x, rows gate, weight, rows *y",
        "tokens heads width",
        "eps",
        groups="tokens heads",
    ),
    op(
        "ssm_scan_gates",
        "rows dt, decay, dt_bias, rows *gates",
        "tokens heads",
        items="tokens heads",
        source="ssm_delta_net",
    ),
    op(
        "ssm_scan",
        "x, gates, skip, int query, *state, *y",
        "tokens heads groups head_dim state_size states",
        groups=lambda heads, head_dim, **_: heads * pieces(head_dim, STATE_ROWS),
        source="ssm_delta_net",
    ),
    op(
        "expert_topk",
        "rows logits, rows *p, rows int *ids, rows *weights",
        "tokens experts used renormalize",
        groups="tokens",
    ),
    op(
        "expert_group",
        "int ids, int *starts, CHUNK *chunks, int *order",
        "tokens used experts",
        groups="1",
    ),
    op(
        "expert_sum",
        "columns products, int ids, weights, expert_scale?, columns residual?, columns *y",
        "tokens width used",
    ),
    op("gated_add", "columns residual, gate?, columns x, columns *y", "tokens width"),
    op(
        "row_digest",
        "logits, int digested, uint *digest",
        "rows vocab",
        groups=lambda rows, vocab, **_: rows * pieces(vocab, DIGEST_SPANS * SPAN),
    ),
    op("expert_bias", "columns x, int ids, bias, columns *y", "tokens width used"),
    op("rotate_heads", "rows x, rows *y", "tokens heads head_dim back", groups="tokens heads"),
    op(
        "expert_choice",
        "rows logits, bias, rows *s, rows int *ids, rows *weights",
        "tokens experts used weighting groups groups_used",
        groups="tokens",
        source="expert_topk",
    ),
    op("map_tokens", "int token, int table, int *mapped", "rows", items="rows"),
    elementwise("xielu", "rows x, parameters"),
)
"""Every op; ``packet.op`` is an index of this tuple."""

TABLE: Mapping[str, DeviceOp] = {each.name: each for each in OPS}
NUMBERS: Mapping[str, int] = {each.name: number for number, each in enumerate(OPS)}
