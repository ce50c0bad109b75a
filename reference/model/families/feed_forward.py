"""Feed-forward blocks: dense, and mixtures of experts."""

from __future__ import annotations

from contract.dtypes import F32, I32
from contract.ir.graph import BufferKind, View
from contract.ir.source import ZEROS, RowSlice
from contract.lazy_dataclass import dataclass
from contract.opcodes import Opcode
from reference.expert_outputs import expert_output
from reference.model.config import Experts
from reference.model.families.emitter import RELU, SILU, Emitter

FUSED_GATES = "ffn_up"
"""The tensor that holds gate rows, then up rows, in families that fuse them."""


@dataclass(frozen=True, slots=True)
class Routing:
    """The expert ids of every token and their weights, both [tokens, used]."""

    ids: View
    weights: View


@dataclass(frozen=True, slots=True)
class Gates:
    """The gates of a block: the activation f, and whether a dense block stores gate and up rows as
    one tensor (``fused``). A dense block that is not ``gated`` has only up rows; f is applied to
    them, and RELU then means max(x, 0)^2."""

    activation: int = SILU
    fused: bool = False
    gated: bool = True


PLAIN_GATES = Gates()
XIELU = "constant.xielu"
"""The four parameters of xIELU of a layer, whose number the name ends with."""


def add_feed_forward(
    e: Emitter, x: View, attended: View, layer: int, norm: str, gates: Gates = PLAIN_GATES
) -> View:
    """x + attended, plus the dense block or the experts applied to the norm of that sum."""
    if _is_dense(e, layer) or e.config.residual_scale != 1.0:
        x = e.add_scaled("attn_residual", layer, x, attended)
        return e.add_scaled("ffn_residual", layer, x, feed_forward(e, x, layer, norm, gates))
    x, h = e.add_and_norm(x, attended, layer, norm)
    y = experts(e, h, layer, route(e, h, layer), gates.activation, residual=x)
    return shared_expert(e, h, layer, y) if _mixture(e).shared_width else y


def feed_forward(e: Emitter, x: View, layer: int, norm: str | None, gates: Gates) -> View:
    """The dense block or the experts of rms(x, norm), or of x without a norm."""
    block = dense if _is_dense(e, layer) else _normed_experts
    return block(e, x, layer, norm, gates)


def _is_dense(e: Emitter, layer: int) -> bool:
    mixture = e.config.experts
    return mixture is None or mixture.is_dense(layer)


def _normed_experts(e: Emitter, x: View, layer: int, norm: str | None, gates: Gates) -> View:
    """The experts of rms(x, norm), the shared one included."""
    assert norm is not None
    h = e.norm(x, norm, layer)
    y = experts(e, h, layer, route(e, h, layer), gates.activation)
    return shared_expert(e, h, layer, y) if _mixture(e).shared_width else y


def dense(e: Emitter, x: View, layer: int, norm: str | None, gates: Gates = PLAIN_GATES) -> View:
    """Wdown (f(Wgate h) * (Wup h)) of h = rms(x, norm), or of x without a norm; of a family without
    gates Wdown f(Wup h)."""
    if e.config.xielu or not gates.gated:
        return _ungated(e, x, layer, norm, gates)
    width, hidden = e.config.feed_forward[layer], e.config.hidden
    rows: tuple[RowSlice | None, RowSlice | None] = (None, None)
    if gates.fused:
        rows = RowSlice(0, width, 2 * width), RowSlice(width, 2 * width, 2 * width)
    tensor = FUSED_GATES if gates.fused else ""
    if norm and e.is_plain("ffn_gate", layer) and e.is_plain("ffn_up", layer):
        up = e.builder.scratch(f"scratch.ffn_up[{layer}]", "tokens", width)
        gate = e.builder.emit(
            Opcode.RMS_NORM_FUSED_MLP_GATE_UP,
            f"ffn_gate_up[{layer}]",
            x=x,
            norm_weight=e.norm_weight(norm, layer),
            gate_weight=e.weight("ffn_gate", layer, width, hidden, tensor=tensor, rows=rows[0]),
            up_weight=e.weight("ffn_up", layer, width, hidden, tensor=tensor, rows=rows[1]),
            up=up,
            eps=e.config.rms_eps,
        )
    else:
        h = e.norm(x, norm, layer) if norm else x
        gate, up = (
            e.linear(h, name, layer, width, hidden, tensor=tensor, rows=part)
            for name, part in zip(("ffn_gate", "ffn_up"), rows, strict=True)
        )
    gated = e.builder.emit(
        Opcode.SWIGLU, f"swiglu[{layer}]", gate=gate, up=up, activation=gates.activation
    )
    return e.linear(gated, "ffn_down", layer, hidden, width)


