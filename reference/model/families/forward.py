"""The forward pass of a model: the embedding, the layers, and the head that ends in sampling."""

from __future__ import annotations

from collections.abc import Callable

from contract.ir.graph import Graph, GraphBuilder, View
from contract.ir.unread_outputs import HIDDEN_STATES
from contract.opcodes import Opcode
from reference.hidden_rows import HIDDEN_PAIRS
from reference.limits import Limits
from reference.model.config import ModelConfig
from reference.model.dflash import DFlashHead
from reference.model.families.auxiliary_states import copy_auxiliary_state, fuse_auxiliary_states
from reference.model.families.block_keys import write_block_keys
from reference.model.families.emitter import Emitter
from reference.model.families.step_ends import emit_tokens, open_step
from reference.model.families.tensors import ModelTensors

Layer = Callable[[Emitter, View, int], View]
"""Emits a layer, given the residual stream before it; returns that behind it."""


def embed(e: Emitter) -> View:
    """The residual stream of the step's tokens, [tokens, hidden]."""
    config = e.config
    table = e.weight("token_embd", None, config.vocab, config.hidden)
    open_step(e.builder, e.limits, e.query, e.resolved)
    x = e.builder.emit(Opcode.EMBED, "embed", query=e.resolved, table=table)
    if config.embedding_scale == 1.0:
        return x
    return e.builder.emit(Opcode.SCALE, "embed_scale", x=x, factor=config.embedding_scale)


def forward(
    config: ModelConfig,
    tensors: ModelTensors,
    limits: Limits,
    layer: Layer,
    final_norm: str = "output_norm",
    centred: bool = False,
    embedding: Callable[[Emitter], View] = embed,
) -> Graph:
    """The graph of the forward pass: x = embedding; x = layer(x) for each layer; logits of the last
    norm, of x without its mean if ``centred``. Raises ModelFileError or UnsupportedModel for
    tensors that do not fit ``config``."""
    e = Emitter(GraphBuilder(config.architecture), config, tensors, limits, final_norm)
    x = embedding(e)
    for number in range(config.layers):
        auxiliary_state(e, x, number)
        x = layer(e, x, number)
    head(e, e.centred(x, final_norm) if centred else x)
    return e.builder.build()


def auxiliary_state(e: Emitter, x: View, layer: int) -> None:
    """Emit the copy of a layer's input where a head reads it."""
    if e.tensors.head is not None:
        copy_auxiliary_state(e.builder, e.tensors.head, x, layer, e.config.hidden)


def head(e: Emitter, x: View) -> None:
    """Emit the logits of every output row and the sampling of one token per row."""
    builder, config = e.builder, e.config
    if e.limits.hidden_rows:
        auxiliary_state(e, x, config.layers)
        _keep_states(e, x)
    x = builder.emit(Opcode.SELECT_ROWS, "select_rows", x=x, output_rows=e.output_rows)
    if e.limits.hidden_states:
        # A node of its own, which steps leave out that are not asked for it.
        e.norm(x, e.final_norm, y=builder.output(HIDDEN_STATES, "rows", config.hidden))
    logits(e, e.norm(x, e.final_norm), output_weight(e))


def _keep_states(e: Emitter, x: View) -> None:
    """Emit what a draft block or head reads of the step's tokens, which outlives the step."""
    head = e.tensors.head
    if head is None:
        store_hidden(e, e.norm(x, e.final_norm), "tokens")
        return
    fused = fuse_auxiliary_states(e.builder, head, e.config.hidden)
    if isinstance(head, DFlashHead):
        write_block_keys(e.builder, head, fused, e.query, e.limits)
    else:
        store_hidden(e, fused, "tokens")


def store_hidden(e: Emitter, h: View, count: str) -> None:
    """Emit the copy of the rows of ``h``, one for each of ``count`` ("tokens" or "rows"), to
    the rows of the table of hidden states that the step's inputs name."""
    pairs = e.builder.request(HIDDEN_PAIRS, count, 2)
    e.builder.emit(Opcode.COPY_ROWS, "store_hidden", source=h, pairs=pairs, target=e.hidden_table)


def output_weight(e: Emitter) -> View:
    """The matrix of the logits: the file's own, or that of the embedding."""
    name = "output" if e.has("output.weight") else "token_embd"
    return e.weight(name, None, e.config.vocab, e.config.hidden)


def logits(e: Emitter, h: View, weight: View, table: View | None = None) -> None:
    """Emit the logits of the normed output rows ``h``, of all tokens or of the frequent ones of the
    limits, and the sampling of one token per row, which ``table`` names by another vocabulary if
    given: such a vocabulary has frequent tokens only."""
    builder, config = e.builder, e.config
    rows, vocab = e.output_rows, config.vocab
    few = e.limits.frequent_tokens if table is None else 0
    if 0 < few < vocab:
        vocab, weight = few, View(weight.buffer, rows=few)
    logits = builder.output("output.logits", "rows", vocab)
    after: list[tuple[Opcode, str, dict[str, View | float]]] = []
    if e.has("output.bias"):
        bias = e.parameters("output.bias", None, config.vocab)
        bias = bias if vocab == config.vocab else bias[0:vocab]
        after.append((Opcode.BIAS_ADD, "lm_head_bias", {"bias": bias}))
    if config.logit_scale != 1.0:
        after.append((Opcode.SCALE, "logit_scale", {"factor": config.logit_scale}))
    if config.logit_cap > 0:
        after.append((Opcode.SOFT_CAP, "logit_cap", {"cap": config.logit_cap}))
    y = builder.emit(
        Opcode.LM_HEAD, "lm_head", x=h, weight=weight, logits=None if after else logits
    )
    for n, (opcode, name, operands) in enumerate(after):
        last = n == len(after) - 1
        y = builder.emit(opcode, name, x=y, **operands, y=logits if last else None)
    views = logits, rows, e.query, e.resolved
    emit_tokens(builder, e.limits, vocab, *views, table)
