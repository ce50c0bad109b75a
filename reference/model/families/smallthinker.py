"""``smallthinker``: experts are chosen by what their layer reads, before it attends."""

from __future__ import annotations

from contract.ir.graph import Graph, View
from reference.limits import Limits
from reference.model.config import ModelConfig
from reference.model.families.attention import attention
from reference.model.families.emitter import RELU, Emitter
from reference.model.families.feed_forward import experts, route
from reference.model.families.forward import forward
from reference.model.families.tensors import ModelTensors


def build(config: ModelConfig, tensors: ModelTensors, limits: Limits) -> Graph:
    """In each layer, experts are chosen by x; x += attention(rms(x)), x += experts(rms(x))."""
    return forward(config, tensors, limits, _layer)


def _layer(e: Emitter, x: View, layer: int) -> View:
    routing = route(e, x, layer)
    attended = attention(e, x, layer, query_key_norm=False)
    x, h = e.add_and_norm(x, attended, layer, "ffn_norm")
    return experts(e, h, layer, routing, RELU, residual=x)
