"""The block behind the last layer that predicts the token after the next one: ``qwen35``,
``qwen35moe``, ``qwen3next``, ``glm4moe``, ``deepseek2``.

It reads the normed state h of a position and the token that follows: x = Weh [rms(e, enorm);
rms(h, hnorm)], then the family's attention over its own keys and values and the feed-forward block,
then a norm and the output projection. The normed state it computes takes the place of h to predict
one token more. Its key of a token lies at the token's position."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from contract.errors import UnsupportedModel
from contract.ir.graph import Graph, GraphBuilder, View
from contract.opcodes import Opcode
from reference.hidden_rows import HIDDEN_ROWS
from reference.limits import Limits
from reference.model.config import ModelConfig
from reference.model.families.attention import attention, gated_attention
from reference.model.families.emitter import Emitter, file_name, label
from reference.model.families.feed_forward import add_feed_forward
from reference.model.families.forward import logits, output_weight, store_hidden
from reference.model.families.latent import latent_attention
from reference.model.families.step_ends import open_step
from reference.model.families.tensors import ModelTensors

T = TypeVar("T")
WITH_DRAFT_BLOCK = ("qwen35", "qwen35moe", "qwen3next", "glm4moe", "deepseek2")
EMBEDDING = "nextn.embed_tokens"
HEAD_NORM = "nextn.shared_head_norm"
HEAD = "nextn.shared_head_head"
"""Tensors that a block may have for itself instead of the model's."""


def build_draft_block(config: ModelConfig, tensors: ModelTensors, limits: Limits) -> Graph:
    """The graph of the first draft block. Of each query token it reads the row of the table of
    hidden states that belongs to the position before, and stores those of the output rows there.
    Raises ModelFileError for a missing tensor or a wrong shape, UnsupportedModel for a model
    without a block, and for a tensor of the block that no formula reads."""
    if not config.draft_blocks or config.architecture not in WITH_DRAFT_BLOCK:
        raise UnsupportedModel(
            tensors.path,
            f"the {config.architecture} model",
            f"has {config.draft_blocks} draft blocks",
            f"this build reads one of {', '.join(WITH_DRAFT_BLOCK)}",
        )
    block = config.layers
    e = Emitter(GraphBuilder(f"{config.architecture} draft"), _with_block(config), tensors, limits)
    x = _joined(e, block)
    if config.latent is not None:
        mixed = latent_attention(e, x, block)
    elif config.delta_net is None:
        mixed = attention(e, x, block, query_key_norm=e.has("attn_q_norm.weight", block))
    else:
        mixed = gated_attention(e, x, block)
    norm = "post_attention_norm" if config.latent is None else "ffn_norm"
    x = add_feed_forward(e, x, mixed, block, norm)
    x = e.builder.emit(Opcode.SELECT_ROWS, "select_rows", x=x, output_rows=e.output_rows)
    own_norm = e.has(f"{HEAD_NORM}.weight", block)
    h = e.norm(x, HEAD_NORM, block) if own_norm else e.norm(x, "output_norm")
    store_hidden(e, h, "rows")
    shape = config.vocab, config.hidden
    own_head = e.has(f"{HEAD}.weight", block)
    logits(e, h, e.weight(HEAD, block, *shape) if own_head else output_weight(e))
    tensors.reject_unused(config.architecture, _main_tensors(tensors, block))
    return e.builder.build()


def _with_block(config: ModelConfig) -> ModelConfig:
    """The configuration with the block as one more layer, like the last layer that attends."""
    like = config.attention_layers[-1]
    net, mixture = config.delta_net, config.experts

    def more(values: tuple[T, ...]) -> tuple[T, ...]:
        return (*values, values[like])

    return replace(
        config,
        layers=config.layers + 1,
        heads=more(config.heads),
        kv_heads=more(config.kv_heads),
        head_dims=more(config.head_dims),
        feed_forward=more(config.feed_forward),
        ropes=more(config.ropes),
        windows=more(config.windows),
        attention_scales=more(config.attention_scales),
        kv_layers=(*config.kv_layers, config.layers),
        experts=mixture and replace(mixture, used=more(mixture.used), widths=more(mixture.widths)),
        delta_net=net and replace(net, layers=(*net.layers, False)),
    )


def _joined(e: Emitter, block: int) -> View:
    """Weh [rms(embedding of the token, enorm); rms(state of the position before, hnorm)]."""
    builder, config = e.builder, e.config
    open_step(builder, e.limits, e.query, e.resolved)
    own = e.has(f"{EMBEDDING}.weight", block)
    name, layer = (EMBEDDING, block) if own else ("token_embd", None)
    table = e.weight(name, layer, config.vocab, config.hidden)
    embedded = builder.emit(Opcode.EMBED, "embed", query=e.resolved, table=table)
    before = read_hidden(e)
    joined = builder.scratch(f"scratch.{label('nextn', block)}", "tokens", 2 * config.hidden)
    e.norm(embedded, "nextn.enorm", block, y=joined[0 : config.hidden])
    e.norm(before, "nextn.hnorm", block, y=joined[config.hidden : 2 * config.hidden])
    return e.linear(joined, "nextn.eh_proj", block, config.hidden, 2 * config.hidden)


def read_hidden(e: Emitter) -> View:
    """The row of the table of hidden states that belongs to each query token: [tokens, hidden]."""
    rows = e.builder.request(HIDDEN_ROWS, "tokens")
    return e.builder.emit(Opcode.SELECT_ROWS, "hidden", x=e.hidden_table, output_rows=rows)


def _main_tensors(tensors: ModelTensors, block: int) -> tuple[str, ...]:
    """The names of all tensors that are no part of the block."""
    own = file_name("", block)
    return tuple(name for name in tensors.tensors if not name.startswith(own))