def _ungated(e: Emitter, x: View, layer: int, norm: str | None, gates: Gates) -> View:
    """Wdown f(Wup h) of h = rms(x, norm), or of x without a norm; f is xIELU or the activation."""
    width, hidden = e.config.feed_forward[layer], e.config.hidden
    h = e.norm(x, norm, layer) if norm else x
    up = e.linear(h, "ffn_up", layer, width, hidden)
    if e.config.xielu:
        four = e.builder.buffer(f"{XIELU}[{layer}]", BufferKind.CONSTANT, F32, (4,))
        y = e.builder.emit(Opcode.XIELU, f"xielu[{layer}]", x=up, parameters=four)
    else:
        y = _activated(e, up, layer, width, gates.activation)
    return e.linear(y, "ffn_down", layer, hidden, width)


def _activated(e: Emitter, x: View, layer: int, width: int, activation: int) -> View:
    """f(x), computed as f(x) * 1 by SWIGLU; for RELU max(x, 0)^2, computed as max(x, 0) * x."""
    emit = e.builder.emit
    if activation == RELU:
        return emit(Opcode.SWIGLU, f"ffn_squared[{layer}]", gate=x, up=x, activation=RELU)
    zeros = emit(Opcode.SCALE, f"ffn_zeros[{layer}]", x=x, factor=0.0)
    ones = e.ones(f"of_{width}", width)
    ones = emit(Opcode.BIAS_ADD, f"ffn_ones[{layer}]", x=zeros, bias=ones)
    return emit(Opcode.SWIGLU, f"ffn_activated[{layer}]", gate=x, up=ones, activation=activation)


def route(e: Emitter, r: View, layer: int) -> Routing:
    """The experts with the largest softmax(r Wr + b) and their weights, or those that the family
    chooses by another bias."""
    mixture = _mixture(e)
    used = mixture.used[layer]
    ids = e.builder.scratch(f"scratch.moe_ids[{layer}]", "tokens", used, dtype=I32)
    weights = e.builder.scratch(f"scratch.moe_weights[{layer}]", "tokens", used)
    gate: dict[str, View | int | None] = {
        "x": r,
        "gate_weight": e.weight("ffn_gate_inp", layer, mixture.count, e.config.hidden),
        "bias": _bias(e, "ffn_gate_inp", layer, mixture.count),
        "choice_bias": _choice_bias(e, layer),
        "used": used,
        "renormalize": int(mixture.renormalize),
        "groups": mixture.groups,
        "groups_used": mixture.groups_used,
        "softmax": int(mixture.softmax),
    }
    e.builder.emit(Opcode.MOE_GATE_TOPK, f"moe_route[{layer}]", **gate, ids=ids, weights=weights)
    if (factor := mixture.weight_scale) != 1.0:
        weights = e.builder.emit(Opcode.SCALE, f"moe_scaled[{layer}]", x=weights, factor=factor)
    if e.limits.experts:
        # The same node again, so that steps which are not asked for ids are computed without it.
        read = e.builder.output(expert_output(layer), "tokens", used, dtype=I32)
        e.builder.emit(Opcode.MOE_GATE_TOPK, f"experts[{layer}]", **gate, ids=read)
    return Routing(ids, weights)


def _choice_bias(e: Emitter, layer: int) -> View | None:
    """What is added to sigmoids to choose experts; None where a softmax chooses them."""
    mixture = _mixture(e)
    if mixture.sigmoid:
        return e.ones("experts", mixture.count, source=ZEROS)
    bare = e.has("exp_probs_b", layer)  # as Hunyuan 3 has it
    name = "exp_probs_b" if bare else "exp_probs_b.bias"
    return e.parameters(name, layer, mixture.count) if mixture.choice_bias else None


