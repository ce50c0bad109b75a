"""Families whose norms subtract the mean: ``starcoder2``, ``stablelm``, ``phi2``, ``gptneox``, with
biases of their own, and ``command-r`` and ``cohere2``, whose two blocks read one norm."""

from __future__ import annotations

from functools import partial

from contract.ir.graph import View
from reference.model.families.attention import NORM, attention
from reference.model.families.emitter import GELU, Emitter, forward
from reference.model.families.feed_forward import PLAIN_GATES, Gates, dense

SECOND_NORM = "ffn_norm"


def _with_biases(e: Emitter, x: View, layer: int, gates: Gates = PLAIN_GATES) -> View:
    """x += attention(norm(x)), then x += ffn(norm(x)).

    A file without the second norm, or a model of parallel blocks, has in the feed forward the first
    norm, or the second one of the layer's input."""
    h = e.layer_norm(x, NORM, layer)
    attended = attention(e, h, layer, query_key_norm=False, norm=None)
    y = e.add("attn_residual", layer, x, attended)
    if e.has(f"{SECOND_NORM}.weight", layer):
        h = e.layer_norm(x if e.config.parallel else y, SECOND_NORM, layer)
    return e.add("ffn_residual", layer, y, dense(e, h, layer, None, gates))


def _parallel(e: Emitter, x: View, layer: int) -> View:
    """x += attention(c) + ffn(c), where c is x without its mean."""
    c = e.centred(x, NORM, layer)
    attended = attention(e, c, layer, query_key_norm=False)
    fed = dense(e, c, layer, NORM)
    return e.add("ffn_residual", layer, e.add("attn_residual", layer, x, attended), fed)


GATED = partial(forward, layer=_with_biases, centred=True)
UNGATED = partial(
    forward, layer=partial(_with_biases, gates=Gates(GELU, gated=False)), centred=True
)
COHERE = partial(forward, layer=_parallel, centred=True)
