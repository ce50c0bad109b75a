"""Decoders of attention and dense blocks: llama, mistral3, smollm3, granite, glm4, phi3, olmo2,
qwen2, qwen3, qwen3moe, gemma3, gpt-oss."""

from __future__ import annotations

from contract.ir.graph import Graph, GraphBuilder, View
from contract.lazy_dataclass import dataclass
from reference.limits import Limits
from reference.model.config import ModelConfig
from reference.model.families.attention import attention, normed_outputs_attention
from reference.model.families.emitter import SILU, Emitter
from reference.model.families.feed_forward import Gates, add_feed_forward, dense
from reference.model.families.tensors import ModelTensors


@dataclass(frozen=True, slots=True)
class Decoder:
    """A family of decoders: what its layers have beyond, or instead of, those of llama.

    - ``query_key_norm``: queries and keys are normed per head.
    - ``pre_norms``: the input of attention and of the feed-forward block is normed.
    - ``post_norms``: the result of each block is normed before it is added to the residual.
    - ``feed_forward_norm``: the name in the file of the norm of the feed-forward block's input.
    - ``fused_gates``: one tensor holds the rows of gate and up.
    - ``activation``: the gate's function, a value of the opcode parameter of that name."""

    query_key_norm: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    feed_forward_norm: str = "ffn_norm"
    fused_gates: bool = False
    activation: int = SILU

    def build(self, config: ModelConfig, tensors: ModelTensors, limits: Limits) -> Graph:
        """The graph of the forward pass: x = embed; in each layer x += attention(x), then
        x += ffn(x); logits of the last norm. Raises ModelFileError or UnsupportedModel for tensors
        that do not fit ``config``."""
        e = Emitter(GraphBuilder(config.architecture), config, tensors, limits)
        x = e.embed()
        for layer in range(config.layers):
            e.auxiliary_state(x, layer)
            x = self._layer(e, x, layer)
        e.head(x)
        return e.builder.build()

    def _layer(self, e: Emitter, x: View, layer: int) -> View:
        if self.pre_norms:
            attended = attention(e, x, layer, query_key_norm=self.query_key_norm)
        else:
            attended = normed_outputs_attention(e, x, layer)
        if not self.post_norms and e.config.residual_scale == 1.0:
            return add_feed_forward(e, x, attended, layer, self.feed_forward_norm, self._gates)
        x = self._add(e, x, attended, layer, "attn_residual", "post_attention_norm")
        norm = self.feed_forward_norm if self.pre_norms else None
        fed = dense(e, x, layer, norm, self._gates)
        return self._add(e, x, fed, layer, "ffn_residual", "post_ffw_norm")

    def _add(self, e: Emitter, x: View, y: View, layer: int, name: str, norm: str) -> View:
        """x plus the result of a block, normed and scaled as the family does."""
        if self.post_norms:
            y = e.norm(y, norm, layer)
        return e.add_scaled(name, layer, x, y)

    @property
    def _gates(self) -> Gates:
        return Gates(self.activation, self.fused_gates)
