"""The dense pre-norm decoder that llama, qwen2 and qwen3 share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from contract.dtypes import F32, I32
from contract.ir.graph import BufferKind, Graph, GraphBuilder, View
from contract.opcodes import Opcode
from reference.model.config import ModelConfig
from reference.model.families.tensors import Limits, ModelTensors

ROPE_TABLE = "constant.rope_table"
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class Variant:
    """What tells the dense families apart."""

    neox: bool
    query_key_norm: bool = False


@dataclass(frozen=True, slots=True)
class Decoder:
    """Emits one decoder; every method appends to ``builder``."""

    builder: GraphBuilder
    config: ModelConfig
    tensors: ModelTensors
    limits: Limits
    variant: Variant

    @property
    def query(self) -> View:
        """The step's query tokens: (token, slot, position, flags) each."""
        return self.builder.request("request.query", "tokens", 4)

    @property
    def page_table(self) -> View:
        """The KV page of every 16 positions of every slot."""
        limits = self.limits
        return self.builder.request("request.page_table", limits.slots, limits.slot_pages)

    def embed(self) -> View:
        """The residual stream of the step's tokens, [tokens, hidden]."""
        table = self.tensors.weight(
            self.builder,
            "model.embed_table",
            "token_embd.weight",
            self.config.vocab,
            self.config.hidden,
        )
        return self.builder.emit(Opcode.EMBED, "embed", query=self.query, table=table)

    def norm(self, x: View, label: str, logical: str, tensor: str) -> View:
        """RMS norm over the residual width."""
        weight = self.tensors.vector(self.builder, logical, tensor, self.config.hidden)
        return self.builder.emit(
            Opcode.RMS_NORM, label, x=x, weight=weight, eps=self.config.rms_eps
        )

    def linear(
        self,
        x: View,
        label: str,
        logical: str,
        tensor: str,
        outputs: int,
        inner: int,
        y: View | None = None,
    ) -> View:
        """x W^T, plus the bias when the file has one."""
        weight = self.tensors.weight(self.builder, logical, f"{tensor}.weight", outputs, inner)
        has_bias = self.tensors.has(f"{tensor}.bias")
        target = None if has_bias else y
        product = self.builder.emit(Opcode.MATMUL, label, x=x, weight=weight, y=target)
        if not has_bias:
            return product
        bias = self.tensors.vector(
            self.builder, logical.replace("weight", "bias"), f"{tensor}.bias", outputs
        )
        return self.builder.emit(Opcode.BIAS_ADD, f"{label}_bias", x=product, bias=bias, y=y)

    def queries_keys_values(self, h: View, layer: int) -> tuple[View, View, View]:
        """The three projections, slices of one buffer; a fused tensor gives it in one product."""
        config = self.config
        q_width = config.heads[layer] * config.head_dim
        kv_width = config.kv_heads[layer] * config.head_dim
        edges = (0, q_width, q_width + kv_width, q_width + 2 * kv_width)
        packed = self.builder.scratch(f"scratch.qkv[{layer}]", "tokens", edges[-1])
        if self.tensors.has(f"blk.{layer}.attn_qkv.weight"):
            self.linear(
                h,
                f"attn_qkv[{layer}]",
                f"model.attn.qkv_weight[{layer}]",
                f"blk.{layer}.attn_qkv",
                edges[-1],
                config.hidden,
                packed,
            )
        else:
            for name, start, stop in zip("qkv", edges[:-1], edges[1:], strict=True):
                self.linear(
                    h,
                    f"attn_{name}[{layer}]",
                    f"model.attn.{name}_weight[{layer}]",
                    f"blk.{layer}.attn_{name}",
                    stop - start,
                    config.hidden,
                    packed[start:stop],
                )
        return packed[0:q_width], packed[q_width : edges[2]], packed[edges[2] : edges[3]]

    def rotate(self, x: View, name: str, layer: int, heads: int) -> View:
        """Per-head norm where the family has one, then the rotary embedding."""
        config, builder = self.config, self.builder
        if self.variant.query_key_norm:
            weight = self.tensors.vector(
                builder,
                f"model.attn.{name}_norm[{layer}]",
                f"blk.{layer}.attn_{name}_norm.weight",
                config.head_dim,
            )
            x = builder.emit(
                Opcode.RMS_NORM,
                f"{name}_norm[{layer}]",
                x=x,
                weight=weight,
                eps=config.rms_eps,
                groups=heads,
            )
        if self.tensors.has(ROPE_FACTORS):
            self.tensors.take(ROPE_FACTORS, config.rotary_dim // 2)
        table = builder.buffer(
            ROPE_TABLE,
            BufferKind.CONSTANT,
            F32,
            (self.limits.context, 2, config.rotary_dim // 2),
        )
        return builder.emit(
            Opcode.ROPE,
            f"{name}_rope[{layer}]",
            x=x,
            rope_table=table,
            query=self.query,
            heads=heads,
            head_dim=config.head_dim,
            neox=int(self.variant.neox),
        )

    def attention(self, h: View, layer: int) -> View:
        """Causal attention over the paged cache, projected back to the residual width."""
        config, builder, limits = self.config, self.builder, self.limits
        heads, kv_heads = config.heads[layer], config.kv_heads[layer]
        q, k, v = self.queries_keys_values(h, layer)
        q = self.rotate(q, "q", layer, heads)
        k = self.rotate(k, "k", layer, kv_heads)
        kv = builder.buffer(
            f"state.kv[{layer}]",
            BufferKind.STATE,
            limits.kv_dtype,
            (limits.pages, 2, 16, kv_heads * config.head_dim),
        )
        builder.emit(
            Opcode.KV_WRITE_BATCHED,
            f"kv_write[{layer}]",
            k=k,
            v=v,
            query=self.query,
            page_table=self.page_table,
            kv=kv,
            kv_heads=kv_heads,
            head_dim=config.head_dim,
        )
        builder.barrier()
        attended = builder.emit(
            Opcode.FLASH_ATTN_BATCHED,
            f"attention[{layer}]",
            q=q,
            kv=kv,
            page_table=self.page_table,
            query=self.query,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=config.head_dim,
            scale=1.0 / math.sqrt(config.head_dim),
        )
        return self.linear(
            attended,
            f"attn_output[{layer}]",
            f"model.attn.o_weight[{layer}]",
            f"blk.{layer}.attn_output",
            config.hidden,
            heads * config.head_dim,
        )

    def feed_forward(self, h: View, layer: int) -> View:
        """W_down (silu(W_gate h) * (W_up h))."""
        width, hidden = self.config.feed_forward[layer], self.config.hidden
        gate, up = (
            self.linear(
                h,
                f"ffn_{name}[{layer}]",
                f"model.ffn.{name}_weight[{layer}]",
                f"blk.{layer}.ffn_{name}",
                width,
                hidden,
            )
            for name in ("gate", "up")
        )
        gated = self.builder.emit(Opcode.SWIGLU, f"swiglu[{layer}]", gate=gate, up=up)
        return self.linear(
            gated,
            f"ffn_down[{layer}]",
            f"model.ffn.down_weight[{layer}]",
            f"blk.{layer}.ffn_down",
            hidden,
            width,
        )

    def block(self, x: View, layer: int) -> View:
        """One decoder layer of the residual stream."""
        h = self.norm(
            x,
            f"attn_norm[{layer}]",
            f"model.attn.norm_weight[{layer}]",
            f"blk.{layer}.attn_norm.weight",
        )
        attended = self.attention(h, layer)
        x = self.builder.emit(Opcode.ADD, f"attn_residual[{layer}]", a=x, b=attended)
        h = self.norm(
            x,
            f"ffn_norm[{layer}]",
            f"model.ffn.norm_weight[{layer}]",
            f"blk.{layer}.ffn_norm.weight",
        )
        fed = self.feed_forward(h, layer)
        return self.builder.emit(Opcode.ADD, f"ffn_residual[{layer}]", a=x, b=fed)

    def head(self, x: View) -> None:
        """Logits and one sampled token for every output row."""
        builder, config = self.builder, self.config
        rows = builder.request("request.output_rows", "rows")
        x = builder.emit(Opcode.SELECT_ROWS, "select_rows", x=x, output_rows=rows)
        h = self.norm(x, "output_norm", "model.output_norm", "output_norm.weight")
        tied = not self.tensors.has("output.weight")
        weight = self.tensors.weight(
            builder,
            "model.embed_table" if tied else "model.lm_head",
            "token_embd.weight" if tied else "output.weight",
            config.vocab,
            config.hidden,
        )
        logits = builder.output("output.logits", "rows", config.vocab)
        if self.tensors.has("output.bias"):
            product = builder.emit(Opcode.LM_HEAD, "lm_head", x=h, weight=weight)
            bias = self.tensors.vector(builder, "model.lm_head_bias", "output.bias", config.vocab)
            builder.emit(Opcode.BIAS_ADD, "lm_head_bias", x=product, bias=bias, y=logits)
        else:
            builder.emit(Opcode.LM_HEAD, "lm_head", x=h, weight=weight, logits=logits)
        emit_tokens(builder, self.limits, logits, rows, self.query)


def emit_tokens(
    builder: GraphBuilder, limits: Limits, logits: View, rows: View, query: View
) -> None:
    """Sample every output row, report it in the ring and prepare the step after this one."""
    sampling = builder.request("request.sampling", "rows", 16)
    recent = builder.request("request.recent", "rows", limits.recent_tokens)
    token = builder.emit(
        Opcode.SAMPLE,
        "sample",
        logits=logits,
        sampling=sampling,
        recent=recent,
        token=builder.output("output.token", "rows", dtype=I32),
    )
    ring = builder.output("output.ring", limits.ring_events, 8, dtype=I32)
    written = {"token": token, "output_rows": rows, "query": query}
    builder.emit(Opcode.STREAM_OUT, "stream_out", **written, ring=ring)
    builder.emit(Opcode.FEED_TOKENS, "feed_tokens", **written, sampling=sampling, recent=recent)


def build_decoder(
    config: ModelConfig, tensors: ModelTensors, limits: Limits, variant: Variant
) -> Graph:
    """x = embed; each layer x += attention(norm x), x += ffn(norm x); logits of the last norm."""
    builder = GraphBuilder(config.architecture)
    decoder = Decoder(builder, config, tensors, limits, variant)
    x = decoder.embed()
    for layer in range(config.layers):
        x = decoder.block(x, layer)
    decoder.head(x)
    return builder.build()
