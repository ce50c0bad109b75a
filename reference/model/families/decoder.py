"""The pre-norm decoder of llama, qwen2, qwen3 and qwen3moe."""

from __future__ import annotations

from contract.ir.graph import Graph, GraphBuilder
from reference.limits import Limits
from reference.model.config import ModelConfig
from reference.model.families.attention import attention
from reference.model.families.emitter import Emitter
from reference.model.families.feed_forward import add_feed_forward
from reference.model.families.tensors import ModelTensors


def build_decoder(
    config: ModelConfig, tensors: ModelTensors, limits: Limits, *, query_key_norm: bool
) -> Graph:
    """x = embed; in each layer x += attention(x), x += ffn(x); logits of the last norm."""
    e = Emitter(GraphBuilder(config.architecture), config, tensors, limits)
    x = e.embed()
    for layer in range(config.layers):
        attended = attention(e, x, layer, query_key_norm=query_key_norm)
        x = add_feed_forward(e, x, attended, layer, "ffn_norm")
    e.head(x)
    return e.builder.build()
