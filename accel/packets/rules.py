"""Which ops each opcode becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from accel.packets.lowering import ANY, COLUMNS, ROWS, Lowering, cheap
from accel.packets.rules_attention import lower_attention
from accel.packets.rules_experts import EXPERT_RULES
from accel.packets.rules_recurrent import RECURRENT_RULES
from accel.packets.step import Op, Step, Tensor
from contract.errors import UnsupportedOp
from contract.ir.nodes import Graph, Node
from contract.opcodes import Opcode
from contract.ops import TABLE
from contract.shape_key import ShapeKey

BEST_WORDS = 3
"""int32 words of the arg-max record of ``kernels/argmax.h``."""


def lower_graph(graph: Graph, key: ShapeKey, parts: int, tier: str) -> Step:
    """The ops of ``graph`` for ``key`` on ``tier``; row reductions are cut in ``parts``.

    Raises UnsupportedOp for an opcode that is not in RULES and for sizes no op has room for.
    """
    missing = sorted(opcode.name for opcode in graph.opcodes if opcode not in RULES)
    if missing:
        raise UnsupportedOp(tier, missing)
    lowering = Lowering(graph, key, parts, tier)
    for node in graph.nodes:
        RULES[node.opcode](lowering, node)
    return lowering.step


def _tensors(low: Lowering, node: Node) -> list[Tensor]:
    """The node's operands in the order of the opcode table."""
    return [low.tensor(node.operands[o.name]) for o in TABLE[node.opcode].operands]


def _embed(low: Lowering, node: Node) -> None:
    dims = low.dims(node)
    tokens, hidden = dims["tokens"], dims["hidden"]
    low.add(
        Op(
            "embed",
            (
                low.tensor(node.operands["query"]),
                low.stored(node.operands["table"]),
                low.tensor(node.operands["y"]),
            ),
            (ANY, ANY, ROWS),
            (2,),
            (tokens, hidden),
            dtype=low.dtype(node.operands["table"]),
            private=cheap(tokens, hidden),
            matrix=1,
        )
    )


def _select_rows(low: Lowering, node: Node) -> None:
    dims = low.dims(node)
    rows, hidden = dims["rows"], dims["hidden"]
    low.add(
        Op(
            "select_rows",
            tuple(_tensors(low, node)),
            (ANY, ANY, ROWS),
            (2,),
            (rows, hidden),
            private=cheap(rows, hidden),
        )
    )


def _elementwise(low: Lowering, node: Node) -> None:
    tensors = _tensors(low, node)
    rows = low.dims(node).get("tokens", low.dims(node).get("rows", 0))
    sizes = tuple(int(v) for v in node.params.values() if isinstance(v, int))
    reals = tuple(v for v in node.params.values() if isinstance(v, float))
    low.elementwise(TABLE[node.opcode].name, tensors, rows, sizes, reals)


def _rms_norm(low: Lowering, node: Node) -> None:
    weight = node.operands.get("weight")
    low.norm(
        low.tensor(node.operands["x"]),
        low.tensor(weight) if weight else None,
        low.tensor(node.operands["y"]),
        low.dims(node)["tokens"],
        int(node.params["groups"]),
        node.params["eps"],
    )


def _residual_rms_norm(low: Lowering, node: Node) -> None:
    x, residual, weight, total, y = _tensors(low, node)
    tokens = low.dims(node)["tokens"]
    low.elementwise("add", (residual, x, total), tokens)
    low.norm(total, weight, y, tokens, 1, node.params["eps"])


def _product(x: str, weight: str, y: str) -> Callable[[Lowering, Node], None]:
    def rule(low: Lowering, node: Node) -> None:
        dims = low.dims(node)
        tokens = dims["rows"] if node.opcode is Opcode.LM_HEAD else dims["tokens"]
        source, target = low.tensor(node.operands[x]), low.tensor(node.operands[y])
        low.product(source, node.operands[weight], target, tokens)

    return rule


def _norm_products(*names: str) -> Callable[[Lowering, Node], None]:
    """One norm, then a product per name: x name_weight^T goes to name."""

    def rule(low: Lowering, node: Node) -> None:
        x = low.tensor(node.operands["x"])
        tokens = low.dims(node)["tokens"]
        h = low.new(f"{node.name}.h", tokens, x.columns)
        norm_weight = low.tensor(node.operands["norm_weight"])
        low.norm(x, norm_weight, h, tokens, 1, node.params["eps"])
        for name in names:
            y = low.tensor(node.operands[name])
            low.product(h, node.operands[f"{name}_weight"], y, tokens)

    return rule


def _rope(low: Lowering, node: Node) -> None:
    dims = low.dims(node)
    x, y = low.tensor(node.operands["x"]), low.tensor(node.operands["y"])
    low.rotate(x, node, dims["heads"], dims["tokens"], dims["rotary_pairs"], y)


def _kv_write(low: Lowering, node: Node) -> None:
    k, v = low.tensor(node.operands["k"]), low.tensor(node.operands["v"])
    low.store_kv(k, v, node, low.dims(node)["tokens"])


