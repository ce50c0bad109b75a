"""``gemma3n``: Gemma 4's layers for text over four streams (AltUp), beside a product of low rank
(Laurel), with gates of which only the largest are kept."""

from __future__ import annotations

import math

from contract.ir.graph import Graph, GraphBuilder, View
from contract.opcodes import Opcode
from reference.limits import Limits
from reference.model.config import ModelConfig
from reference.model.config.gemma import LAUREL_RANK, STREAMS
from reference.model.families import gemma4
from reference.model.families.attention import NORM, attend, output, rotate_and_store
from reference.model.families.emitter import GELU, RELU, Emitter
from reference.model.families.forward import auxiliary_state, embed, head
from reference.model.families.head_products import head_product
from reference.model.families.tensors import ModelTensors

OTHERS = STREAMS - 1
"""The streams that no layer reads but the mixing of streams."""
TINY = 2.0**-100
"""In place of the epsilon of norms that only divide: far below every mean of squares but 0."""


def build(config: ModelConfig, tensors: ModelTensors, limits: Limits) -> Graph:
    """The graph of a Gemma 3n model: in each layer p = predicted streams, a = layer(p[0]), then
    streams corrected by a - p[0]."""
    e = Emitter(GraphBuilder(config.architecture), config, tensors, limits)
    x = embed(e)
    embeddings = gemma4.per_layer_embeddings(e, x)
    streams = _first_streams(e, x)
    for layer in range(config.layers):
        auxiliary_state(e, _stream(e, streams, 0), layer)
        predicted = _predicted(e, streams, layer)
        active = _layer(e, _stream(e, predicted, 0), layer)
        streams = _corrected(e, predicted, active, embeddings, layer)
    head(e, _merged(e, streams))
    return e.builder.build()


def _layer(e: Emitter, x: View, layer: int) -> View:
    """m + rms(ffn(m)) of m = (x + rms(attention(h)) + h + rms(Wr Wl h)) / sqrt(2), h = rms(x)."""
    h = e.norm(x, NORM, layer)
    low = e.linear(h, "laurel_l", layer, LAUREL_RANK, e.config.hidden)
    wide = e.linear(low, "laurel_r", layer, e.config.hidden, LAUREL_RANK)
    laurel = e.add("laurel", layer, e.norm(wide, "laurel_post_norm", layer), h)
    attended = e.norm(_attention(e, h, layer), "post_attention_norm", layer)
    both = e.add("attn_laurel", layer, e.add("attn_residual", layer, x, attended), laurel)
    mixed = _scaled(e, both, "attn_laurel_scale", layer, 1.0 / math.sqrt(2.0))
    fed = e.norm(_feed_forward(e, mixed, layer), "post_ffw_norm", layer)
    return e.add("ffn_residual", layer, mixed, fed)


def _attention(e: Emitter, h: View, layer: int) -> View:
    """attn(q, K, V) Wo with scale 1; the last layers read the KV pages of an earlier layer, and
    leave out their own tensors."""
    config, owner = e.config, e.config.kv_layers[layer]
    if owner == layer:
        packed = gemma4.queries_keys_values(e, h, layer, None)
        q = rotate_and_store(e, packed, layer, query_key_norm=True)
        return output(e, attend(e, q, layer), layer)
    size = config.head_dims[layer]
    width = config.kv_heads[layer] * size
    unused = {"attn_k": (width, config.hidden), "attn_v": (width, config.hidden)}
    for name, shape in {**unused, "attn_k_norm": (size,)}.items():
        if e.has(f"{name}.weight", layer):
            e.tensors.take(f"blk.{layer}.{name}.weight", *shape)
    return output(e, attend(e, gemma4.queries(e, h, layer, None), layer), layer)


def _feed_forward(e: Emitter, x: View, layer: int) -> View:
    """Wdown (gelu(s(Wgate h)) * (Wup h)) of h = rms(x); s keeps the largest gates, or all."""
    width, hidden = e.config.feed_forward[layer], e.config.hidden
    h = e.norm(x, "ffn_norm", layer)
    gate, up = (e.linear(h, name, layer, width, hidden) for name in ("ffn_gate", "ffn_up"))
    deviations = e.config.sparsity[layer]
    if deviations > -math.inf:
        gate = _largest(e, gate, layer, width, deviations)
    gated = e.builder.emit(Opcode.SWIGLU, f"swiglu[{layer}]", gate=gate, up=up, activation=GELU)
    return e.linear(gated, "ffn_down", layer, hidden, width)


def _largest(e: Emitter, x: View, layer: int, width: int, deviations: float) -> View:
    """max(x - (mean + deviations * deviation), 0) of each row."""
    name, emit = "ffn_gate", e.builder.emit
    total = _total(e, x, name, layer, width)
    mean = _scaled(e, total, f"{name}_mean", layer, -1.0 / width)
    means = _copied(e, mean, f"{name}_means", layer, width)
    centred = e.add(f"{name}_centred", layer, x, means)
    _, total = _root(e, centred, name, layer, width)
    cut = _scaled(e, total, f"{name}_cut", layer, -deviations / width)
    beyond = e.add(f"{name}_beyond", layer, centred, _copied(e, cut, f"{name}_cuts", layer, width))
    zeros = _scaled(e, beyond, f"{name}_zeros", layer, 0.0)
    ones = emit(
        Opcode.BIAS_ADD, f"{name}_ones[{layer}]", x=zeros, bias=e.ones(f"of_{width}", width)
    )
    return emit(Opcode.SWIGLU, f"{name}_largest[{layer}]", gate=beyond, up=ones, activation=RELU)


