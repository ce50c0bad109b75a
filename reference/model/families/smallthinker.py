"""``smallthinker``: experts are chosen by what their layer reads, before it attends."""

from __future__ import annotations

from contract.ir.graph import Graph, GraphBuilder
from reference.limits import Limits
from reference.model.config import ModelConfig
from reference.model.families.attention import attention
from reference.model.families.emitter import RELU, Emitter
from reference.model.families.feed_forward import experts, route
from reference.model.families.forward import auxiliary_state, embed, head
from reference.model.families.tensors import ModelTensors


def build(config: ModelConfig, tensors: ModelTensors, limits: Limits) -> Graph:
    """x = embed; in each layer experts by x, x += attention(rms(x)), x += experts(rms(x))."""
    e = Emitter(GraphBuilder(config.architecture), config, tensors, limits)
    x = embed(e)
    for layer in range(config.layers):
        auxiliary_state(e, x, layer)
        routing = route(e, x, layer)
        attended = attention(e, x, layer, query_key_norm=False)
        x, h = e.add_and_norm(x, attended, layer, "ffn_norm")
        x = experts(e, h, layer, routing, RELU, residual=x)
    head(e, x)
    return e.builder.build()
