"""Graphs the contract's tests share: a two-layer decoder, and random nodes drawn from the table."""

from dataclasses import dataclass

from hypothesis import strategies as st

from contract.arithmetic import digest_words
from contract.dtypes import F16, F32, I32, Q4_0, DType
from contract.ir.graph import BufferKind, Graph, GraphBuilder, View
from contract.opcodes import Opcode
from contract.ops import TABLE
from contract.spec import Access, Dim, Operand, OpSpec, Param, Scalar, Stage

SYMBOLS = ("tokens", "rows")


def weight(b: GraphBuilder, name: str, *shape: Dim, dtype: DType = F32) -> View:
    """A weight whose tensor has the buffer's own name."""
    return b.buffer(name, BufferKind.WEIGHT, dtype, shape, source=name)


def decoder(layers: int = 2, stage: Stage = Stage.BOTH) -> Graph:
    """A small decoder with every kind of buffer, slices, barriers and in-place state."""
    heads, kv_heads, head_dim, hidden, vocab = 4, 2, 8, 32, 96
    kv_width = kv_heads * head_dim
    b = GraphBuilder("tiny", stage)
    query = b.request("request.query", "tokens", 4)
    pages = b.request("request.page_table", 2, 8)
    rows = b.request("request.output_rows", "rows")
    rope_table = b.buffer("constant.rope", BufferKind.CONSTANT, F32, (128, 2, head_dim // 2))
    x = b.emit(Opcode.EMBED, query=query, table=weight(b, "embed", vocab, hidden, dtype=Q4_0))
    for n in range(layers):
        name = f"layer[{n}]"
        h = b.emit(
            Opcode.RMS_NORM, f"{name}.norm", x=x, weight=weight(b, f"{name}.norm", hidden), eps=1e-6
        )
        qkv = b.scratch(f"{name}.qkv", "tokens", hidden + 2 * kv_width)
        parts = (qkv[0:hidden], qkv[hidden : hidden + kv_width], qkv[hidden + kv_width : 64])
        for part, width in zip("qkv", (hidden, kv_width, kv_width), strict=True):
            b.emit(
                Opcode.MATMUL, f"{name}.{part}", x=h,
                weight=weight(b, f"{name}.{part}", width, hidden, dtype=Q4_0),
                y=parts["qkv".index(part)],
            )  # fmt: skip
        rope = {"rope_table": rope_table, "query": query, "head_dim": head_dim, "neox": 1}
        q = b.emit(Opcode.ROPE, f"{name}.rope_q", x=parts[0], heads=heads, **rope)
        k = b.emit(Opcode.ROPE, f"{name}.rope_k", x=parts[1], heads=kv_heads, **rope)
        kv = b.buffer(f"state.kv[{n}]", BufferKind.STATE, F16, (9, 2, 16, kv_heads, head_dim))
        sizes = {"kv_heads": kv_heads, "head_dim": head_dim}
        b.emit(
            Opcode.KV_WRITE_BATCHED, f"{name}.kv_write", k=k, v=parts[2], query=query,
            page_table=pages, kv=kv, **sizes,
        )  # fmt: skip
        b.barrier()
        y = b.emit(
            Opcode.FLASH_ATTN_BATCHED, f"{name}.attention", q=q, kv=kv, page_table=pages,
            query=query, heads=heads, scale=0.3535533905932738, **sizes,
        )  # fmt: skip
        x = b.emit(Opcode.ADD, f"{name}.residual", a=x, b=y)
    last = b.emit(Opcode.SELECT_ROWS, x=x, output_rows=rows)
    sampled(b, last, hidden, vocab)
    return b.build()


def sampled(b: GraphBuilder, last: View, hidden: int, vocab: int) -> None:
    """Logits of the rows ``last``, and the tokens that are drawn from them."""
    logits = b.output("output.logits", "rows", vocab)
    b.emit(Opcode.LM_HEAD, x=last, weight=weight(b, "head", vocab, hidden), logits=logits)
    b.emit(
        Opcode.SAMPLE, logits=logits, sampling=b.request("request.sampling", "rows", 16),
        recent=b.buffer("state.recent", BufferKind.STATE, I32, (2, 8)),
        token=b.output("output.token", "rows", dtype=I32),
    )  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """One node's worth of well-formed arguments: a shape and type per operand, and parameters."""

    spec: OpSpec
    shapes: dict[str, tuple[Dim, ...]]
    dtypes: dict[str, DType]
    params: dict[str, Scalar]

    def build(self) -> Graph:
        """A graph of this one node."""
        b = GraphBuilder("drawn", self.spec.stages)
        views: dict[str, View] = {}
        for operand in self.spec.operands:
            if operand.name in self.shapes:
                views[operand.name] = self._operand(b, operand)
        b.emit(self.spec.opcode, "node", **views, **self.params)
        return b.build()

    def _operand(self, b: GraphBuilder, operand: Operand) -> View:
        shape, dtype = self.shapes[operand.name], self.dtypes[operand.name]
        local = any(isinstance(dim, str) for dim in shape)
        if operand.access is Access.WRITE:
            return b.scratch(operand.name, *shape, dtype=dtype)
        if operand.access is Access.UPDATE and not local:
            return b.buffer(operand.name, BufferKind.STATE, dtype, shape)
        kind = BufferKind.REQUEST if local else BufferKind.WEIGHT
        return b.buffer(operand.name, kind, dtype, shape)


@st.composite
def well_formed(draw: st.DrawFn, opcode: Opcode) -> Drawn:
    """Random operand shapes and parameters that obey the table's rules for ``opcode``."""
    spec = TABLE[opcode]
    params = {param.name: draw(_param(param)) for param in spec.params}
    names = {
        factor
        for operand in spec.operands
        for dim in operand.dims
        for factor in dim.split("*")
        if not factor.isdigit()
    }
    sizes: dict[str, Dim] = {}
    for name in sorted(names):
        if name in SYMBOLS:
            sizes[name] = name
        elif name in params:
            sizes[name] = int(params[name])
        else:
            sizes[name] = draw(st.sampled_from((1, 2, 3, 5, 8, 32, 96, 256, 512)))
    absent = {one.name for one in spec.operands if one.optional and draw(st.booleans())}
    if "rest" in absent:
        sizes["rest_width"] = 0
    _satisfy(draw, spec, params, sizes)
    shapes, dtypes = {}, {}
    for operand in spec.operands:
        if operand.name in absent:
            continue
        shape = tuple(_dim(expression, sizes) for expression in operand.dims)
        shapes[operand.name] = shape
        unit = shape[-1]
        fitting = [d for d in operand.dtypes if _whole_blocks(d, unit)]
        dtypes[operand.name] = draw(st.sampled_from(fitting))
    return Drawn(spec, shapes, dtypes, params)


def _whole_blocks(dtype: DType, last: Dim) -> bool:
    return dtype.block_elements == 1 or (isinstance(last, int) and last % dtype.block_elements == 0)


def _param(param: Param) -> st.SearchStrategy[Scalar]:
    if param.choices:
        return st.integers(0, len(param.choices) - 1)
    low = param.minimum or 0
    if param.kind is int:
        return st.integers(int(low), int(low) + 5)
    return st.floats(low, low + 4, width=32)


def _dim(expression: str, sizes: dict[str, Dim]) -> Dim:
    if expression in sizes:
        return sizes[expression]
    total = 1
    for factor in expression.split("*"):
        total *= int(sizes.get(factor, factor))
    return total


def _satisfy(
    draw: st.DrawFn, spec: OpSpec, params: dict[str, Scalar], sizes: dict[str, Dim]
) -> None:
    """Adjust what the constraints of the table tie together."""

    def fix(name: str, value: int) -> None:
        if name in params:
            params[name] = value
        if name in sizes:
            sizes[name] = value

    for operand in spec.operands:
        block = min(dtype.block_elements for dtype in operand.dtypes)
        if block > 1:
            fix(operand.dims[-1], block * draw(st.integers(1, 3)))
    if "kv_heads" in params and "heads" in params:
        fix("heads", int(params["kv_heads"]) * draw(st.integers(1, 4)))
    if "rotary_pairs" in sizes:
        fix("head_dim", 2 * int(params["head_dim"]))
        fix("rotary_pairs", draw(st.integers(1, int(params["head_dim"]) // 2)))
    if "qkv_width" in sizes:
        heads, kv_heads = int(params["heads"]), int(params["kv_heads"])
        fix("qkv_width", (heads + 2 * kv_heads) * int(params["head_dim"]))
    if "taps" in sizes:
        fix("taps", int(params["history"]) + 1)
    if "key_heads" in params:
        fix("value_heads", int(params["key_heads"]) * draw(st.integers(1, 3)))
        heads = 2 * int(params["key_heads"]) + int(params["value_heads"])
        fix("channels", int(params["state_size"]) * heads)
        each = draw(st.sampled_from((1, int(params["state_size"]))))
        fix("rates", int(params["value_heads"]) * each)
    if "groups" in params and "state_size" in params:
        heads, groups = int(params["groups"]) * draw(st.integers(1, 3)), int(params["groups"])
        fix("heads", heads)
        states = 2 * groups * int(params["state_size"])
        fix("channels", heads * int(params["head_dim"]) + states)
    if "states" in params:
        fix("slots", int(params["states"]) * draw(st.integers(1, 3)))
    if "used" in params:
        fix("experts", int(params["used"]) + draw(st.integers(0, 4)))
    if "groups_used" in params:
        groups, size = int(params["groups"]), draw(st.integers(2, 4))
        fix("groups_used", draw(st.integers(1, groups)))
        fix("experts", groups * size)
        fix("used", draw(st.integers(1, int(params["groups_used"]) * size)))
    if "y_width" in sizes:
        fix("x_width", int(sizes["inner"]) + draw(st.integers(0, 3)))
        fix("y_width", int(sizes["rest_width"]) + int(sizes["outputs"]))
    if "factors" in sizes:
        fix("factors", draw(st.sampled_from((1, int(sizes["width"])))))
    if "mask_words" in sizes:
        fix("mask_words", -(-int(sizes["vocab"]) // 32) + draw(st.integers(0, 2)))
    if "digest_words" in sizes:
        fix("digest_words", digest_words(int(sizes["vocab"])))
    if "top" in params:
        fix("top", min(int(params["top"]), int(sizes["vocab"])))
    if "slot_words" in sizes:
        fix("slot_words", 8)
    if "ring_events" in sizes:
        fix("ring_events", draw(st.integers(2, 6)))