def _norm_rope_kv_write(low: Lowering, node: Node) -> None:
    dims = low.dims(node)
    tokens, head_dim = dims["tokens"], dims["head_dim"]
    packed = low.tensor(node.operands["qkv"])
    parts: dict[str, Tensor] = {}
    start = packed.start
    for name, heads in (("q", dims["heads"]), ("k", dims["kv_heads"]), ("v", dims["kv_heads"])):
        parts[name] = Tensor(packed.buffer, start, heads * head_dim, packed.stride)
        start += heads * head_dim
    for name, heads in (("q", dims["heads"]), ("k", dims["kv_heads"])):
        x = parts[name]
        if f"{name}_norm" in node.operands:
            y = low.new(f"{node.name}.{name}_norm", tokens, x.columns)
            weight = low.tensor(node.operands[f"{name}_norm"])
            low.norm(x, weight, y, tokens, heads, node.params["eps"])
            x = y
        y = low.tensor(node.operands["q"])
        if name == "k":
            y = low.new(f"{node.name}.k_rope", tokens, x.columns)
            parts["k"] = y
        low.rotate(x, node, heads, tokens, dims["rotary_pairs"], y)
    low.store_kv(parts["k"], parts["v"], node, tokens)


def _argmax(low: Lowering, node: Node) -> None:
    logits, token = _tensors(low, node)
    rows, vocab = low.dims(node)["rows"], logits.columns
    parts = low.new(f"{node.name}.parts", rows, low.parts * BEST_WORDS)
    low.add(Op("argmax_part", (logits, parts), (COLUMNS, ANY), (1,), (rows, vocab, low.parts)))
    low.add(Op("argmax", (parts, token), (ANY, ROWS), (1,), (rows, low.parts)))


def _sample(low: Lowering, node: Node) -> None:
    logits, sampling, recent, token = _tensors(low, node)
    rows, vocab = low.dims(node)["rows"], logits.columns
    values, ids, weights = (
        low.new(f"{node.name}.{name}", rows, vocab) for name in ("values", "ids", "weights")
    )
    parts = low.new(f"{node.name}.parts", rows, low.parts * BEST_WORDS)
    low.add(
        Op(
            "sample_part",
            (logits, sampling, recent, values, parts),
            (COLUMNS, ANY, ANY, COLUMNS, ANY),
            (3, 4),
            (rows, vocab, low.parts, recent.columns),
        )
    )
    low.add(
        Op(
            "sample",
            (values, sampling, parts, ids, weights, token),
            (ROWS, ANY, ANY, ROWS, ROWS, ROWS),
            (0, 3, 4, 5),
            (rows, vocab, low.parts),
        )
    )


def _stream_out(low: Lowering, node: Node) -> None:
    dims = low.dims(node)
    sizes = (dims["rows"], dims["ring_events"])
    low.add(Op("stream_out", tuple(_tensors(low, node)), (ANY,) * 4, (3,), sizes))


def _feed_tokens(low: Lowering, node: Node) -> None:
    sizes = (low.dims(node)["rows"],)
    low.add(Op("feed_tokens", tuple(_tensors(low, node)), (ANY,) * 5, (2, 3, 4), sizes))


def _slot_state(written: int) -> Callable[[Lowering, Node], None]:
    def rule(low: Lowering, node: Node) -> None:
        name = TABLE[node.opcode].name
        sizes = (low.dims(node)["rows"], int(node.params["field"]))
        low.add(Op(name, tuple(_tensors(low, node)), (ANY,) * 3, (written,), sizes))

    return rule


def _verify_k(low: Lowering, node: Node) -> None:
    dims = low.dims(node)
    sizes = (dims["rows"], dims["draft_tokens"])
    low.add(Op("verify_k", tuple(_tensors(low, node)), (ROWS,) * 3, (2,), sizes))


RULES: Mapping[Opcode, Callable[[Lowering, Node], None]] = MappingProxyType(
    {
        Opcode.EMBED: _embed,
        Opcode.SELECT_ROWS: _select_rows,
        Opcode.RMS_NORM: _rms_norm,
        Opcode.RESIDUAL_RMS_NORM: _residual_rms_norm,
        Opcode.RMS_NORM_FUSED_QKV: _norm_products("q", "k", "v"),
        Opcode.RMS_NORM_FUSED_MLP_GATE_UP: _norm_products("gate", "up"),
        Opcode.RMS_NORM_FUSED_ROPE_KV_WRITE: _norm_rope_kv_write,
        Opcode.ROPE: _rope,
        Opcode.KV_WRITE_BATCHED: _kv_write,
        Opcode.FLASH_ATTN: lower_attention,
        Opcode.FLASH_ATTN_BATCHED: lower_attention,
        Opcode.MATMUL: _product("x", "weight", "y"),
        Opcode.MATMUL_WMMA_F16: _product("a", "b", "c"),
        Opcode.MATMUL_WMMA_Q4K: _product("b", "a", "c"),
        Opcode.LM_HEAD: _product("x", "weight", "logits"),
        Opcode.ADD: _elementwise,
        Opcode.MUL: _elementwise,
        Opcode.SCALE: _elementwise,
        Opcode.BIAS_ADD: _elementwise,
        Opcode.SOFT_CAP: _elementwise,
        Opcode.SWIGLU: _elementwise,
        Opcode.ARGMAX: _argmax,
        Opcode.SAMPLE: _sample,
        Opcode.STREAM_OUT: _stream_out,
        Opcode.LOAD_REQUEST_STATE: _slot_state(2),
        Opcode.STORE_REQUEST_STATE: _slot_state(2),
        Opcode.VERIFY_K: _verify_k,
        Opcode.BARRIER: lambda low, node: None,
        **RECURRENT_RULES,
        **EXPERT_RULES,
    }
)
"""What each opcode becomes. A BARRIER orders in-place writes, which the schedule sees itself."""
