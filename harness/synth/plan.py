"""Which tensors a synthetic model has: names, shapes and the spread of their values.

Values are drawn so that activations stay of the size they have in trained models: rows of matrices
have norm 1, norm weights are near 1, routers tell experts apart, delta-net states decay slowly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from harness.synth.spec import ExpertSpec, Gemma, Recurrent, SynthSpec
from harness.synth.tensors import SynthTensor, with_types

NORM_DEVIATION = 0.1
BIAS_DEVIATION = 0.1
ROUTER_SPREAD = 2.0
"""Deviation of router logits: probabilities that differ, and more than one expert that matters."""
DT_BIAS, DT_BIAS_DEVIATION = -3.0, 0.5
"""Time steps of about softplus(-3) = 0.05."""
DECAY_RATE, DECAY_RATE_DEVIATION = -4.0, 1.0
"""``ssm_a``: always negative, 3.5 deviations being the most a value differs."""
MIX_DEVIATION = 0.1


def plan_tensors(spec: SynthSpec) -> tuple[SynthTensor, ...]:
    """Every tensor of the model, in file order, with its type before any expansion."""
    tensors = [_matrix("token_embd", spec.vocab, spec.hidden)]
    if spec.rope_freqs or spec.architecture == "gemma4":
        tensors.append(SynthTensor("rope_freqs.weight", (spec.head_dim // 2,), (), 0.0))
    if spec.gemma is not None and spec.gemma.per_layer_width:
        tensors += _per_layer_embeddings(spec, spec.gemma.per_layer_width)
    for block in range(spec.blocks):
        tensors += _block(spec, block)
    tensors.append(_norm("output_norm", spec.hidden))
    if not spec.tied:
        tensors.append(_matrix("output", spec.vocab, spec.hidden))
    return with_types(spec, tensors)


def _per_layer_embeddings(spec: SynthSpec, width: int) -> Iterator[SynthTensor]:
    columns = spec.layers * width
    deviation = 1.0 / math.sqrt(width)
    yield _matrix("per_layer_token_embd", spec.vocab, columns, deviation=deviation)
    yield _matrix("per_layer_model_proj", columns, spec.hidden)
    yield _norm("per_layer_proj_norm", width)


def _block(spec: SynthSpec, block: int) -> Iterator[SynthTensor]:
    prefix = f"blk.{block}"
    yield _norm(f"{prefix}.attn_norm", spec.hidden)
    if spec.recurrent is not None and spec.is_recurrent(block):
        yield from _delta_net(spec, spec.recurrent, prefix)
    else:
        yield from _attention(spec, block)
    if spec.gemma is not None or spec.recurrent is not None:
        yield _norm(f"{prefix}.post_attention_norm", spec.hidden)
    if spec.recurrent is None:
        yield _norm(f"{prefix}.ffn_norm", spec.hidden)
    if spec.experts is None or spec.gemma is not None:
        yield from _feed_forward(spec, prefix, "", spec.feed_forward_widths[block])
    if spec.experts is not None:
        yield from _experts(spec, spec.experts, prefix)
    if spec.gemma is not None:
        yield from _gemma_layer(spec, spec.gemma, prefix)
    if block >= spec.layers:
        yield _matrix(f"{prefix}.nextn.eh_proj", spec.hidden, 2 * spec.hidden)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            yield _norm(f"{prefix}.nextn.{name}", spec.hidden)


def _attention(spec: SynthSpec, block: int) -> Iterator[SynthTensor]:
    prefix, head_dim = f"blk.{block}", spec.head_dim_of(block)
    queries, keys = spec.heads * head_dim, spec.kv_heads_of(block) * head_dim
    projections = {"attn_q": queries if spec.recurrent is None else 2 * queries}
    if spec.owns_kv(block):
        projections["attn_k"] = keys
    if spec.owns_values(block):
        projections["attn_v"] = keys
    if spec.fused_qkv and len(projections) == 3:
        total = sum(projections.values())
        parts = tuple((f"{prefix}.{name}.weight", rows) for name, rows in projections.items())
        yield _matrix(f"{prefix}.attn_qkv", total, spec.hidden, parts=parts)
        if spec.has_qkv_bias:
            parts = tuple((f"{prefix}.{name}.bias", rows) for name, rows in projections.items())
            yield SynthTensor(f"{prefix}.attn_qkv.bias", (total,), parts, BIAS_DEVIATION)
    else:
        for name, rows in projections.items():
            yield _matrix(f"{prefix}.{name}", rows, spec.hidden)
            if spec.has_qkv_bias:
                yield _vector(f"{prefix}.{name}.bias", rows, 0.0, BIAS_DEVIATION)
    if spec.has_qk_norm:
        # Gemma 4 does not scale scores: its norm weights do.
        centre = 1.0 if spec.architecture != "gemma4" else 1.0 / math.sqrt(math.sqrt(head_dim))
        yield _norm(f"{prefix}.attn_q_norm", head_dim, centre)
        if spec.owns_kv(block):
            yield _norm(f"{prefix}.attn_k_norm", head_dim, centre)
    yield _matrix(f"{prefix}.attn_output", spec.hidden, queries)
    if spec.attention_output_bias:
        yield _vector(f"{prefix}.attn_output.bias", spec.hidden, 0.0, BIAS_DEVIATION)


def _delta_net(spec: SynthSpec, recurrent: Recurrent, prefix: str) -> Iterator[SynthTensor]:
    hidden, heads = spec.hidden, recurrent.value_heads
    yield from _delta_net_inputs(spec, recurrent, prefix)
    yield _matrix(f"{prefix}.ssm_conv1d", recurrent.channels, recurrent.kernel)
    yield _vector(f"{prefix}.ssm_dt.bias", heads, DT_BIAS, DT_BIAS_DEVIATION)
    yield _vector(f"{prefix}.ssm_a", heads, DECAY_RATE, DECAY_RATE_DEVIATION)
    if spec.architecture == "qwen3next":
        group = heads // recurrent.key_heads
        parts = tuple((f"{prefix}.ssm_{name}.weight", group) for name in ("beta", "alpha"))
        yield _matrix(
            f"{prefix}.ssm_ba", 2 * heads, hidden, parts=parts, repeats=recurrent.key_heads
        )
    else:
        yield _matrix(f"{prefix}.ssm_beta", heads, hidden)
        yield _matrix(f"{prefix}.ssm_alpha", heads, hidden)
    yield _norm(f"{prefix}.ssm_norm", recurrent.state)
    yield _matrix(f"{prefix}.ssm_out", hidden, recurrent.inner)


def _delta_net_inputs(spec: SynthSpec, recurrent: Recurrent, prefix: str) -> Iterator[SynthTensor]:
    """Queries, keys, values and z: of all heads one after the other, or by key head."""
    names = tuple(f"{prefix}.ssm_in.{name}" for name in ("q", "k", "v", "z"))
    key_heads, state = recurrent.key_heads, recurrent.state
    if recurrent.packing == "ssm_in":
        values = recurrent.inner // key_heads
        parts = tuple(zip(names, (state, state, values, values), strict=True))
        rows = key_heads * (2 * state + 2 * values)
        yield _matrix(f"{prefix}.ssm_in", rows, spec.hidden, parts=parts, repeats=key_heads)
        return
    rows = (key_heads * state, key_heads * state, recurrent.inner)
    parts = tuple(zip(names, rows, strict=False))
    yield _matrix(f"{prefix}.attn_qkv", recurrent.channels, spec.hidden, parts=parts)
    gate = ((names[-1], recurrent.inner),)
    yield _matrix(f"{prefix}.attn_gate", recurrent.inner, spec.hidden, parts=gate)


def _feed_forward(spec: SynthSpec, prefix: str, suffix: str, width: int) -> Iterator[SynthTensor]:
    yield _matrix(f"{prefix}.ffn_gate{suffix}", width, spec.hidden)
    yield _matrix(f"{prefix}.ffn_up{suffix}", width, spec.hidden)
    yield _matrix(f"{prefix}.ffn_down{suffix}", spec.hidden, width)


def _experts(spec: SynthSpec, experts: ExpertSpec, prefix: str) -> Iterator[SynthTensor]:
    hidden, count, width = spec.hidden, experts.count, experts.width
    router = ROUTER_SPREAD / math.sqrt(hidden)
    yield _matrix(f"{prefix}.ffn_gate_inp", count, hidden, deviation=router)
    halves = tuple(f"{prefix}.ffn_{name}_exps" for name in ("gate", "up"))
    if experts.fused:
        parts = tuple((f"{name}.weight", width) for name in halves)
        yield _matrix(
            f"{prefix}.ffn_gate_up_exps", count, 2 * width, hidden, parts=parts, repeats=count
        )
    else:
        for name in halves:
            yield _matrix(name, count, width, hidden)
    yield _matrix(f"{prefix}.ffn_down_exps", count, hidden, width)
    if experts.shared_width:
        gate = 1.0 / math.sqrt(hidden)
        yield _vector(f"{prefix}.ffn_gate_inp_shexp.weight", hidden, 0.0, gate)
        yield from _feed_forward(spec, prefix, "_shexp", experts.shared_width)


def _gemma_layer(spec: SynthSpec, gemma: Gemma, prefix: str) -> Iterator[SynthTensor]:
    hidden = spec.hidden
    yield _norm(f"{prefix}.post_ffw_norm", hidden)
    if spec.experts is not None:
        # The router's input is divided by the square root of the width.
        root = math.sqrt(hidden)
        yield _vector(f"{prefix}.ffn_gate_inp.scale", hidden, root, MIX_DEVIATION * root)
        yield _vector(f"{prefix}.ffn_down_exps.scale", spec.experts.count, 1.0, MIX_DEVIATION)
        for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
            yield _norm(f"{prefix}.{name}", hidden)
    if gemma.per_layer_width:
        yield _matrix(f"{prefix}.inp_gate", gemma.per_layer_width, hidden)
        yield _matrix(f"{prefix}.proj", hidden, gemma.per_layer_width)
        yield _norm(f"{prefix}.post_norm", hidden)
    if gemma.output_scale:
        yield _vector(f"{prefix}.layer_output_scale.weight", 1, 1.0, MIX_DEVIATION)


def _norm(name: str, width: int, centre: float = 1.0) -> SynthTensor:
    return _vector(f"{name}.weight", width, centre, NORM_DEVIATION * centre)


def _vector(name: str, width: int, centre: float, deviation: float) -> SynthTensor:
    return SynthTensor(name, (width,), ((name, width),), deviation, centre)


def _matrix(
    name: str,
    *shape: int,
    deviation: float | None = None,
    parts: tuple[tuple[str, int], ...] = (),
    repeats: int = 1,
) -> SynthTensor:
    """A matrix, or a stack of them, whose rows have norm 1 unless ``deviation`` says otherwise."""
    full = f"{name}.weight"
    deviation = 1.0 / math.sqrt(shape[-1]) if deviation is None else deviation
    own = ((full, math.prod(shape[:-1])),)
    return SynthTensor(full, shape, parts or own, deviation, repeats=repeats)
