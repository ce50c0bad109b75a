"""``qwen35``, ``qwen35moe``, ``qwen3next``: delta nets with a layer that attends every few."""

from __future__ import annotations

from functools import partial

from contract.ir.graph import Graph, GraphBuilder
from reference.model.config import ModelConfig
from reference.model.families.attention import gated_attention
from reference.model.families.delta_net import delta_net
from reference.model.families.emitter import Emitter
from reference.model.families.feed_forward import add_feed_forward
from reference.model.families.tensors import Limits, ModelTensors


def build_hybrid(
    config: ModelConfig, tensors: ModelTensors, limits: Limits, *, grouped: bool
) -> Graph:
    """Each layer x += delta net or gated attention, x += ffn(rms(x, post_attention_norm))."""
    e = Emitter(GraphBuilder(config.architecture), config, tensors, limits)
    x = e.embed()
    for layer in range(config.layers):
        if config.is_recurrent(layer):
            mixed = delta_net(e, x, layer, grouped=grouped)
        else:
            mixed = gated_attention(e, x, layer)
        x = add_feed_forward(e, x, mixed, layer, "post_attention_norm")
    e.head(x)
    return e.builder.build()


build_qwen35 = partial(build_hybrid, grouped=False)
build_qwen3next = partial(build_hybrid, grouped=True)
