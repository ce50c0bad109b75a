"""Attention over the paged cache, from the residual stream to the output projection."""

from __future__ import annotations

from contract.arithmetic import PAGE_TOKENS
from contract.ir.graph import BufferKind, View
from contract.ir.source import RowSlice
from contract.opcodes import Opcode
from reference.model.families.emitter import SIGMOID, Emitter
from reference.model.families.head_norms import layer_norm_heads
from reference.model.families.smooth_keys import Channels

PROJECTIONS = ("attn_q", "attn_k", "attn_v")
FUSED = "attn_qkv"
GATE = "attn_gate"
"""The gates of all heads, in families where they are a tensor of their own."""


NORM = "attn_norm"
"""The norm of what attention reads."""


def attention(
    e: Emitter, x: View, layer: int, *, query_key_norm: bool, norm: str | None = NORM
) -> View:
    """attn(rope(norm q), rope(norm k), v) Wo of h = rms(x, norm), or of x without a norm."""
    packed = project(e, x, layer, norm=norm)
    q = rotate_and_store(e, packed, layer, query_key_norm=query_key_norm)
    return output(e, attend(e, q, layer), layer)


def normed_outputs_attention(
    e: Emitter, x: View, layer: int, norm: str | None, *, heads_apart: bool = False
) -> View:
    """attn(rope(norm(h Wq)), rope(norm(h Wk)), h Wv) Wo of h = rms(x, norm), or of x without a
    norm; the norms of queries and keys are over all heads at once, or with ``heads_apart`` layer
    norms of each head with its own weights."""
    packed, (q, k, v) = packed_views(e, layer)
    h = e.norm(x, norm, layer) if norm else x
    q_width, kv_width = widths(e, layer)
    sides = (("q", q, q_width), ("k", k, kv_width))
    for (side, target, width), scale in zip(sides, e.powers(layer), strict=True):
        product = e.linear(h, f"attn_{side}", layer, width, e.config.hidden)
        if heads_apart:
            layer_norm_heads(e, product, side, layer, scale, target)
            continue
        e.builder.emit(
            Opcode.RMS_NORM,
            f"{side}_norm[{layer}]",
            x=product,
            weight=e.parameters(f"attn_{side}_norm.weight", layer, width, powers=scale),
            eps=e.config.rms_eps,
            y=target,
        )
    e.linear(h, "attn_v", layer, kv_width, e.config.hidden, y=v)
    rotated = rotate_and_store(e, packed, layer, query_key_norm=False)
    return output(e, attend(e, rotated, layer), layer)


def turned_then_normed_attention(e: Emitter, x: View, layer: int) -> View:
    """attn(norm(rope(h Wq)), norm(rope(h Wk)), h Wv) Wo of h = rms(x, attn_norm); norms per
    head."""
    config, size = e.config, e.config.head_dims[layer]
    project(e, x, layer)
    _, (q, k, v) = packed_views(e, layer)
    heads = (config.heads[layer], config.kv_heads[layer])
    normed = [
        e.head_norm(e.rope(part, f"{side}_rope", layer, count, size), side, layer, count, powers)
        for side, part, count, powers in zip("qk", (q, k), heads, e.powers(layer), strict=True)
    ]
    store_keys_values(e, normed[1], v, layer, heads[1], size)
    return output(e, attend(e, normed[0], layer), layer)


def gated_attention(e: Emitter, x: View, layer: int, own_gate: bool = False) -> View:
    """(attn(q, K, V) * sigmoid(g)) Wo; ``own_gate`` says that g has a tensor of its own."""
    packed, (q, k, v) = packed_views(e, layer)
    q_width, kv_width = widths(e, layer)
    h, sources = e.norm(x, NORM, layer), _gated_sources(e, layer, own_gate)

    def product(name: str, width: int, y: View | None = None) -> View:
        tensor, rows = sources[name]
        return e.linear(h, name, layer, width, e.config.hidden, y=y, tensor=tensor, rows=rows)

    product("attn_q", q_width, q)
    product("attn_k", kv_width, k)
    product("attn_v", kv_width, v)
    gate = product("attn_q_gate", q_width)
    q = rotate_and_store(e, packed, layer, query_key_norm=True)
    gated = e.builder.emit(
        Opcode.SWIGLU, f"attn_gated[{layer}]", gate=gate, up=attend(e, q, layer), activation=SIGMOID
    )
    return output(e, gated, layer)