def experts(
    e: Emitter,
    h: View,
    layer: int,
    routing: Routing,
    activation: int = SILU,
    residual: View | None = None,
) -> View:
    """The weighted sum of the chosen experts, added to ``residual`` if given."""
    mixture, hidden = _mixture(e), e.config.hidden
    if mixture.weighs_inputs:
        h, routing = _weighed(e, h, layer, routing)
    count, used, width = mixture.count, mixture.used[layer], mixture.widths[layer]
    gate_weight, up_weight = _gate_and_up(e, layer, count, width)
    up = e.builder.scratch(f"scratch.moe_up[{layer}]", "tokens", used, width)
    gate = e.builder.emit(
        Opcode.MOE_GATE_UP,
        f"moe_gate_up[{layer}]",
        x=h,
        gate_weight=gate_weight,
        up_weight=up_weight,
        gate_bias=_bias(e, "ffn_gate_exps", layer, count, width),
        up_bias=_bias(e, "ffn_up_exps", layer, count, width),
        ids=routing.ids,
        up=up,
    )
    # Of experts without gates nobody reads `up`, and no device computes it.
    factor = up if mixture.gated else gate
    gated = e.builder.emit(
        Opcode.MOE_SWIGLU, f"moe_swiglu[{layer}]", gate=gate, up=factor, activation=activation
    )
    scale = "ffn_down_exps.scale"
    has_scale = e.has(scale, layer)
    return e.builder.emit(
        Opcode.MOE_DOWN_ACC,
        f"moe_down[{layer}]",
        x=gated,
        down_weight=e.weight("ffn_down_exps", layer, count, hidden, width),
        # With both, the bias stays unread: the opcode would scale it, files mean it unscaled.
        bias=None if has_scale else _bias(e, "ffn_down_exps", layer, count, hidden),
        ids=routing.ids,
        weights=routing.weights,
        expert_scale=e.parameters(scale, layer, count) if has_scale else None,
        residual=residual,
    )


def _weighed(e: Emitter, h: View, layer: int, routing: Routing) -> tuple[View, Routing]:
    """The input of each token's only expert times its weight, and the weight 1 of the result."""
    emit, hidden = e.builder.emit, e.config.hidden
    column = e.ones("column", hidden, 1)
    wide = emit(Opcode.MATMUL, f"moe_wide[{layer}]", x=routing.weights, weight=column)
    # RELU computes max(weight, 0) * input; weights are positive.
    x = emit(Opcode.SWIGLU, f"moe_weighed[{layer}]", gate=wide, up=h, activation=RELU)
    zero = emit(Opcode.SCALE, f"moe_zero[{layer}]", x=routing.weights, factor=0.0)
    one = emit(Opcode.BIAS_ADD, f"moe_one[{layer}]", x=zero, bias=e.ones("weight", 1))
    return x, Routing(routing.ids, one)


def shared_expert(e: Emitter, h: View, layer: int, residual: View) -> View:
    """residual + sigmoid(h.g) * Wdown (silu(Wgate h) * (Wup h)), without the sigmoid where
    no gate weights the expert."""
    gated = _mixture(e).shared_gate
    width, hidden = _mixture(e).shared_width, e.config.hidden
    return e.builder.emit(
        Opcode.SHARED_EXPERT,
        f"shared_expert[{layer}]",
        x=h,
        gate_weight=e.weight("ffn_gate_shexp", layer, width, hidden),
        up_weight=e.weight("ffn_up_shexp", layer, width, hidden),
        down_weight=e.weight("ffn_down_shexp", layer, hidden, width),
        router_weight=e.parameters("ffn_gate_inp_shexp.weight", layer, hidden) if gated else None,
        residual=residual,
    )


def _gate_and_up(e: Emitter, layer: int, count: int, width: int) -> tuple[View, View]:
    """The gate and up matrices of all experts; a fused tensor has gate rows, then up rows. Of
    experts without gates both are the same."""
    shape, fused = (count, width, e.config.hidden), "ffn_gate_up_exps"
    if not _mixture(e).gated:
        both = e.weight("ffn_up_exps", layer, *shape)
        return both, both
    if not e.has(f"{fused}.weight", layer):
        return (e.weight("ffn_gate_exps", layer, *shape), e.weight("ffn_up_exps", layer, *shape))
    gate, up = RowSlice(0, width, 2 * width), RowSlice(width, 2 * width, 2 * width)
    return (
        e.weight("ffn_gate_exps", layer, *shape, tensor=fused, rows=gate),
        e.weight("ffn_up_exps", layer, *shape, tensor=fused, rows=up),
    )


def _bias(e: Emitter, name: str, layer: int, *shape: int) -> View | None:
    """The bias of matrix ``name``, if the family has such biases and the file has this one."""
    bias = f"{name}.bias"
    has_bias = _mixture(e).biases and e.has(bias, layer)
    return e.parameters(bias, layer, *shape) if has_bias else None


def _mixture(e: Emitter) -> Experts:
    assert e.config.experts is not None
    return e.config.experts
