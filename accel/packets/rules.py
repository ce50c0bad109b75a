"""Lowers opcodes to device ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from accel.packets.lowering import Field, Lowering, cheap
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
    that is not in OPCODES and for sizes that no op supports.
    """
    graph = expand(decode_form(prune_rows(graph, bucket), bucket), frozenset(RULES))
    missing = sorted(opcode.name for opcode in graph.opcodes if opcode not in RULES)
    if missing:
        raise UnsupportedOp(tier, missing)
    lowering = Lowering(graph, bucket, parts, tier, split_tokens)
    for node in graph.nodes:
        RULES[node.opcode](lowering, node)
    return lowering.step


def _embed(low: Lowering, node: Node) -> None:
    table, y = node.operands["table"], low.tensor(node.operands["y"])
    tokens = low.count(node)
    low.add(
        "embed",
        query=low.tensor(node.operands["query"]),
        table=low.stored(table),
        y=y,
        tokens=tokens,
        hidden=y.columns,
        dtype=low.dtype(table),
        private=cheap(tokens, y.columns),
    )


def _select_rows(low: Lowering, node: Node) -> None:
    tensors, rows = low.tensors(node), low.count(node, "rows")
    hidden = tensors["y"].columns
    low.add("select_rows", tensors, rows=rows, hidden=hidden, private=cheap(rows, hidden))


def _elementwise(low: Lowering, node: Node) -> None:
    name = TABLE[node.opcode].name
    count = low.count(node, "rows" if node.opcode is Opcode.SOFT_CAP else "tokens")
    low.elementwise(name, count, low.tensors(node), **node.params)


def _rms_norm(low: Lowering, node: Node) -> None:
    tensors = low.tensors(node)
    low.norm(
        tensors["x"],
        tensors.get("weight"),
        tensors["y"],
        low.count(node),
        int(node.params["groups"]),
        node.params["eps"],
    )


def _matmul(low: Lowering, node: Node) -> None:
    x, y = (low.tensor(node.operands[name]) for name in ("x", "y"))
    low.product(x, node.operands["weight"], y, low.count(node))


def _rope(low: Lowering, node: Node) -> None:
    x, y = low.tensor(node.operands["x"]), low.tensor(node.operands["y"])
    low.rotate(x, node, low.dims(node)["heads"], y)


def _kv_write(low: Lowering, node: Node) -> None:
    low.store_kv(low.tensor(node.operands["k"]), low.tensor(node.operands["v"]), node)


def _sample(low: Lowering, node: Node) -> None:
    tensors, rows = low.tensors(node), low.count(node, "rows")
    vocab = tensors["logits"].columns
    shared: dict[str, Field] = {
        "sampling": tensors["sampling"],
        "values": low.new(f"{node.name}.values", rows.most, vocab),
        "best": low.new(f"{node.name}.parts", rows.most, low.parts * BEST_WORDS),
        "rows": rows,
        "vocab": vocab,
        "parts": low.parts,
    }
    low.add(
        "sample_part",
        shared,
        logits=tensors["logits"],
        recent=tensors["recent"],
        allowed=tensors.get("allowed"),
        bias=tensors.get("bias"),
        recent_tokens=tensors["recent"].columns,
    )
    low.add(
        "sample",
        shared,
        ids=low.new(f"{node.name}.ids", rows.most, vocab),
        weights=low.new(f"{node.name}.weights", rows.most, vocab),
        token=tensors["token"],
    )


def _log_probabilities(low: Lowering, node: Node) -> None:
    tensors, rows, top = low.tensors(node), low.count(node, "rows"), int(node.params["top"])
    logits = tensors["logits"]
    shared: dict[str, Field] = {
        "logits": logits,
        "best": low.new(f"{node.name}.parts", rows.most, low.parts * top * BEST_WORDS),
        "rows": rows,
        "vocab": logits.columns,
        "parts": low.parts,
        "top": top,
    }
    spans = low.new(f"{node.name}.spans", rows.most, -(-logits.columns // SPAN))
    low.add("log_probabilities_part", shared)
    low.add("log_probabilities_sum", shared, spans=spans)
    results = {name: tensors[name] for name in ("token", "chosen", "top_ids", "top_logs")}
    low.add("log_probabilities", shared, results, spans=spans)


def _row_digest(low: Lowering, node: Node) -> None:
    tensors = low.tensors(node)
    vocab = tensors["logits"].columns
    low.add("row_digest", tensors, rows=low.count(node, "rows"), vocab=vocab)


def _stream_out(low: Lowering, node: Node) -> None:
    rows, events = low.count(node, "rows"), low.dims(node)["ring_events"]
    low.add("stream_out", low.tensors(node), rows=rows, ring_events=events)


def _load_request_state(low: Lowering, node: Node) -> None:
    tensors, tokens = low.tensors(node), low.count(node)
    recent = tensors["recent"].columns
    private = cheap(tokens, tensors["resolved"].columns)
    low.add("load_request_state", tensors, tokens=tokens, recent_tokens=recent, private=private)


def _store_request_state(low: Lowering, node: Node) -> None:
    rows = low.count(node, "rows")
    low.add("store_request_state", low.tensors(node), rows=rows, private=cheap(rows, SLOT_WORDS))


def _copy_rows(low: Lowering, node: Node) -> None:
    tensors = low.tensors(node)
    width = tensors["target"].columns
    low.add("copy_rows", tensors, rows=low.count(node, "rows"), width=width)


def _verify_k(low: Lowering, node: Node) -> None:
    rows, events = low.count(node, "rows"), low.dims(node)["ring_events"]
    drafts = int(node.params["draft_tokens"])
    low.add("verify_k", low.tensors(node), rows=rows, ring_events=events, draft_tokens=drafts)


RULES: Mapping[Opcode, Callable[[Lowering, Node], None]] = MappingProxyType(
    {
        Opcode.EMBED: _embed,
        Opcode.SELECT_ROWS: _select_rows,
        Opcode.RMS_NORM: _rms_norm,
        Opcode.ROPE: _rope,
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
        Opcode.ROW_DIGEST: _row_digest,
        Opcode.STREAM_OUT: _stream_out,
        Opcode.LOAD_REQUEST_STATE: _load_request_state,
        Opcode.STORE_REQUEST_STATE: _store_request_state,
        Opcode.VERIFY_K: _verify_k,
        Opcode.COPY_ROWS: _copy_rows,
        Opcode.BARRIER: lambda low, node: None,
        **RECURRENT_RULES,
        **EXPERT_RULES,
    }
)
"""The lowering of each opcode. A BARRIER orders writes in place, which the schedule finds by
itself."""
OPCODES = frozenset(RULES) | frozenset(EXPANSIONS)
"""The opcodes a graph may have: those with a rule, and those that are expanded first."""