def _gated_sources(
    e: Emitter, layer: int, own_gate: bool
) -> dict[str, tuple[str, RowSlice | None]]:
    """The tensor and rows of queries, gates, keys and values.

    Every head of attn_q is d query rows, then d gate rows; a fused tensor holds attn_q, attn_k and
    attn_v one after the other."""
    size = e.config.head_dims[layer]
    queries, gates = RowSlice(0, size, 2 * size), RowSlice(size, 2 * size, 2 * size)
    whole: dict[str, tuple[str, RowSlice | None]] = {n: (n, None) for n in PROJECTIONS}
    if own_gate:
        return {**whole, "attn_q_gate": (GATE, None)}
    if not e.has(f"{FUSED}.weight", layer):
        return {**whole, "attn_q": ("attn_q", queries), "attn_q_gate": ("attn_q", gates)}
    q_width, kv_width = widths(e, layer)
    both, keys, end = 2 * q_width, 2 * q_width + kv_width, 2 * (q_width + kv_width)
    return {
        "attn_q": (FUSED, RowSlice(0, both, end, queries)),
        "attn_q_gate": (FUSED, RowSlice(0, both, end, gates)),
        "attn_k": (FUSED, RowSlice(both, keys, end)),
        "attn_v": (FUSED, RowSlice(keys, end, end)),
    }


def widths(e: Emitter, layer: int) -> tuple[int, int]:
    """Elements of a token's queries, and of its keys or values."""
    config = e.config
    size = config.head_dims[layer]
    return config.heads[layer] * size, config.kv_heads[layer] * size


def packed_views(e: Emitter, layer: int) -> tuple[View, tuple[View, View, View]]:
    """A buffer for packed queries, keys and values, and views of its three parts."""
    q_width, kv_width = widths(e, layer)
    end = q_width + 2 * kv_width
    packed = e.builder.scratch(f"scratch.qkv[{layer}]", "tokens", end)
    middle = q_width + kv_width
    return packed, (packed[0:q_width], packed[q_width:middle], packed[middle:end])


def project(
    e: Emitter, x: View, layer: int, values: View | None = None, norm: str | None = NORM
) -> View:
    """Queries, keys and values of rms(x, norm), or of x without a norm, packed; the values go to
    ``values`` if given.

    A fused tensor gives all three in one product."""
    packed, (q, k, v) = packed_views(e, layer)
    (q_width, kv_width), hidden = widths(e, layer), e.config.hidden
    targets, outputs = (q, k, values or v), (q_width, kv_width, kv_width)
    plain = all(e.is_plain(n, layer) for n in PROJECTIONS)
    if norm and plain and not e.has(f"{FUSED}.weight", layer):
        q_weight, k_weight, v_weight = (
            e.weight(name, layer, width, hidden)
            for name, width in zip(PROJECTIONS, outputs, strict=True)
        )
        e.builder.emit(
            Opcode.RMS_NORM_FUSED_QKV,
            f"attn_qkv[{layer}]",
            x=x,
            norm_weight=e.norm_weight(norm, layer),
            q_weight=q_weight,
            k_weight=k_weight,
            v_weight=v_weight,
            q=targets[0],
            k=targets[1],
            v=targets[2],
            eps=e.config.rms_eps,
        )
        return packed
    h = e.norm(x, norm, layer) if norm else x
    if not e.has(f"{FUSED}.weight", layer):
        scales = (*e.powers(layer), ())
        for name, y, width, scale in zip(PROJECTIONS, targets, outputs, scales, strict=True):
            _smoothed(e, h, name, layer, (width, hidden), scale, y)
    elif values is None:
        queries, keys = e.powers(layer)
        scale = (*queries, *keys, *[0] * kv_width)
        _smoothed(e, h, FUSED, layer, (sum(outputs), hidden), scale, packed)
    else:
        edges = (0, q_width, q_width + kv_width, q_width + 2 * kv_width)
        for n, (name, y) in enumerate(zip(PROJECTIONS, targets, strict=True)):
            rows = RowSlice(edges[n], edges[n + 1], edges[-1])
            e.linear(h, name, layer, outputs[n], hidden, y=y, tensor=FUSED, rows=rows)
    return packed


