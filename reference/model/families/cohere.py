"""``command-r`` and ``cohere2``: attention and feed forward read the same norm, which subtracts the
mean."""

from __future__ import annotations

from contract.ir.graph import Graph, GraphBuilder
from reference.limits import Limits
from reference.model.config import ModelConfig
from reference.model.families.attention import attention, normed_outputs_attention
from reference.model.families.emitter import Emitter
from reference.model.families.feed_forward import dense
from reference.model.families.tensors import ModelTensors

NORM = "attn_norm"


def build(config: ModelConfig, tensors: ModelTensors, limits: Limits) -> Graph:
    """x = embed; in each layer x += attention(c) + ffn(c), where c is x without its mean."""
    e = Emitter(GraphBuilder(config.architecture), config, tensors, limits)
    x = e.embed()
    for layer in range(config.layers):
        e.auxiliary_state(x, layer)
        centred = e.centred(x, NORM, layer)
        if e.has("attn_q_norm.weight", layer):  # Command R+
            attended = normed_outputs_attention(e, centred, layer, NORM, heads_apart=True)
        else:
            attended = attention(e, centred, layer, query_key_norm=False)
        fed = dense(e, centred, layer, NORM)
        x = e.add("ffn_residual", layer, e.add("attn_residual", layer, x, attended), fed)
    e.head(e.centred(x, e.final_norm))
    return e.builder.build()