def _first_streams(e: Emitter, x: View) -> View:
    """x, and its product with each matrix of ``altup_proj``, made as large as x."""
    hidden = e.config.hidden
    copies = e.builder.scratch("scratch.altup_copies", "tokens", OTHERS * hidden)
    for n in range(OTHERS):
        _scaled(e, x, f"altup_copy_{n}", None, 1.0, copies[n * hidden : (n + 1) * hidden])
    streams = e.builder.scratch("scratch.altup_streams", "tokens", STREAMS * hidden)
    _scaled(e, x, "altup_first", None, 1.0, streams[0:hidden])
    _as_large(e, copies, x, "altup_proj", streams[hidden : STREAMS * hidden])
    return streams


def _merged(e: Emitter, streams: View) -> View:
    """The mean of the first stream and of the products of the others with the matrices of
    ``altup_unembd_proj``, made as large as the first."""
    hidden = e.config.hidden
    first, others = _stream(e, streams, 0), streams[hidden : STREAMS * hidden]
    products = e.builder.scratch("scratch.altup_merged", "tokens", OTHERS * hidden)
    _as_large(e, others, first, "altup_unembd_proj", products)
    total = first
    for n in range(OTHERS):
        total = e.add(f"altup_sum_{n}", None, total, _stream(e, products, n))
    return _scaled(e, total, "altup_mean", None, 1.0 / STREAMS)


def _as_large(e: Emitter, x: View, like: View, name: str, y: View) -> None:
    """Emit to y the product of each stream of x with its matrix, times the root mean square of
    ``like`` divided by its own."""
    hidden, emit = e.config.hidden, e.builder.emit
    shape = (OTHERS, hidden, hidden)
    product = head_product(e, x, name, None, shape, most=STREAMS * STREAMS)
    normed = emit(Opcode.RMS_NORM, f"{name}_normed", x=product, eps=TINY, groups=OTHERS)
    _, total = _root(e, like, name, None, hidden)
    size = _scaled(e, total, f"{name}_size", None, 1.0 / hidden)
    sizes = _copied(e, size, f"{name}_sizes", None, OTHERS * hidden)
    emit(Opcode.SWIGLU, f"{name}_sized", gate=sizes, up=normed, activation=RELU, y=y)


def _predicted(e: Emitter, streams: View, layer: int) -> View:
    """p[i] = x[i] + sum over j of c[i, j] x[j], with c = altup_predict_coef m(x[0])."""
    hidden, count = e.config.hidden, STREAMS * STREAMS
    modalities = _modalities(e, _stream(e, streams, 0), layer, "predict")
    coefficients = e.linear(modalities, "altup_predict_coef", layer, count, STREAMS)
    mixed = _products(e, coefficients, "altup_predict", layer, count, streams)
    halves = STREAMS * hidden // 2
    predicted = e.builder.scratch(f"scratch.altup_predicted[{layer}]", "tokens", STREAMS * hidden)
    for n in range(STREAMS):
        begin = n * STREAMS * hidden
        pairs = e.add(
            f"altup_pairs_{n}", layer, mixed[begin : begin + halves],
            mixed[begin + halves : begin + 2 * halves],
        )  # fmt: skip
        total = e.add(f"altup_total_{n}", layer, pairs[0:hidden], pairs[hidden : 2 * hidden])
        e.add(
            f"altup_predicted_{n}", layer, _stream(e, streams, n), total,
            _stream(e, predicted, n),
        )  # fmt: skip
    return predicted


def _corrected(e: Emitter, predicted: View, active: View, embeddings: View, layer: int) -> View:
    """x[i] = p[i] + (1 + d[i]) (a - p[0]), with d = altup_correct_coef m(a); all but the first
    plus what the per-layer embedding makes of x[0]."""
    hidden, emit = e.config.hidden, e.builder.emit
    modalities = _modalities(e, active, layer, "correct")
    factors = e.linear(modalities, "altup_correct_coef", layer, STREAMS, STREAMS)
    factors = emit(
        Opcode.BIAS_ADD, f"altup_factors[{layer}]", x=factors, bias=e.ones("streams", STREAMS)
    )
    negative = _scaled(e, _stream(e, predicted, 0), "altup_negative", layer, -1.0)
    innovation = e.add("altup_innovation", layer, active, negative)
    added = _products(e, factors, "altup_correct", layer, STREAMS, innovation)
    corrected = e.add("altup_corrected", layer, predicted, added)
    first = _stream(e, corrected, 0)
    scaled = emit(
        Opcode.SCALE_COLUMNS,
        f"altup_correct_scale[{layer}]",
        x=first,
        factors=e.parameters("altup_correct_scale.weight", layer, hidden),
    )
    more = gemma4.gated_embedding(e, scaled, embeddings, layer)
    streams = e.builder.scratch(f"scratch.altup_streams[{layer}]", "tokens", STREAMS * hidden)
    _scaled(e, first, "altup_first", layer, 1.0, _stream(e, streams, 0))
    for n in range(1, STREAMS):
        e.add(f"altup_more_{n}", layer, _stream(e, corrected, n), more, _stream(e, streams, n))
    return streams


