"""Families with recurrent layers between layers that attend: qwen35, qwen35moe, qwen3next, lfm2,
lfm2moe, granitehybrid."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from contract.errors import ModelFileError
from contract.ir.graph import Graph, GraphBuilder, View
from contract.lazy_dataclass import dataclass
from reference.limits import Limits
from reference.model.config import ModelConfig
from reference.model.families.attention import attention, gated_attention
from reference.model.families.delta_net import delta_net
from reference.model.families.emitter import Emitter, file_name
from reference.model.families.feed_forward import add_feed_forward
from reference.model.families.mamba import mamba
from reference.model.families.short_conv import short_conv
from reference.model.families.tensors import ModelTensors

ATTENTION_TENSOR = "attn_q.weight"
"""A tensor that attention layers have and recurrent layers lack."""

Mixer = Callable[[Emitter, View, int], View]
"""Emits what a layer adds to the residual stream before its feed forward."""


@dataclass(frozen=True, slots=True)
class Hybrid:
    """The differences between the layers of families.

    ``recurrent_tensor`` is one that recurrent layers have and attention layers lack, ``does`` what
    recurrent layers do, ``kind_keys`` the keys that tell the kinds of layers apart. ``ffn_norm``
    is the norm before the feed forward, ``final_norm`` the one before the head."""

    recurrent: Mixer
    attention: Mixer
    recurrent_tensor: str
    does: str
    kind_keys: tuple[str, ...]
    ffn_norm: str
    final_norm: str = "output_norm"

    def build(self, config: ModelConfig, tensors: ModelTensors, limits: Limits) -> Graph:
        """In each layer x += recurrent(x) or attention(x), x += ffn(x)."""
        builder = GraphBuilder(config.architecture)
        e = Emitter(builder, config, tensors, limits, self.final_norm)
        x = e.embed()
        for layer in range(config.layers):
            e.keep_input(x, layer)
            self._check_kind(e, layer)
            mixer = self.recurrent if config.is_recurrent(layer) else self.attention
            x = add_feed_forward(e, x, mixer(e, x, layer), layer, self.ffn_norm)
        e.head(x)
        return builder.build()

    def _check_kind(self, e: Emitter, layer: int) -> None:
        """Raise an error unless the layer's tensors are of the kind the metadata gives the
        layer."""
        recurrent = e.config.is_recurrent(layer)
        foreign = ATTENTION_TENSOR if recurrent else self.recurrent_tensor
        if e.has(foreign, layer):
            kinds = ("attends", self.does)
            keys = " or ".join(f"{e.config.architecture}.{key}" for key in self.kind_keys)
            raise ModelFileError(
                e.tensors.path,
                f"tensor {file_name(foreign, layer)}",
                f"belongs to a layer that {kinds[not recurrent]}, but layer {layer} "
                f"{kinds[recurrent]} by {keys}",
                "the file was converted wrongly",
            )


def _delta_hybrid(grouped: bool) -> Hybrid:
    return Hybrid(
        recurrent=partial(delta_net, grouped=grouped),
        attention=gated_attention,
        recurrent_tensor="ssm_conv1d.weight",
        does="is a delta net",
        kind_keys=("full_attention_interval", "attention.recurrent_layers"),
        ffn_norm="post_attention_norm",
    )


QWEN35 = _delta_hybrid(grouped=False)
QWEN3NEXT = _delta_hybrid(grouped=True)
LFM2 = Hybrid(
    recurrent=short_conv,
    attention=partial(attention, query_key_norm=True),
    recurrent_tensor="shortconv.conv.weight",
    does="convolves",
    kind_keys=("attention.head_count_kv",),
    ffn_norm="ffn_norm",
    final_norm="token_embd_norm",
)
GRANITE_HYBRID = Hybrid(
    recurrent=mamba,
    attention=partial(attention, query_key_norm=False),
    recurrent_tensor="ssm_conv1d.weight",
    does="is a Mamba-2 layer",
    kind_keys=("attention.head_count_kv",),
    ffn_norm="ffn_norm",
)
