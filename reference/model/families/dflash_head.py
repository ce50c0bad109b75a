"""The head ``dflash``, which drafts a block of tokens in one step.

A block is the last token of a sequence and mask tokens behind it. Of their embeddings x every layer
computes x += attn(rms(x, attn_norm)), with norms of each head, and x += ffn(rms(x, ffn_norm)). A
row of a block sees the whole block, and before it the keys that the model's graph has written
(``block_keys.py``); all of the block's keys are written before it is read. The logits of a mask
token's row are those of the token at its position. A layer's window, where it has one, is that of
the block's last row."""

from __future__ import annotations

from dataclasses import replace

from contract.ir.graph import Graph, GraphBuilder
from contract.opcodes import Opcode
from reference.hidden_rows import BLOCK_ENDS
from reference.limits import Limits
from reference.model.config import ModelConfig
from reference.model.dflash import DFlashHead
from reference.model.families.attention import attend, output, project, rotate_and_store
from reference.model.families.block_keys import head_pages
from reference.model.families.feed_forward import add_feed_forward
from reference.model.families.head_parts import finish_head, head_embedding, head_emitters
from reference.model.families.step_ends import open_step
from reference.model.families.tensors import ModelTensors


def build_dflash_head(
    target: ModelConfig, head: DFlashHead, tensors: ModelTensors, limits: Limits
) -> Graph:
    """The graph of a head; ``tensors`` are those of its model, which it uses where it has no
    embedding or output matrix. Raises ModelFileError for a missing tensor or a wrong shape,
    UnsupportedModel for a tensor that no formula reads."""
    config = head.scaled_as(target)
    head = replace(head, config=config)
    builder = GraphBuilder(f"{target.architecture} dflash")
    e, of_target = head_emitters(builder, target, head, tensors, limits)
    open_step(builder, limits, e.query, e.resolved)
    x = builder.emit(Opcode.EMBED, "embed", query=e.resolved, table=head_embedding(e, of_target))
    if config.embedding_scale != 1.0:
        x = builder.emit(Opcode.SCALE, "embed_scale", x=x, factor=config.embedding_scale)
    ends = builder.request(BLOCK_ENDS, "tokens", 4)
    for layer in range(config.layers):
        pages = head_pages(builder, head, layer, limits)
        packed = project(e, x, layer)
        q = rotate_and_store(e, packed, layer, query_key_norm=True, pages=pages)
        attended = output(e, attend(e, q, layer, pages=pages, query=ends), layer)
        x = add_feed_forward(e, x, attended, layer, "ffn_norm")
    x = builder.emit(Opcode.SELECT_ROWS, "select_rows", x=x, output_rows=e.output_rows)
    return finish_head(e, of_target, head, x)
