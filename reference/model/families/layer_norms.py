"""``starcoder2``, ``stablelm``, ``phi2``, ``gptneox``, ``falcon``, ``nemotron``: norms that
subtract the mean and have biases; ``olmo``: such norms without weights."""

from __future__ import annotations

from contract.ir.graph import Graph, GraphBuilder, View
from contract.lazy_dataclass import dataclass
from reference.limits import Limits
from reference.model.config import ModelConfig
from reference.model.families.attention import NORM, attention, normed_outputs_attention
from reference.model.families.emitter import GELU, RELU, Emitter
from reference.model.families.feed_forward import PLAIN_GATES, Gates, dense
from reference.model.families.tensors import ModelTensors

SECOND_NORM = "ffn_norm"
OWN_NORM = "attn_norm_2"
"""What attention reads in Falcon 40B, whose feed forward reads the layer's first norm."""


@dataclass(frozen=True, slots=True)
class LayerNormed:
    """A family of such decoders, whose dense blocks have these gates."""

    gates: Gates = PLAIN_GATES

    def build(self, config: ModelConfig, tensors: ModelTensors, limits: Limits) -> Graph:
        """x = embed; in each layer x += attention(norm(x)), then x += ffn(norm(x)).

        A file without the second norm, or a model of parallel blocks, has in the feed forward the
        first norm, or the second one of the layer's input."""
        e = Emitter(GraphBuilder(config.architecture), config, tensors, limits)
        x = e.embed()
        for layer in range(config.layers):
            e.auxiliary_state(x, layer)
            h = e.layer_norm(x, NORM, layer)
            own = e.has(f"{OWN_NORM}.weight", layer)
            attended = _attention(e, e.layer_norm(x, OWN_NORM, layer) if own else h, layer)
            y = e.add("attn_residual", layer, x, attended)
            if config.bare_norms or e.has(f"{SECOND_NORM}.weight", layer):
                h = e.layer_norm(x if config.parallel else y, SECOND_NORM, layer)
            x = e.add("ffn_residual", layer, y, dense(e, h, layer, None, self.gates))
        e.head(e.centred(x, e.final_norm))
        return e.builder.build()


def _attention(e: Emitter, h: View, layer: int) -> View:
    """Attention of h; heads are normed where the file has such norms."""
    if e.has("attn_q_norm.weight", layer):
        return normed_outputs_attention(e, h, layer, None, heads_apart=True)
    return attention(e, h, layer, query_key_norm=False, norm=None)


GATED = LayerNormed()
UNGATED = LayerNormed(Gates(GELU, gated=False))
SQUARED = LayerNormed(Gates(RELU, gated=False))
