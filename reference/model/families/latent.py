"""Attention over latent rows (multi-head latent attention): ``deepseek2``, ``kimi-linear``.

A position has one row, which is key and value of every head: channels that rotate (but in
kimi-linear), then the normed latent channels. The matrices that would make keys and values of them
are multiplied with the queries before attention, and with its results."""

from __future__ import annotations

from contract.ir.graph import View
from contract.ir.source import RowSlice
from contract.opcodes import Opcode
from reference.model.config.records import Latent
from reference.model.families.attention import NORM, attend, store_keys_values
from reference.model.families.emitter import Emitter
from reference.model.families.head_products import head_product


def latent_attention(e: Emitter, x: View, layer: int) -> View:
    """attn(q, K, V) Wv Wo of h = rms(x): of head n q = [rope(h Wr[n]), Wk[n]^T (h Wq[n])]."""
    latent, heads = _latent(e), e.config.heads[layer]
    h = e.norm(x, NORM, layer)
    _store_row(e, h, layer)
    q = _queries(e, h, layer)
    attended = attend(e, q, layer)
    shape = (heads, latent.value, latent.rank)
    values = head_product(e, attended, "attn_v_b", layer, shape)
    return e.linear(values, "attn_output", layer, e.config.hidden, heads * latent.value)


def _queries(e: Emitter, h: View, layer: int) -> View:
    """The queries of latent rows, [tokens, heads * row width]."""
    latent, heads, rope = _latent(e), e.config.heads[layer], e.config.ropes[layer]
    turned = rope.dims
    tensor, inner = "attn_q", e.config.hidden
    if latent.query_rank:
        tensor, inner = "attn_q_b", latent.query_rank
        low = e.linear(h, "attn_q_a", layer, inner, e.config.hidden)
        h = _norm(e, low, "attn_q_a_norm", layer, inner)
    whole = latent.unrotated + turned
    parts = ("latent", 0, latent.unrotated), ("rope", latent.unrotated, whole)
    straight, rotating = (
        e.linear(
            h,
            f"{tensor}_{name}",
            layer,
            heads * (stop - start),
            inner,
            tensor=tensor,
            rows=RowSlice(start, stop, whole),
        )
        for name, start, stop in parts
    )
    rotated = e.rope(rotating, "q_rope", layer, heads, turned) if rope.rotates else rotating
    shape = (heads, latent.rank, latent.unrotated)
    return head_product(e, straight, "attn_k_b", layer, shape, rest=rotated, kept=turned)


def _store_row(e: Emitter, h: View, layer: int) -> None:
    """Emit the write of a token's row: its channels are key and value, but a value has zeros for
    those that rotate."""
    latent, rope = _latent(e), e.config.ropes[layer]
    turned = rope.dims
    tensor, width = "attn_kv_a_mqa", turned + latent.rank
    k, v = (e.builder.scratch(f"scratch.{side}[{layer}]", "tokens", width) for side in "kv")
    rotating, straight = (
        e.linear(
            h, f"attn_{name}", layer, stop - start, e.config.hidden,
            tensor=tensor, rows=RowSlice(start, stop, width), y=y,
        )
        for name, start, stop, y in (
            ("k_rope", latent.rank, width, None if rope.rotates else k[0:turned]),
            ("latent", 0, latent.rank, None),
        )
    )  # fmt: skip
    if rope.rotates:
        e.rope(rotating, "k_rope", layer, 1, turned, y=k[0:turned])
    normed = _norm(e, straight, "attn_kv_a_norm", layer, latent.rank, y=k[turned:width])
    for name, x, y, factor in (
        ("no_value", rotating, v[0:turned], 0.0),
        ("value", normed, v[turned:width], 1.0),
    ):
        e.builder.emit(Opcode.SCALE, f"{name}[{layer}]", x=x, factor=factor, y=y)
    store_keys_values(e, k, v, layer, 1, width)


def _norm(e: Emitter, x: View, name: str, layer: int, width: int, y: View | None = None) -> View:
    weight = e.parameters(f"{name}.weight", layer, width)
    return e.builder.emit(
        Opcode.RMS_NORM, f"{name}[{layer}]", x=x, weight=weight, eps=e.config.rms_eps, y=y
    )


def _latent(e: Emitter) -> Latent:
    assert e.config.latent is not None
    return e.config.latent
