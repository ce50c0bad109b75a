"""Families whose norms subtract the mean: ``starcoder2``, ``stablelm``, ``phi2``, ``gptneox``,
``falcon``, ``nemotron``, ``gpt2`` and ``starcoder``, with biases of their own; ``olmo``, without
weights; ``command-r`` and ``cohere2``, whose two blocks read one norm."""

from __future__ import annotations

from functools import partial

from contract.ir.graph import View
from reference.model.families.attention import NORM, attention, normed_outputs_attention
from reference.model.families.emitter import GELU, RELU, Emitter
from reference.model.families.feed_forward import PLAIN_GATES, Gates, dense
from reference.model.families.forward import forward
from reference.model.families.positions import embed_with_positions

SECOND_NORM = "ffn_norm"
OWN_NORM = "attn_norm_2"
"""What attention reads in Falcon 40B, whose feed forward reads the layer's first norm."""


def _with_biases(e: Emitter, x: View, layer: int, gates: Gates = PLAIN_GATES) -> View:
    """x += attention(norm(x)), then x += ffn(norm(x)).

    A file without the second norm, or a model of parallel blocks, has in the feed forward the first
    norm, or the second one of the layer's input."""
    h = e.layer_norm(x, NORM, layer)
    own = e.has(f"{OWN_NORM}.weight", layer)
    attended = _attention(e, e.layer_norm(x, OWN_NORM, layer) if own else h, layer, None)
    y = e.add("attn_residual", layer, x, attended)
    if e.config.bare_norms or e.has(f"{SECOND_NORM}.weight", layer):
        h = e.layer_norm(x if e.config.parallel else y, SECOND_NORM, layer)
    return e.add("ffn_residual", layer, y, dense(e, h, layer, None, gates))


def _parallel(e: Emitter, x: View, layer: int) -> View:
    """x += attention(c) + ffn(c), where c is x without its mean."""
    c = e.centred(x, NORM, layer)
    attended = _attention(e, c, layer, NORM)
    fed = dense(e, c, layer, NORM)
    return e.add("ffn_residual", layer, e.add("attn_residual", layer, x, attended), fed)


def _attention(e: Emitter, x: View, layer: int, norm: str | None) -> View:
    """Attention of x, or of rms(x, norm); heads are normed where the file has such norms, as in
    StableLM 2 12B and Command R+."""
    if e.has("attn_q_norm.weight", layer):
        return normed_outputs_attention(e, x, layer, norm, heads_apart=True)
    return attention(e, x, layer, query_key_norm=False, norm=norm)


def _plain(activation: int) -> partial[View]:
    """Layers whose feed forward has no gates."""
    return partial(_with_biases, gates=Gates(activation, gated=False))


GATED = partial(forward, layer=_with_biases, centred=True)
UNGATED = partial(forward, layer=_plain(GELU), centred=True, embedding=embed_with_positions)
SQUARED = partial(forward, layer=_plain(RELU), centred=True)
COHERE = partial(forward, layer=_parallel, centred=True)