def _smoothed(
    e: Emitter, h: View, name: str, layer: int, shape: tuple[int, int], powers: Channels, y: View
) -> None:
    """A projection with its bias, and with its columns times powers of two when ``powers`` has
    any."""
    scaled = len(powers) == shape[0] and any(powers)
    product = e.linear(h, name, layer, *shape, y=None if scaled else y)
    if scaled:
        e.scale_powers(product, f"{name}_smoothed", layer, powers, y)


def rotate_and_store(
    e: Emitter, packed: View, layer: int, *, query_key_norm: bool, pages: View | None = None
) -> View:
    """Emit the per-head norms the family has, the rotation, and the write of keys and values, to
    ``pages`` if given. Returns the queries."""
    config = e.config
    size = config.head_dims[layer]
    q = e.builder.emit(
        Opcode.RMS_NORM_FUSED_ROPE_KV_WRITE,
        f"kv_write[{layer}]",
        qkv=packed,
        rope_table=e.rope_table(layer),
        query=e.query,
        page_table=e.page_table,
        kv=pages or kv_pages(e, layer),
        heads=config.heads[layer],
        kv_heads=config.kv_heads[layer],
        head_dim=size,
        neox=int(config.ropes[layer].neox),
        eps=config.rms_eps,
        **_head_norms(e, layer, query_key_norm),
    )
    e.builder.barrier()
    return _grown(e, q, layer)


def _head_norms(e: Emitter, layer: int, query_key_norm: bool) -> dict[str, View]:
    """The weights of the norms of heads: of the file, or ones."""
    size, names = e.config.head_dims[layer], ("q_norm", "k_norm")
    if e.config.unit_norms and e.config.ropes[layer].rotates:
        return dict.fromkeys(names, e.ones("head", size))
    return {
        name: e.parameters(f"attn_{name}.weight", layer, size, powers=powers)
        for name, powers in zip(names, e.powers(layer), strict=True)
        if query_key_norm
    }


def _grown(e: Emitter, q: View, layer: int) -> View:
    """Queries that grow with their position, where the model's do and the context is so long."""
    growth = e.config.query_growth
    if growth is None or e.limits.context + growth.offset <= growth.length:
        return q
    if growth.unrotated and e.config.ropes[layer].rotates:
        return q
    return e.builder.emit(
        Opcode.ROPE,
        f"query_growth[{layer}]",
        x=q,
        rope_table=e.growth_table,
        query=e.query,
        heads=widths(e, layer)[0] // 2,
        head_dim=2,
        neox=0,
    )


def store_keys_values(
    e: Emitter, k: View, v: View, layer: int, kv_heads: int, head_dim: int
) -> None:
    """Emit the write of keys and values to the pages of the layer."""
    e.builder.emit(
        Opcode.KV_WRITE_BATCHED,
        f"kv_write[{layer}]",
        k=k,
        v=v,
        query=e.query,
        page_table=e.page_table,
        kv=kv_pages(e, layer),
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
    e.builder.barrier()


def kv_pages(e: Emitter, layer: int) -> View:
    """The KV pages that ``layer`` reads."""
    owner = e.config.kv_layers[layer]
    shape = (e.limits.pages, 2, PAGE_TOKENS, e.config.kv_heads[owner], e.config.head_dims[owner])
    return e.builder.buffer(f"state.kv[{owner}]", BufferKind.STATE, e.limits.kv_dtype, shape)


def attend(
    e: Emitter, q: View, layer: int, *, pages: View | None = None, query: View | None = None
) -> View:
    """Causal attention, limited to the layer's window and with its sinks if it has them. The
    positions of ``query``, if given, are those up to which its tokens see ``pages``."""
    config, sinks = e.config, "attn_sinks.weight"
    has_sinks = config.sinks and e.has(sinks, layer)
    return e.builder.emit(
        Opcode.FLASH_ATTN_BATCHED,
        f"attention[{layer}]",
        q=q,
        kv=pages or kv_pages(e, layer),
        page_table=e.page_table,
        query=query or e.query,
        sinks=e.parameters(sinks, layer, config.heads[layer]) if has_sinks else None,
        heads=config.heads[layer],
        kv_heads=config.kv_heads[layer],
        head_dim=config.head_dims[layer],
        scale=config.attention_scales[layer],
        window=config.windows[layer],
        soft_cap=config.score_cap,
    )


def output(e: Emitter, attended: View, layer: int) -> View:
    """The projection of the attention's result back to the residual width."""
    q_width, _ = widths(e, layer)
    return e.linear(attended, "attn_output", layer, e.config.hidden, q_width)
