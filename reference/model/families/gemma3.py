"""``gemma3``: norms before and after both blocks, gelu, windows in all but every n-th layer."""

from __future__ import annotations

from contract.ir.graph import Graph, GraphBuilder
from reference.limits import Limits
from reference.model.config import ModelConfig
from reference.model.families.attention import attention
from reference.model.families.emitter import GELU, Emitter
from reference.model.families.feed_forward import dense
from reference.model.families.tensors import ModelTensors


def build(config: ModelConfig, tensors: ModelTensors, limits: Limits) -> Graph:
    """The graph of a Gemma 3 model."""
    e = Emitter(GraphBuilder(config.architecture), config, tensors, limits)
    x = e.embed()
    for layer in range(config.layers):
        attended = attention(e, x, layer, query_key_norm=True)
        attended = e.norm(attended, "post_attention_norm", layer)
        x = e.add("attn_residual", layer, x, attended)
        fed = e.norm(dense(e, x, layer, "ffn_norm", GELU), "post_ffw_norm", layer)
        x = e.add("ffn_residual", layer, x, fed)
    e.head(x)
    return e.builder.build()
