"""Families with recurrent layers: between layers that attend in qwen35, qwen35moe, qwen3next,
kimi-linear, lfm2, lfm2moe and granitehybrid; beside attention in falcon-h1; in nemotron_h and
nemotron_h_moe, whose layers are one block each."""

from __future__ import annotations

from functools import partial

from contract.errors import ModelFileError
from contract.ir.graph import Graph, View
from contract.lazy_dataclass import dataclass
from contract.opcodes import Opcode
from reference.limits import Limits
from reference.model.config import ModelConfig
from reference.model.families.attention import NORM, attention, gated_attention
from reference.model.families.delta_net import delta_net, kimi_delta_net
from reference.model.families.emitter import RELU, Emitter, file_name
from reference.model.families.feed_forward import add_feed_forward, experts, route
from reference.model.families.forward import Layer, forward
from reference.model.families.latent import latent_attention
from reference.model.families.mamba import mamba
from reference.model.families.short_conv import short_conv
from reference.model.families.tensors import ModelTensors


@dataclass(frozen=True, slots=True)
class Hybrid:
    """The differences between the layers of families.

    ``recurrent`` and ``attention`` emit what such layers add before their feed forward.
    ``recurrent_tensor`` is one that recurrent layers have and attention layers lack,
    ``attention_tensor`` the other way round, ``does`` what recurrent layers do, ``kind_keys`` the
    keys that tell the kinds of layers apart. ``ffn_norm`` is the norm before the feed forward,
    ``final_norm`` the one before the head."""

    recurrent: Layer
    attention: Layer
    recurrent_tensor: str
    does: str
    kind_keys: tuple[str, ...]
    ffn_norm: str
    final_norm: str = "output_norm"
    attention_tensor: str = "attn_q.weight"

    def build(self, config: ModelConfig, tensors: ModelTensors, limits: Limits) -> Graph:
        """In each layer x += recurrent(x) or attention(x), x += ffn(x)."""
        return forward(config, tensors, limits, self._layer, self.final_norm)

    def _layer(self, e: Emitter, x: View, layer: int) -> View:
        self._check_kind(e, layer)
        mixer = self.recurrent if e.config.is_recurrent(layer) else self.attention
        return add_feed_forward(e, x, mixer(e, x, layer), layer, self.ffn_norm)

    def _check_kind(self, e: Emitter, layer: int) -> None:
        """Raise an error unless the layer's tensors are of the kind the metadata gives the
        layer."""
        recurrent = e.config.is_recurrent(layer)
        foreign = self.attention_tensor if recurrent else self.recurrent_tensor
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


QWEN35 = _delta_hybrid(grouped=False).build
QWEN3NEXT = _delta_hybrid(grouped=True).build
KIMI_LINEAR = Hybrid(
    recurrent=kimi_delta_net,
    attention=latent_attention,
    recurrent_tensor="ssm_conv1d_q.weight",
    does="is a delta net",
    kind_keys=("attention.head_count_kv",),
    ffn_norm="ffn_norm",
    attention_tensor="attn_kv_a_mqa.weight",
).build
LFM2 = Hybrid(
    recurrent=short_conv,
    attention=partial(attention, query_key_norm=True),
    recurrent_tensor="shortconv.conv.weight",
    does="convolves",
    kind_keys=("attention.head_count_kv",),
    ffn_norm="ffn_norm",
    final_norm="token_embd_norm",
).build
GRANITE_HYBRID = Hybrid(
    recurrent=mamba,
    attention=partial(attention, query_key_norm=False),
    recurrent_tensor="ssm_conv1d.weight",
    does="is a Mamba-2 layer",
    kind_keys=("attention.head_count_kv",),
    ffn_norm="ffn_norm",
).build


def _side_by_side(e: Emitter, x: View, layer: int) -> View:
    """x += attention(h) + mamba(h) of h = rms(x), then x += ffn(x)."""
    h = e.norm(x, NORM, layer)
    attended = attention(e, h, layer, query_key_norm=False, norm=None)
    mixed = e.add("mixed", layer, attended, mamba(e, h, layer, norm=None))
    return add_feed_forward(e, x, mixed, layer, "ffn_norm")


def _one_block(e: Emitter, x: View, layer: int) -> View:
    """x += block(rms(x, attn_norm)); the block is Mamba-2, attention or a feed forward."""
    return e.add("residual", layer, x, _block(e, x, layer))


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


FALCON_H1 = partial(forward, layer=_side_by_side)
NEMOTRON = partial(forward, layer=_one_block)
