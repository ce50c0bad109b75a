"""Fuses runs of ops into ops for work-groups, for fewer launches and fewer waits between them.

The bits are those of the single ops in order. Kernels for processors exist for no fused op, because
processors repeat small work instead of waiting; only tiers with the kernels of ``accel/kernels``
call ``fuse``. A product fused with a bias or a residual is a ``matmul`` with that operand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from accel.packets.fused_ops import FUSED
from accel.packets.step import Op, Step, Tensor
from contract.arithmetic import PAGE_TOKENS
from contract.dtypes import I12

TILES_FROM = 16
"""Fewest tokens in a step for which products on tiles are faster."""
ATTENTION_TILES_FROM = 128
"""Fewest tokens in a step for which attention on tiles is faster. Fewer tokens mostly belong to
different slots, each of which takes a work-group."""
VECTOR_COLUMNS = 4
"""Elements that a kernel loads at once."""
MAX_HEAD_DIM = 512
"""Most channels of a head for ``accel/kernels/head_rows.k``."""
TILES_HEAD_DIM = 128
"""Most channels of a head for ``accel/kernels/flash_attn_tiles.k``, a multiple of 32."""


@dataclass(frozen=True, slots=True)
class _Ops:
    """The ops of a step from index ``start``, and how often each buffer of the step is read."""

    step: Step
    start: int
    reads: Counter[str]
    matrices: bool = False
    attention: bool = False

    def named(self, *names: str) -> list[Op] | None:
        """The next ops if they have these names and equal counts, else None."""
        found = self.step.ops[self.start : self.start + len(names)]
        if [op.name for op in found] != list(names):
            return None
        return found if len({op.count for op in found}) == 1 else None

    def between(self, written: Tensor | None, read: Tensor | None) -> bool:
        """Whether ``written``, the result of one op, is step-local and only read by the other op,
        as ``read``."""
        return (
            written is not None
            and written == read
            and written.buffer in self.step.scratch
            and self.reads[written.buffer] == 1
        )


Fused = tuple[int, Op]
"""The number of replaced ops, and the op that replaces them."""


def fuse(step: Step, matrices: bool = False, attention: bool = False) -> Step:
    """The step with runs of ops fused where a kernel exists.

    With ``matrices``, products of many tokens use matrix units; with ``attention``, attention of
    many tokens does."""
    reads = Counter(tensor.buffer for op in step.ops for tensor in op.read_tensors())
    ops: list[Op] = []
    start = 0
    while start < len(step.ops):
        rest = _Ops(step, start, reads, matrices, attention)
        found = next((f for rule in RULES if (f := rule(rest)) is not None), None)
        count, op = found or (1, step.ops[start])
        ops.append(op)
        start += count
    used = {t.buffer for op in ops for t in op.operands if t is not None}
    return Step(ops, {name: size for name, size in step.scratch.items() if name in used})


def operands_of(op: Op) -> dict[str, Tensor | None]:
    """The operands of an op by name."""
    return dict(zip(op.device.index_of, op.operands, strict=True))


def _fused_op(like: Op, name: str, tensors: dict[str, Tensor | None], **sizes: int) -> Op:
    """A fused op with the count of ``like`` and no reals."""
    device = FUSED[name]
    return Op(
        device,
        tuple(tensors.get(operand.name) for operand in device.operands),
        device.splits,
        like.count,
        tuple(sizes[size] for size in device.sizes[1:]),
    )


def _integers(quantize: Op) -> dict[str, Tensor | None]:
    tensors = operands_of(quantize)
    return {name: tensors[name] for name in ("m", "scale", "sums")}


def _has_vectors(tensor: Tensor | None) -> bool:
    """Whether every row begins at a multiple of VECTOR_COLUMNS."""
    return tensor is not None and tensor.begins_at(VECTOR_COLUMNS)


def _norm(rest: _Ops) -> Fused | None:
    ops = rest.named("rms_norm", "quantize_activation")
    if ops is None:
        return None
    norm, quantize = (operands_of(op) for op in ops)
    sizes = ops[0].max_sizes()
    if norm["y"] != quantize["x"] or sizes["groups"] != 1:
        return None
    tensors = {"x": norm["x"], "factors": norm["weight"], **_integers(ops[1])}
    if not rest.between(norm["y"], quantize["x"]):
        tensors["y"] = norm["y"]
    made = _fused_op(ops[0], "rms_norm_quantize", tensors, width=sizes["width"])
    return 2, replace(made, reals=ops[0].reals)


def _swiglu(rest: _Ops) -> Fused | None:
    ops = rest.named("swiglu", "quantize_activation")
    if ops is None:
        return None
    gated, quantize = (operands_of(op) for op in ops)
    vectors = all(_has_vectors(gated[name]) for name in ("gate", "up"))
    if not vectors or not rest.between(gated["y"], quantize["x"]):
        return None
    tensors = {"gate": gated["gate"], "up": gated["up"], **_integers(ops[1])}
    sizes = ops[0].max_sizes()
    fields = {"columns": sizes["width"], "activation": sizes["activation"]}
    return 2, _fused_op(ops[0], "swiglu_quantize", tensors, **fields)


def _attention(rest: _Ops) -> Fused | None:
    ops = rest.named("flash_attn", "quantize_activation")
    if ops is None:
        return None
    merge, quantize = (operands_of(op) for op in ops)
    sizes = ops[0].max_sizes()
    y = merge["y"]
    whole = y is not None and y.columns == sizes["heads"] * sizes["head_dim"]
    if not whole or not rest.between(y, quantize["x"]):
        return None
    tensors = {name: merge[name] for name in ("parts", "query", "sinks")} | _integers(ops[1])
    del sizes["tokens"]
    return 2, _fused_op(ops[0], "flash_attn_quantize", tensors, **sizes)


def _product(rest: _Ops) -> Fused | None:
    """A product fused with the bias and the residual that follow it."""
    product = rest.step.ops[rest.start]
    if product.name != "matmul":
        return None
    tensors, count = operands_of(product), 1
    for name, operand, other in (("bias_add", "bias", "bias"), ("add", "residual", None)):
        behind = replace(rest, start=rest.start + count).named(name)
        if behind is None or behind[0].count != product.count:
            continue
        found = operands_of(behind[0])
        first, second = (found["x"], found[other]) if other else (found["a"], found["b"])
        if other is None and not rest.between(tensors["y"], first):
            first, second = second, first
        if first == second or not rest.between(tensors["y"], first):
            continue
        tensors |= {operand: second, "y": found["y"]}
        count += 1
    sizes = product.max_sizes()
    special = _special_product(product.count.maximum, rest.matrices)
    if special is not None and not sizes["row_pairs"] and tensors["scale"] is not None:
        shape = {name: sizes[name] for name in ("rows", "columns")}
        made = _fused_op(product, special, tensors, **shape)
        return count, replace(made, dtype=product.dtype, matrix=made.device.matrix)
    return (count, replace(product, operands=tuple(tensors.values()))) if count > 1 else None


def _special_product(max_tokens: int, matrices: bool) -> str | None:
    """The op for products of at most ``max_tokens`` tokens, None if it is ``matmul``."""
    if max_tokens == 1:
        return "matmul_row"
    return "matmul_tiles" if matrices and max_tokens >= TILES_FROM else None


def _heads(rest: _Ops) -> Fused | None:
    """Fuses norms of heads, rotations and the write to KV pages."""
    for names in (
        ("rms_norm", "rope", "rms_norm", "rope", "kv_write_batched"),
        ("rope", "rope", "kv_write_batched"),
    ):
        if (ops := rest.named(*names)) is not None:
            return _head_rows(rest, ops)
    return None


def _head_rows(rest: _Ops, ops: Sequence[Op]) -> Fused | None:
    write = ops[-1]
    first, second = (ops[1], ops[3]) if len(ops) == 5 else (ops[0], ops[1])
    q, k, kv = operands_of(first), operands_of(second), operands_of(write)
    shape, other = first.max_sizes(), second.max_sizes()
    kv_heads, head_dim = other.pop("heads"), shape["head_dim"]
    heads = shape.pop("heads")
    pages = write.max_sizes()
    fits = (
        shape == other
        and all(q[name] == k[name] for name in ("rope_table", "query"))
        and kv["query"] == q["query"]
        and rest.between(k["y"], kv["k"])
        and pages["head_dim"] == head_dim <= MAX_HEAD_DIM
        and pages["width"] == kv_heads * head_dim
        and pages["page_tokens"] == PAGE_TOKENS
    )
    if not fits:
        return None
    tensors = {"q": q["x"], "k": k["x"], "v": kv["v"], "y": q["y"], "kv": kv["kv"]}
    tensors |= {"page_table": kv["page_table"], "query": q["query"], "rope_table": q["rope_table"]}
    reals = (0.0, 0.0)
    if len(ops) == 5:
        for norm, rope, name, groups in ((ops[0], q, "q", heads), (ops[2], k, "k", kv_heads)):
            found, sizes = operands_of(norm), norm.max_sizes()
            same = (sizes["groups"], sizes["width"]) == (groups, head_dim)
            weighted = found["weight"] is not None
            if not (same and weighted and rest.between(found["y"], rope["x"])):
                return None
            tensors |= {name: found["x"], f"{name}_weight": found["weight"]}
        reals = ops[0].reals[0], ops[2].reals[0]
    made = _fused_op(write, "head_rows", tensors, **shape_of(shape, heads, kv_heads))
    return len(ops), replace(made, reals=reals, dtype=write.dtype)


def shape_of(rope: dict[str, int], heads: int, kv_heads: int) -> dict[str, int]:
    """The sizes of ``head_rows`` from those of a rotation."""
    return {"heads": heads, "kv_heads": kv_heads} | {
        name: rope[name] for name in ("head_dim", "neox", "rotary_pairs")
    }


def _attention_tiles(rest: _Ops) -> Fused | None:
    """Attention of many tokens on matrix units."""
    op = rest.step.ops[rest.start]
    many = rest.attention and op.count.maximum >= ATTENTION_TILES_FROM
    if not many or op.name != "flash_attn_batched" or op.dtype != I12:
        return None
    head_dim = op.max_sizes()["head_dim"]
    soft_cap = op.reals[op.device.reals.index("soft_cap")]
    fits = head_dim <= TILES_HEAD_DIM and not head_dim % 32 and _has_vectors(operands_of(op)["q"])
    if not fits or soft_cap:
        return None
    return 1, replace(op, device=FUSED["flash_attn_tiles"])


RULES: tuple[Callable[[_Ops], Fused | None], ...] = (
    *(_norm, _swiglu, _attention, _attention_tiles, _product, _heads),
)
"""Each rule gets the next ops and returns their replacement or None."""
