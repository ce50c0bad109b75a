"""``gemma4``: layers of two head sizes, shared keys and values, per-layer embeddings, experts."""

from __future__ import annotations

import math

from contract.ir.graph import Graph, GraphBuilder, View
from contract.opcodes import Opcode
from reference.limits import Limits
from reference.model.config import ModelConfig
from reference.model.families import attention
from reference.model.families.emitter import GELU, Emitter
from reference.model.families.feed_forward import Gates, dense, experts, route
from reference.model.families.forward import auxiliary_state, embed, head
from reference.model.families.tensors import ModelTensors


def build(config: ModelConfig, tensors: ModelTensors, limits: Limits) -> Graph:
    """The graph of a Gemma 4 model."""
    e = Emitter(GraphBuilder(config.architecture), config, tensors, limits)
    x = embed(e)
    embeddings = per_layer_embeddings(e, x) if config.per_layer_width else None
    for layer in range(config.layers):
        auxiliary_state(e, x, layer)
        attended = e.norm(_attention(e, x, layer), "post_attention_norm", layer)
        x = e.add("attn_residual", layer, x, attended)
        fed = e.norm(_feed_forward(e, x, layer), "post_ffw_norm", layer)
        x = e.add("ffn_residual", layer, x, fed)
        if embeddings is not None:
            x = _add_embedding(e, x, embeddings, layer)
        if e.has("layer_output_scale.weight", layer):
            x = e.builder.emit(
                Opcode.SCALE_COLUMNS,
                f"layer_output_scale[{layer}]",
                x=x,
                factors=e.parameters("layer_output_scale.weight", layer, 1),
            )
    head(e, x)
    return e.builder.build()


def per_layer_embeddings(e: Emitter, x: View) -> View:
    """e = (a + b) / sqrt(2), [tokens, layers * width], from the scaled embedding x.

    a = per_layer_token_embd[id] sqrt(P); b = rms(x per_layer_model_proj / sqrt(H)), per layer."""
    builder, config = e.builder, e.config
    width, total = config.per_layer_width, config.layers * config.per_layer_width
    table = e.weight("per_layer_token_embd", None, config.vocab, total)
    a = builder.emit(Opcode.EMBED, "per_layer_embed", query=e.resolved, table=table)
    a = builder.emit(Opcode.SCALE, "per_layer_embed_scale", x=a, factor=math.sqrt(width))
    b = e.linear(x, "per_layer_model_proj", None, total, config.hidden)
    factor = 1.0 / math.sqrt(config.hidden)
    b = builder.emit(Opcode.SCALE, "per_layer_proj_scale", x=b, factor=factor)
    b = builder.emit(
        Opcode.RMS_NORM,
        "per_layer_proj_norm",
        x=b,
        weight=e.parameters("per_layer_proj_norm.weight", None, width),
        eps=config.rms_eps,
        groups=config.layers,
    )
    both = e.add("per_layer_sum", None, a, b)
    return builder.emit(Opcode.SCALE, "per_layer_scale", x=both, factor=1.0 / math.sqrt(2.0))


def _attention(e: Emitter, x: View, layer: int) -> View:
    """attn(q, K, V) Wo with scale 1; the last layers read the KV pages of an earlier layer."""
    if e.config.kv_layers[layer] != layer:
        q = queries(e, x, layer)
    else:
        q = attention.rotate_and_store(
            e, queries_keys_values(e, x, layer), layer, query_key_norm=True
        )
    return attention.output(e, attention.attend(e, q, layer), layer)


def queries(e: Emitter, x: View, layer: int, norm: str | None = attention.NORM) -> View:
    """rope(rms(h Wq, attn_q_norm)) of h = rms(x, norm), or of x without a norm."""
    config = e.config
    heads, size = config.heads[layer], config.head_dims[layer]
    h = e.norm(x, norm, layer) if norm else x
    q = e.linear(h, "attn_q", layer, heads * size, config.hidden)
    q = e.head_norm(q, "q", layer, heads, e.powers(layer)[0])
    return e.rope(q, "q_rope", layer, heads, size)


def queries_keys_values(e: Emitter, x: View, layer: int, norm: str | None = attention.NORM) -> View:
    """Packed queries, keys and values of rms(x, norm), or of x without a norm; the values are
    normed without a weight.

    In layers without attn_v the values are the keys before their norm and rotation."""
    config = e.config
    packed, (q, k, v) = attention.packed_views(e, layer)
    q_width, kv_width = attention.widths(e, layer)
    if e.has("attn_v.weight", layer) or e.has(f"{attention.FUSED}.weight", layer):
        values = e.builder.scratch(f"scratch.attn_v[{layer}]", "tokens", kv_width)
        attention.project(e, x, layer, values, norm)
    else:
        values = k
        h = e.norm(x, norm, layer) if norm else x
        e.linear(h, "attn_q", layer, q_width, config.hidden, y=q)
        e.linear(h, "attn_k", layer, kv_width, config.hidden, y=k)
    e.builder.emit(
        Opcode.RMS_NORM,
        f"v_norm[{layer}]",
        x=values,
        eps=config.rms_eps,
        groups=config.kv_heads[layer],
        y=v,
    )
    return packed


def _feed_forward(e: Emitter, x: View, layer: int) -> View:
    """The dense block; layers with a router add the norm of the experts' sum to its norm.

    The router reads rms(x) / sqrt(H) times its own scale."""
    y = dense(e, x, layer, "ffn_norm", Gates(GELU))
    if e.config.experts is None or not e.has("ffn_gate_inp.weight", layer):
        return y
    builder, hidden = e.builder, e.config.hidden
    r = builder.emit(Opcode.RMS_NORM, f"router_norm[{layer}]", x=x, eps=e.config.rms_eps)
    factor = 1.0 / math.sqrt(hidden)
    r = builder.emit(Opcode.SCALE, f"router_width[{layer}]", x=r, factor=factor)
    scale = e.parameters("ffn_gate_inp.scale", layer, hidden)
    r = builder.emit(Opcode.SCALE_COLUMNS, f"router_scale[{layer}]", x=r, factors=scale)
    h = e.norm(x, "pre_ffw_norm_2", layer)
    chosen = experts(e, h, layer, route(e, r, layer), GELU)
    y = e.norm(y, "post_ffw_norm_1", layer)
    return e.add("ffn_sum", layer, y, e.norm(chosen, "post_ffw_norm_2", layer))


def _add_embedding(e: Emitter, x: View, embeddings: View, layer: int) -> View:
    """x plus what the layer's embedding makes of it."""
    return e.add("per_layer_residual", layer, x, gated_embedding(e, x, embeddings, layer))


def gated_embedding(e: Emitter, x: View, embeddings: View, layer: int) -> View:
    """rms(proj(gelu(x inp_gate) * e[layer]), post_norm)."""
    hidden, width = e.config.hidden, e.config.per_layer_width
    gate = e.linear(x, "inp_gate", layer, width, hidden)
    gated = e.builder.emit(
        Opcode.SWIGLU,
        f"per_layer_gate[{layer}]",
        gate=gate,
        up=embeddings[layer * width : (layer + 1) * width],
        activation=GELU,
    )
    return e.norm(e.linear(gated, "proj", layer, hidden, width), "post_norm", layer)
