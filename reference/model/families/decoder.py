"""Decoders of attention and dense blocks or experts, which differ in norms and activations."""

from __future__ import annotations

from contract.ir.graph import Graph, View
from contract.lazy_dataclass import dataclass
from reference.limits import Limits
from reference.model.config import ModelConfig
from reference.model.families.attention import (
    NORM,
    attention,
    gated_attention,
    normed_outputs_attention,
    turned_then_normed_attention,
)
from reference.model.families.emitter import SILU, Emitter
from reference.model.families.feed_forward import Gates, add_feed_forward, feed_forward
from reference.model.families.forward import forward
from reference.model.families.latent import latent_attention
from reference.model.families.tensors import ModelTensors


@dataclass(frozen=True, slots=True)
class Decoder:
    """A family of decoders: what its layers have beyond, or instead of, those of llama.

    - ``query_key_norm``: queries and keys are normed per head; None where the file has such norms.
    - ``late_norms``: queries and keys are normed per head after they are rotated.
    - ``gated``: what heads attend to is multiplied by the sigmoid of a product of its own.
    - ``whole_norms``: queries and keys are normed over all heads at once.
    - ``pre_norms``: the input of attention and of the feed-forward block is normed.
    - ``post_norms``: the result of each block is normed before it is added to the residual.
    - ``feed_forward_norm``: the name in the file of the norm of the feed-forward block's input.
    - ``fused_gates``: one tensor holds the rows of gate and up.
    - ``gates``: dense blocks have gates; without, RELU stands for the square of what is positive.
    - ``activation``: the gate's function, a value of the opcode parameter of that name."""

    query_key_norm: bool | None = False
    late_norms: bool = False
    gated: bool = False
    whole_norms: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    feed_forward_norm: str = "ffn_norm"
    fused_gates: bool = False
    gates: bool = True
    activation: int = SILU

    def build(self, config: ModelConfig, tensors: ModelTensors, limits: Limits) -> Graph:
        """The graph of the forward pass, in each layer x += attention(x), then x += ffn(x)."""
        return forward(config, tensors, limits, self._layer)

    def _layer(self, e: Emitter, x: View, layer: int) -> View:
        norm = NORM if self.pre_norms else None
        if e.config.latent is not None:
            attended = latent_attention(e, x, layer)
        elif self.whole_norms:
            attended = normed_outputs_attention(e, x, layer, norm)
        elif self.gated:
            attended = gated_attention(e, x, layer, own_gate=True)
        elif self.late_norms:
            attended = turned_then_normed_attention(e, x, layer)
        else:
            attended = attention(e, x, layer, query_key_norm=self._has_norms(e, layer), norm=norm)
        if not self.post_norms:
            return add_feed_forward(e, x, attended, layer, self.feed_forward_norm, self._gates)
        x = self._add(e, x, attended, layer, "attn_residual", "post_attention_norm")
        fed = feed_forward(e, x, layer, self.feed_forward_norm if norm else None, self._gates)
        return self._add(e, x, fed, layer, "ffn_residual", "post_ffw_norm")

    def _add(self, e: Emitter, x: View, y: View, layer: int, name: str, norm: str) -> View:
        """x plus the norm of a block's result, scaled as the family does."""
        return e.add_scaled(name, layer, x, e.norm(y, norm, layer))

    def _has_norms(self, e: Emitter, layer: int) -> bool:
        if self.query_key_norm is None:
            return e.has("attn_q_norm.weight", layer)
        return self.query_key_norm

    @property
    def _gates(self) -> Gates:
        return Gates(self.activation, self.fused_gates, self.gates)
