"""Graphs of the kinds of model a report shows, of any size: a hybrid with experts, a slider."""

from dataclasses import dataclass

from contract.dtypes import F16, F32, I32, Q4_0, Q8_0, DType
from contract.ir.graph import BufferKind, Graph, GraphBuilder, View
from contract.opcodes import Opcode
from contract.spec import Dim
from tests.contract.graphs import weight

GELU = 1


@dataclass(frozen=True)
class Sizes:
    """Extents of a model. A delta-net layer has as many heads of keys as of values."""

    layers: int = 4
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    width: int = 96
    vocab: int = 320
    experts: int = 8
    used: int = 2
    context: int = 256


TINY = Sizes()


class Decoder:
    """The parts that the models below share."""

    def __init__(self, name: str, sizes: Sizes, dtype: DType) -> None:
        self.b = GraphBuilder(name)
        self.sizes = sizes
        self.dtype = dtype
        self.query = self.b.request("request.query", "tokens", 4)
        self.pages = self.b.request("request.page_table", 1, sizes.context // 16)
        table = weight(self.b, "embed", sizes.vocab, sizes.hidden, dtype=dtype)
        self.x = self.b.emit(Opcode.EMBED, "embed", query=self.query, table=table)

    def matrix(self, name: str, *shape: Dim) -> View:
        return weight(self.b, name, *shape, dtype=self.dtype)

    def norm(self, name: str) -> View:
        scale = weight(self.b, name, self.sizes.hidden, dtype=F32)
        return self.b.emit(Opcode.RMS_NORM, name, x=self.x, weight=scale, eps=1e-6)

    def project(self, name: str, x: View, outputs: int, inner: int) -> View:
        return self.b.emit(Opcode.MATMUL, name, x=x, weight=self.matrix(name, outputs, inner))

    def attention(self, n: int, window: int = 0) -> None:
        s, b = self.sizes, self.b
        h = self.norm(f"attn_norm[{n}]")
        q, k, v = (
            self.project(f"attn_{part}[{n}]", h, heads * s.head_dim, s.hidden)
            for part, heads in (("q", s.heads), ("k", s.kv_heads), ("v", s.kv_heads))
        )
        shape = (s.context // 16, 2, 16, s.kv_heads, s.head_dim)
        kv = b.buffer(f"state.kv[{n}]", BufferKind.STATE, F16, shape)
        step = {"query": self.query, "page_table": self.pages, "kv": kv}
        heads = {"kv_heads": s.kv_heads, "head_dim": s.head_dim}
        b.emit(Opcode.KV_WRITE_BATCHED, f"kv_write[{n}]", k=k, v=v, **step, **heads)
        b.barrier()
        y = b.emit(
            Opcode.FLASH_ATTN_BATCHED, f"attention[{n}]", q=q, heads=s.heads, scale=0.125,
            window=window, **step, **heads,
        )  # fmt: skip
        y = self.project(f"attn_output[{n}]", y, s.hidden, s.heads * s.head_dim)
        self.x = b.emit(Opcode.ADD, f"attn_residual[{n}]", a=self.x, b=y)

    def delta_net(self, n: int) -> None:
        s, b = self.sizes, self.b
        inner = s.heads * s.head_dim
        h = self.norm(f"ssm_norm[{n}]")
        x = self.project(f"ssm_in[{n}]", h, 3 * inner, s.hidden)
        gate = self.project(f"ssm_gate[{n}]", h, inner, s.hidden)
        alpha, beta = (
            self.project(f"ssm_{name}[{n}]", h, s.heads, s.hidden) for name in ("alpha", "beta")
        )
        history = b.buffer(f"state.conv[{n}]", BufferKind.STATE, F32, (1, 3, 3 * inner))
        taps = weight(b, f"ssm_conv[{n}]", 3 * inner, 4)
        x = b.emit(
            Opcode.SSM_CONV1D, f"ssm_conv[{n}]", x=x, weight=taps, query=self.query, state=history,
            history=3,
        )  # fmt: skip
        state = b.buffer(
            f"state.ssm[{n}]", BufferKind.STATE, F32, (1, s.heads, s.head_dim, s.head_dim)
        )
        y = b.emit(
            Opcode.SSM_DELTA_NET, f"delta_net[{n}]", x=x, alpha=alpha, beta=beta,
            decay=weight(b, f"ssm_a[{n}]", s.heads), dt_bias=weight(b, f"ssm_dt[{n}]", s.heads),
            query=self.query, state=state, key_heads=s.heads, value_heads=s.heads,
            state_size=s.head_dim, eps=1e-6,
        )  # fmt: skip
        b.barrier()
        gated = b.emit(Opcode.SWIGLU, f"ssm_gated[{n}]", gate=gate, up=y, activation=2)
        y = self.project(f"ssm_out[{n}]", gated, s.hidden, inner)
        self.x = b.emit(Opcode.ADD, f"ssm_residual[{n}]", a=self.x, b=y)

    def dense(self, n: int) -> None:
        s, b = self.sizes, self.b
        h = self.norm(f"ffn_norm[{n}]")
        gate, up = (
            self.project(f"ffn_{name}[{n}]", h, s.width, s.hidden) for name in ("gate", "up")
        )
        gated = b.emit(Opcode.SWIGLU, f"geglu[{n}]", gate=gate, up=up, activation=GELU)
        y = self.project(f"ffn_down[{n}]", gated, s.hidden, s.width)
        self.x = b.emit(Opcode.ADD, f"ffn_residual[{n}]", a=self.x, b=y)

    def experts(self, n: int) -> None:
        s, b = self.sizes, self.b
        h = self.norm(f"ffn_norm[{n}]")
        router = weight(b, f"router[{n}]", s.experts, s.hidden)
        ids = b.scratch(f"scratch.ids[{n}]", "tokens", s.used, dtype=I32)
        shares = b.scratch(f"scratch.shares[{n}]", "tokens", s.used)
        b.emit(
            Opcode.MOE_GATE_TOPK, f"router[{n}]", x=h, gate_weight=router, ids=ids, weights=shares,
            used=s.used,
        )  # fmt: skip
        gate, up = (
            b.scratch(f"scratch.{x}[{n}]", "tokens", s.used, s.width) for x in ("gate", "up")
        )
        b.emit(
            Opcode.MOE_GATE_UP, f"experts_in[{n}]", x=h,
            gate_weight=self.matrix(f"experts_gate[{n}]", s.experts, s.width, s.hidden),
            up_weight=self.matrix(f"experts_up[{n}]", s.experts, s.width, s.hidden), ids=ids,
            gate=gate, up=up,
        )  # fmt: skip
        gated = b.emit(Opcode.MOE_SWIGLU, f"experts_gated[{n}]", gate=gate, up=up)
        self.x = b.emit(
            Opcode.MOE_DOWN_ACC, f"experts_out[{n}]", x=gated,
            down_weight=self.matrix(f"experts_down[{n}]", s.experts, s.hidden, s.width), ids=ids,
            weights=shares, residual=self.x,
        )  # fmt: skip

    def build(self) -> Graph:
        s, b = self.sizes, self.b
        rows = b.request("request.output_rows", "rows")
        self.x = b.emit(Opcode.SELECT_ROWS, "select_rows", x=self.x, output_rows=rows)
        scale = weight(b, "output_norm", s.hidden)
        h = b.emit(Opcode.RMS_NORM, "output_norm", x=self.x, weight=scale, eps=1e-6)
        logits = b.output("output.logits", "rows", s.vocab)
        head = self.matrix("embed", s.vocab, s.hidden)
        b.emit(Opcode.LM_HEAD, "lm_head", x=h, weight=head, logits=logits)
        return b.build()


def hybrid(sizes: Sizes = TINY, name: str = "hybrid") -> Graph:
    """Three delta-net layers, then one of full attention, all with experts."""
    decoder = Decoder(name, sizes, Q4_0)
    for n in range(sizes.layers):
        if n % 4 == 3:
            decoder.attention(n)
        else:
            decoder.delta_net(n)
        decoder.experts(n)
    return decoder.build()


def slider(sizes: Sizes = TINY, window: int = 64) -> Graph:
    """Sliding attention, every fourth layer full, all dense."""
    decoder = Decoder("slider", sizes, Q8_0)
    for n in range(sizes.layers):
        decoder.attention(n, window=0 if n % 4 == 3 else window)
        decoder.dense(n)
    return decoder.build()