def _modalities(e: Emitter, x: View, layer: int, use: str) -> View:
    """tanh(altup_router (rms(x) / hidden)), [tokens, streams]."""
    hidden, emit = e.config.hidden, e.builder.emit
    normed = emit(
        Opcode.RMS_NORM,
        f"altup_{use}_norm[{layer}]",
        x=x,
        weight=e.norm_weight("altup_router_norm", layer),
        eps=e.config.rms_eps,
    )
    scaled = _scaled(e, normed, f"altup_{use}_input", layer, 1.0 / hidden)
    weight = e.weight("altup_router", layer, STREAMS, hidden)
    routed = emit(Opcode.MATMUL, f"altup_{use}_router[{layer}]", x=scaled, weight=weight)
    return emit(Opcode.SOFT_CAP, f"altup_{use}_modalities[{layer}]", x=routed, cap=1.0)


def _products(e: Emitter, factors: View, name: str, layer: int, count: int, x: View) -> View:
    """``count`` products of a factor and a stream, [tokens, count * hidden]: of all streams of x
    in turn, or of x where there are as many factors as streams.

    A product is relu(c) x - relu(-c) (-x)'s two parts, of which one is 0."""
    hidden, emit = e.config.hidden, e.builder.emit
    ones = (
        e.ones("factors", count, hidden, 1) if count == STREAMS else e.ones("mix", count, hidden, 1)
    )
    shape = (count, hidden, 1)
    wide = head_product(e, factors, f"{name}_factors", layer, shape, weight=ones, most=STREAMS**2)
    per = hidden if count == STREAMS else STREAMS * hidden
    parts = []
    for sign, gate in (
        ("positive", wide),
        ("negative", _scaled(e, wide, f"{name}_minus", layer, -1.0)),
    ):
        part = e.builder.scratch(f"scratch.{name}_{sign}[{layer}]", "tokens", count * hidden)
        for n in range(count * hidden // per):
            at = slice(n * per, (n + 1) * per)
            emit(
                Opcode.SWIGLU, f"{name}_{sign}_{n}[{layer}]",
                gate=gate[at], up=x, activation=RELU, y=part[at],
            )  # fmt: skip
        parts.append(part)
    minus = _scaled(e, parts[1], f"{name}_negated", layer, -1.0)
    return e.add(f"{name}_products", layer, parts[0], minus)


def _root(e: Emitter, x: View, name: str, layer: int | None, width: int) -> tuple[View, View]:
    """x divided by its root mean square r, and r times the width: the sum of |x| |x / r|, whose
    positive and negative parts are summed apart."""
    emit, at = e.builder.emit, "" if layer is None else f"[{layer}]"
    normed = emit(Opcode.RMS_NORM, f"{name}_unit{at}", x=x, eps=TINY)
    minus, normed_minus = (
        _scaled(e, part, f"{name}_{what}", layer, -1.0)
        for part, what in ((x, "minus"), (normed, "unit_minus"))
    )
    above = emit(Opcode.SWIGLU, f"{name}_above{at}", gate=x, up=normed, activation=RELU)
    below = emit(Opcode.SWIGLU, f"{name}_below{at}", gate=minus, up=normed_minus, activation=RELU)
    return normed, _total(
        e, e.add(f"{name}_squares", layer, above, below), f"{name}_root", layer, width
    )


def _total(e: Emitter, x: View, name: str, layer: int | None, width: int) -> View:
    """The sum of each row."""
    at = "" if layer is None else f"[{layer}]"
    row = e.ones(f"row_of_{width}", 1, width)
    return e.builder.emit(Opcode.MATMUL, f"{name}_total{at}", x=x, weight=row)


def _copied(e: Emitter, x: View, name: str, layer: int | None, width: int) -> View:
    """One number a token in every column."""
    at = "" if layer is None else f"[{layer}]"
    column = e.ones(f"column_of_{width}", width, 1)
    return e.builder.emit(Opcode.MATMUL, f"{name}{at}", x=x, weight=column)


def _scaled(
    e: Emitter, x: View, name: str, layer: int | None, factor: float, y: View | None = None
) -> View:
    at = "" if layer is None else f"[{layer}]"
    return e.builder.emit(Opcode.SCALE, f"{name}{at}", x=x, factor=factor, y=y)


def _stream(e: Emitter, streams: View, n: int) -> View:
    return streams[n * e.config.hidden : (n + 1) * e.config.hidden]
