"""Lowers opcodes to device ops."""

from __future__ import annotations

import math
from collections.abc import Mapping

from accel.packets.lowering import Lowering, Rule, cheap, named
from accel.packets.rules_experts import EXPERT_RULES
from accel.packets.shape_buckets import SPLIT_TOKENS
from accel.packets.step import Step, Tensor
from contract.arithmetic import KV_SPAN, KV_TILE, PAGE_TOKENS, SPAN
from contract.dtypes import ROTATED_KV
from contract.errors import UnsupportedOp
from contract.ir.decode_form import decode_form
from contract.ir.expand import EXPANSIONS, expand
from contract.ir.nodes import Graph, Node
from contract.ir.prune_rows import prune_rows
from contract.opcodes import Opcode
from contract.ops import TABLE
from contract.shape_key import ShapeKey

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
    max_parts = part_slots(positions, low.parts)
    part = PART_HEADER + -(-head_dim // 16) * 16
    rows = low.count(node).maximum
    parts = low.new(f"{node.name}.parts", rows, heads * max_parts * part)
    low.lower(node, "flash_attn_part", q=q, parts=parts, max_parts=max_parts, dtype=dtype)
    low.lower(node, "flash_attn", y=y, parts=parts, max_parts=max_parts, private="y")


def _scale_columns(low: Lowering, node: Node) -> None:
    low.lower(node, "scale_columns", factor_count=low.dims(node)["factors"], private="y")


def _delta_net(low: Lowering, node: Node) -> None:
    """Two ops: one prepares each token and is divided by tokens, the recurrence is divided by rows
    of the state. How many decays a head has they know by the columns of gates."""
    dims, tokens = low.dims(node), low.count(node).maximum
    size = dims["state_size"]
    qk = low.new(f"{node.name}.qk", tokens, 2 * dims["key_heads"] * size)
    gates = low.new(f"{node.name}.gates", tokens, dims["rates"] + dims["value_heads"])
    scale = 1.0 / math.sqrt(size)
    low.lower(node, "ssm_delta_inputs", qk=qk, gates=gates, query_scale=scale, private="qk")
    low.lower(node, "ssm_delta_net", qk=qk, gates=gates)


def _scan(low: Lowering, node: Node) -> None:
    """Two ops: one prepares each token and is divided by tokens, the recurrence is divided by rows
    of the state."""
    heads = low.dims(node)["heads"]
    gates = low.new(f"{node.name}.gates", low.count(node).maximum, 2 * heads)
    low.lower(node, "ssm_scan_gates", gates=gates, private="gates")
    low.lower(node, "ssm_scan", gates=gates)


RECURRENT_RULES: Mapping[Opcode, Rule] = {
    Opcode.SCALE_COLUMNS: _scale_columns,
    Opcode.SSM_CONV1D: named("ssm_conv1d"),
    Opcode.SSM_DELTA_NET: _delta_net,
    Opcode.SSM_GATED_NORM: named("ssm_gated_norm", "y"),
    Opcode.SSM_SCAN: _scan,
}
"""The lowering of each opcode."""


SLOT_WORDS = 8
"""32-bit words of a SLOT record."""
BEST_WORDS = 3
"""32-bit words of the arg-max record of ``accel/kernels/argmax.k``."""


ROW_PARTS = 64
"""Parts that reductions of a row are divided into on an accelerator."""


def lower_graph(
    graph: Graph, bucket: ShapeKey, parts: int, tier: str, split_tokens: int = SPLIT_TOKENS
) -> Step:
    """The ops of ``graph`` for steps of ``bucket`` on ``tier``.

    Reductions of a row are divided into ``parts``; so is the context of attention of at most
    ``split_tokens`` tokens. Output rows are pruned early, attention of one token gets its decode
    form, and fused opcodes without a rule are expanded first. Raises UnsupportedOp for an opcode
    that is not in OPCODES and for sizes that no op supports."""
    graph = expand(decode_form(prune_rows(graph, bucket), bucket), frozenset(RULES))
    missing = sorted(opcode.name for opcode in graph.opcodes if opcode not in RULES)
    if missing:
        raise UnsupportedOp(tier, missing)
    lowering = Lowering(graph, bucket, parts, tier, split_tokens)
    for node in graph.nodes:
        RULES[node.opcode](lowering, node)
    return lowering.step


def _embed(low: Lowering, node: Node) -> None:
    low.lower(node, "embed", dtype=low.dtype(node.operands["table"]), private="y")


def _elementwise(low: Lowering, node: Node) -> None:
    count = low.count(node, "rows" if node.opcode is Opcode.SOFT_CAP else "tokens")
    low.lower(node, TABLE[node.opcode].name, tokens=count, private="y")


def _matmul(low: Lowering, node: Node) -> None:
    x, y = (low.tensor(node.operands[name]) for name in ("x", "y"))
    low.product(x, node.operands["weight"], y, low.count(node))


def _kv_write(low: Lowering, node: Node) -> None:
    low.store_kv(low.tensor(node.operands["k"]), low.tensor(node.operands["v"]), node)


def _sample(low: Lowering, node: Node) -> None:
    rows, vocab, parts = low.count(node, "rows").maximum, low.dims(node)["vocab"], low.parts
    best = low.new(f"{node.name}.parts", rows, parts * BEST_WORDS)
    values, ids, weights = (
        low.new(f"{node.name}.{name}", rows, vocab) for name in ("values", "ids", "weights")
    )
    low.lower(node, "sample_part", values=values, best=best, parts=parts)
    low.lower(node, "sample", values=values, best=best, parts=parts, ids=ids, weights=weights)


def _log_probabilities(low: Lowering, node: Node) -> None:
    rows, dims = low.count(node, "rows").maximum, low.dims(node)
    best = low.new(f"{node.name}.parts", rows, low.parts * dims["top"] * BEST_WORDS)
    spans = low.new(f"{node.name}.spans", rows, -(-dims["vocab"] // SPAN))
    low.lower(node, "log_probabilities_part", best=best, parts=low.parts)
    for name in ("log_probabilities_sum", "log_probabilities"):
        low.lower(node, name, best=best, parts=low.parts, spans=spans)


def _store_request_state(low: Lowering, node: Node) -> None:
    rows = low.count(node, "rows")
    low.add("store_request_state", low.tensors(node), rows=rows, private=cheap(rows, SLOT_WORDS))


RULES: Mapping[Opcode, Rule] = {
    Opcode.EMBED: _embed,
    Opcode.SELECT_ROWS: named("select_rows", "y"),
    Opcode.RMS_NORM: named("rms_norm", "x"),
    Opcode.ROPE: named("rope", "x"),
    Opcode.KV_WRITE_BATCHED: _kv_write,
    Opcode.FLASH_ATTN: lower_attention,
    Opcode.FLASH_ATTN_BATCHED: lower_attention,
    Opcode.MATMUL: _matmul,
    Opcode.ADD: _elementwise,
    Opcode.SCALE: _elementwise,
    Opcode.BIAS_ADD: _elementwise,
    Opcode.SOFT_CAP: _elementwise,
    Opcode.XIELU: _elementwise,
    Opcode.SWIGLU: _elementwise,
    Opcode.SAMPLE: _sample,
    Opcode.LOG_PROBABILITIES: _log_probabilities,
    Opcode.ROW_DIGEST: named("row_digest"),
    Opcode.MAP_TOKENS: named("map_tokens"),
    Opcode.STREAM_OUT: named("stream_out"),
    Opcode.LOAD_REQUEST_STATE: named("load_request_state", "resolved"),
    Opcode.STORE_REQUEST_STATE: _store_request_state,
    Opcode.VERIFY_K: named("verify_k"),
    Opcode.COPY_ROWS: named("copy_rows"),
    Opcode.BARRIER: lambda low, node: None,
    **RECURRENT_RULES,
    **EXPERT_RULES,
}
"""The lowering of each opcode. A BARRIER orders in-place writes; the schedule finds it itself."""
OPCODES = frozenset(RULES) | frozenset(EXPANSIONS)
"""The opcodes a graph may have: those with a rule, and those that are expanded first."""
