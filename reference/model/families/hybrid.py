"""``qwen35``, ``qwen35moe``, ``qwen3next``: delta-net layers, with attention in every n-th
layer."""

from __future__ import annotations

from functools import partial

from contract.errors import ModelFileError
from contract.ir.graph import Graph, GraphBuilder
from reference.limits import Limits
from reference.model.config import ModelConfig
from reference.model.families.attention import gated_attention
from reference.model.families.delta_net import delta_net
from reference.model.families.emitter import Emitter, file_name
from reference.model.families.feed_forward import add_feed_forward
from reference.model.families.tensors import ModelTensors

ATTENTION_TENSOR = "attn_q.weight"
DELTA_NET_TENSOR = "ssm_conv1d.weight"
"""A tensor that recurrent layers have and attention layers lack."""
KIND_KEYS = ("full_attention_interval", "attention.recurrent_layers")


def build_hybrid(
    config: ModelConfig, tensors: ModelTensors, limits: Limits, *, grouped: bool
) -> Graph:
    """Each layer x += delta net or gated attention, x += ffn(rms(x, post_attention_norm))."""
    e = Emitter(GraphBuilder(config.architecture), config, tensors, limits)
    x = e.embed()
    for layer in range(config.layers):
        _check_kind(e, layer)
        if config.is_recurrent(layer):
            mixed = delta_net(e, x, layer, grouped=grouped)
        else:
            mixed = gated_attention(e, x, layer)
        x = add_feed_forward(e, x, mixed, layer, "post_attention_norm")
    e.head(x)
    return e.builder.build()


def _check_kind(e: Emitter, layer: int) -> None:
    """Raise an error unless the layer's tensors are of the kind the metadata gives the layer."""
    recurrent = e.config.is_recurrent(layer)
    foreign = ATTENTION_TENSOR if recurrent else DELTA_NET_TENSOR
    if e.has(foreign, layer):
        kinds = ("attends", "is a delta net")
        keys = " or ".join(f"{e.config.architecture}.{key}" for key in KIND_KEYS)
        raise ModelFileError(
            e.tensors.path,
            f"tensor {file_name(foreign, layer)}",
            f"belongs to a layer that {kinds[not recurrent]}, but layer {layer} "
            f"{kinds[recurrent]} by {keys}",
            "the file was converted wrongly",
        )


build_qwen35 = partial(build_hybrid, grouped=False)
build_qwen3next = partial(build_hybrid, grouped=True)
