"""``falcon-h1``: attention and Mamba-2 side by side, both of the same norm."""

from __future__ import annotations

from contract.ir.graph import Graph, GraphBuilder
from reference.limits import Limits
from reference.model.config import ModelConfig
from reference.model.families.attention import NORM, attention
from reference.model.families.emitter import Emitter
from reference.model.families.feed_forward import add_feed_forward
from reference.model.families.mamba import mamba
from reference.model.families.tensors import ModelTensors


def build(config: ModelConfig, tensors: ModelTensors, limits: Limits) -> Graph:
    """x = embed; in each layer x += attention(h) + mamba(h) of h = rms(x), x += ffn(x)."""
    e = Emitter(GraphBuilder(config.architecture), config, tensors, limits)
    x = e.embed()
    for layer in range(config.layers):
        e.auxiliary_state(x, layer)
        h = e.norm(x, NORM, layer)
        attended = attention(e, h, layer, query_key_norm=False, norm=None)
        mixed = e.add("mixed", layer, attended, mamba(e, h, layer, norm=None))
        x = add_feed_forward(e, x, mixed, layer, "ffn_norm")
    e.head(x)
    return e.builder.build()
