"""The keys and values that a model's graph computes for a DFlash head.

They are those of the fused auxiliary states, of which no query is made, in pages of the head's own.
So a sequence that has pages has the head's keys, whatever becomes of its drafts."""

from __future__ import annotations

from contract.arithmetic import PAGE_TOKENS
from contract.dtypes import F32
from contract.ir.graph import BufferKind, GraphBuilder, View
from contract.opcodes import Opcode
from reference.hidden_rows import HEAD_PAGES
from reference.limits import Limits
from reference.model.dflash import DFlashHead
from reference.model.families.auxiliary_states import FUSE_NORM, head_tensors
from reference.model.families.tensors import ModelTensors


def write_block_keys(
    builder: GraphBuilder, head: DFlashHead, fused: View, query: View, limits: Limits
) -> None:
    """Emit rope(norm(g Wk)) and g Wv of every layer of the head, and their write, of the norm g of
    the fused states [tokens, head.hidden]."""
    config, tensors = head.config, head_tensors(head)
    norm = tensors.parameters(builder, "head.states_norm.weight", FUSE_NORM, head.hidden)
    eps = config.rms_eps
    g = builder.emit(Opcode.RMS_NORM, "head_states", x=fused, weight=norm, eps=eps)
    shape = (limits.context, 2, config.ropes[0].dims // 2)
    table = builder.buffer(config.ropes[0].table, BufferKind.CONSTANT, F32, shape)
    for layer in range(config.layers):
        _write_keys(builder, head, tensors, layer, g, table, query, limits)


def _write_keys(
    builder: GraphBuilder,
    head: DFlashHead,
    tensors: ModelTensors,
    layer: int,
    g: View,
    table: View,
    query: View,
    limits: Limits,
) -> None:
    config = head.config
    heads, size = config.kv_heads[layer], config.head_dims[layer]
    k, v = (
        builder.emit(
            Opcode.MATMUL,
            f"head_{name}[{layer}]",
            x=g,
            weight=tensors.weight(
                builder,
                f"head.{name}.weight[{layer}]",
                f"blk.{layer}.{name}.weight",
                heads * size,
                head.hidden,
            ),
        )
        for name in ("attn_k", "attn_v")
    )
    name = "attn_k_norm.weight"
    norm = tensors.parameters(builder, f"head.{name}[{layer}]", f"blk.{layer}.{name}", size)
    normed = builder.emit(
        Opcode.RMS_NORM, f"head_k_norm[{layer}]", x=k, weight=norm, eps=config.rms_eps, groups=heads
    )
    turned = builder.emit(
        Opcode.ROPE,
        f"head_k_rope[{layer}]",
        x=normed,
        rope_table=table,
        query=query,
        heads=heads,
        head_dim=size,
        neox=int(config.ropes[layer].neox),
    )
    builder.emit(
        Opcode.KV_WRITE_BATCHED,
        f"head_kv_write[{layer}]",
        k=turned,
        v=v,
        query=query,
        page_table=builder.request("request.page_table", limits.slots, limits.slot_pages),
        kv=head_pages(builder, head, layer, limits),
        kv_heads=heads,
        head_dim=size,
    )


def head_pages(builder: GraphBuilder, head: DFlashHead, layer: int, limits: Limits) -> View:
    """The pages of a layer of the head: as many as the model has."""
    config = head.config
    shape = (limits.pages, 2, PAGE_TOKENS, config.kv_heads[layer], config.head_dims[layer])
    dtype = head.kv_dtype(limits.kv_dtype)
    return builder.buffer(f"{HEAD_PAGES}[{layer}]", BufferKind.STATE, dtype, shape)
