"""The head ``eagle3``, which predicts the token after the next one.

Of a token with embedding e behind a position with row g it computes x = g + attn([rms(e,
attn_norm); rms(g, attn_norm_2)]), in some heads with the normed g as the first addend, then the
feed-forward block, a norm and the output projection. g are the model's fused auxiliary states
(``auxiliary_states.py``), and x takes their place to predict one token more. Its key of a token
lies at the token's position."""

from __future__ import annotations

from contract.ir.graph import Graph, GraphBuilder, View
from contract.opcodes import Opcode
from reference.limits import Limits
from reference.model.config import ModelConfig
from reference.model.eagle import EagleHead
from reference.model.families.attention import (
    PROJECTIONS,
    attend,
    output,
    packed_views,
    rotate_and_store,
    widths,
)
from reference.model.families.draft_block import read_hidden
from reference.model.families.emitter import Emitter
from reference.model.families.feed_forward import add_feed_forward
from reference.model.families.forward import store_hidden
from reference.model.families.head_parts import finish_head, head_embedding, head_emitters
from reference.model.families.step_ends import open_step
from reference.model.families.tensors import ModelTensors


def build_eagle_head(
    target: ModelConfig, head: EagleHead, tensors: ModelTensors, limits: Limits
) -> Graph:
    """The graph of a head; ``tensors`` are those of its model, which it uses where it has no
    embedding or output matrix. Raises ModelFileError for a missing tensor or a wrong shape,
    UnsupportedModel for a tensor that no formula reads."""
    builder = GraphBuilder(f"{target.architecture} eagle3")
    e, of_target = head_emitters(builder, target, head, tensors, limits)
    joined, g = _joined(e, head_embedding(e, of_target))
    x = add_feed_forward(e, g, _attention(e, joined), 0, "ffn_norm")
    x = builder.emit(Opcode.SELECT_ROWS, "select_rows", x=x, output_rows=e.output_rows)
    store_hidden(e, x, "rows")
    return finish_head(e, of_target, head, x)


def _joined(e: Emitter, table: View) -> tuple[View, View]:
    """[rms(embedding of the token, attn_norm); rms(g, attn_norm_2)], and what the layer adds to."""
    builder, hidden, head = e.builder, e.config.hidden, e.tensors.head
    open_step(builder, e.limits, e.query, e.resolved)
    embedded = builder.emit(Opcode.EMBED, "embed", query=e.resolved, table=table)
    g = read_hidden(e)
    joined = builder.scratch("scratch.joined", "tokens", 2 * hidden)
    e.norm(embedded, "attn_norm", 0, y=joined[0:hidden])
    normed = e.norm(g, "attn_norm_2", 0, y=joined[hidden : 2 * hidden])
    return joined, normed if isinstance(head, EagleHead) and head.normed_residual else g


def _attention(e: Emitter, joined: View) -> View:
    """attn(rope(joined Wq), rope(joined Wk), joined Wv) Wo."""
    packed, parts = packed_views(e, 0)
    q_width, kv_width = widths(e, 0)
    sizes = (q_width, kv_width, kv_width)
    for name, y, width in zip(PROJECTIONS, parts, sizes, strict=True):
        e.linear(joined, name, 0, width, 2 * e.config.hidden, y=y)
    q = rotate_and_store(e, packed, 0, query_key_norm=False)
    return output(e, attend(e, q, 0), 0)
