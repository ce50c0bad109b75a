"""What the graphs of heads have in common: their embeddings, and their logits."""

from __future__ import annotations

from dataclasses import replace

from contract.dtypes import I32
from contract.errors import ModelFileError
from contract.ir.graph import BufferKind, Graph, GraphBuilder, View
from reference.limits import Limits
from reference.model.config import ModelConfig
from reference.model.draft_head import EMBEDDING, TOKEN_TABLE, TOKENS, DraftHead
from reference.model.families.auxiliary_states import FUSE, FUSE_NORM, head_tensors
from reference.model.families.emitter import Emitter
from reference.model.families.forward import logits, output_weight
from reference.model.families.tensors import ModelTensors


def head_emitters(
    builder: GraphBuilder,
    target: ModelConfig,
    head: DraftHead,
    tensors: ModelTensors,
    limits: Limits,
) -> tuple[Emitter, Emitter]:
    """The emitters of the head and of its model, whose tensors are ``tensors``."""
    own = head_tensors(head)
    own.head = head
    vocab = target.vocab if head.tokens is None else len(head.tokens)
    e = Emitter(builder, replace(head.config, vocab=vocab), own, limits)
    return e, Emitter(builder, target, tensors, limits)


def head_embedding(e: Emitter, target: Emitter) -> View:
    """The embedding table: the head's own or the model's."""
    if not e.has(EMBEDDING):
        return target.weight("token_embd", None, target.config.vocab, target.config.hidden)
    rows = e.tensors.tensors[EMBEDDING].shape[0]
    if rows < target.config.vocab:
        raise ModelFileError(
            e.tensors.path,
            f"tensor {EMBEDDING}",
            f"has {rows} rows, the model has {target.config.vocab} tokens",
            "take the head of this model",
        )
    return e.weight("token_embd", None, rows, e.config.hidden)


def finish_head(e: Emitter, target: Emitter, head: DraftHead, x: View) -> Graph:
    """Emit the logits of the output rows ``x``, and the sampling of the model's tokens. Returns the
    verified graph; raises UnsupportedModel for a tensor that no formula reads."""
    matrix = output_weight(e if head.owns_output else target)
    table = None
    if head.tokens is not None:
        table = e.builder.buffer(TOKEN_TABLE, BufferKind.CONSTANT, I32, (len(head.tokens),))
    logits(e, e.norm(x, "output_norm"), matrix, table)
    # The model's graph reads these.
    e.tensors.used.update((FUSE, FUSE_NORM, TOKENS) if head.norms_states else (FUSE, TOKENS))
    e.tensors.reject_unused(head.config.architecture)
    return e.builder.build()
