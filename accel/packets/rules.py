"""Lowers opcodes to device ops."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from accel.packets.lowering import Lowering, Rule, cheap, named
from accel.packets.rules_attention import lower_attention
from accel.packets.rules_experts import EXPERT_RULES
from accel.packets.rules_recurrent import RECURRENT_RULES
from accel.packets.shape_buckets import SPLIT_TOKENS
from accel.packets.step import Step
from contract.arithmetic import SPAN
from contract.errors import UnsupportedOp
from contract.ir.decode_form import decode_form
from contract.ir.expand import EXPANSIONS, expand
from contract.ir.nodes import Graph, Node
from contract.ir.prune_rows import prune_rows
from contract.opcodes import Opcode
from contract.ops import TABLE
from contract.shape_key import ShapeKey

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


RULES: Mapping[Opcode, Rule] = MappingProxyType(
    {
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
)
"""The lowering of each opcode. A BARRIER orders in-place writes; the schedule finds it itself."""
OPCODES = frozenset(RULES) | frozenset(EXPANSIONS)
"""The opcodes a graph may have: those with a rule, and those that are expanded first."""
