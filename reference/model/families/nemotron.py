"""``nemotron_h`` and ``nemotron_h_moe``: a layer is one block: Mamba-2, attention or a feed
forward."""

from __future__ import annotations

from contract.ir.graph import Graph, GraphBuilder, View
from contract.opcodes import Opcode
from reference.limits import Limits
from reference.model.config import ModelConfig
from reference.model.families.attention import NORM, attention
from reference.model.families.emitter import RELU, Emitter
from reference.model.families.feed_forward import experts, route
from reference.model.families.mamba import mamba
from reference.model.families.tensors import ModelTensors


def build(config: ModelConfig, tensors: ModelTensors, limits: Limits) -> Graph:
    """x = embed; in each layer x += block(rms(x, attn_norm))."""
    e = Emitter(GraphBuilder(config.architecture), config, tensors, limits)
    x = e.embed()
    for layer in range(config.layers):
        e.auxiliary_state(x, layer)
        x = e.add("residual", layer, x, _block(e, x, layer))
    e.head(x)
    return e.builder.build()


def _block(e: Emitter, x: View, layer: int) -> View:
    config = e.config
    if config.is_recurrent(layer):
        return mamba(e, x, layer)
    if config.kv_heads[layer]:
        return attention(e, x, layer, query_key_norm=False)
    h = e.norm(x, NORM, layer)
    if config.experts is None:
        return _squared(e, h, layer, "", config.feed_forward[layer])
    shared = _squared(e, h, layer, "_shexp", config.experts.shared_width)
    return experts(e, h, layer, route(e, h, layer), RELU, residual=shared)


def _squared(e: Emitter, h: View, layer: int, suffix: str, width: int) -> View:
    """Wdown relu(Wup h)^2."""
    up = e.linear(h, f"ffn_up{suffix}", layer, width, e.config.hidden)
    squared = e.builder.emit(
        Opcode.SWIGLU, f"ffn_squared{suffix}[{layer}]", gate=up, up=up, activation=RELU
    )
    return e.linear(squared, f"ffn_down{suffix}", layer, e.config.hidden, width)
