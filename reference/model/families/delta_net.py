"""The gated delta net (Yang et al., arXiv:2412.06464), a recurrent layer in place of attention, and
Kimi Linear's (arXiv:2510.26692), where every key decays by itself."""

from __future__ import annotations

from itertools import pairwise

from contract.ir.graph import View
from contract.ir.source import RowSlice
from contract.opcodes import Opcode
from reference.model.config import DeltaNet
from reference.model.families.attention import NORM
from reference.model.families.emitter import SIGMOID, Emitter, file_name

JOINT_INPUT = "ssm_in"
"""The tensor of older files that holds queries, keys, values and gates of every key head."""
JOINT_BETA_ALPHA = "ssm_ba"
"""The tensor that holds the rows of beta and alpha of every key head."""


def delta_net(e: Emitter, x: View, layer: int, *, grouped: bool) -> View:
    """Emit the layer for the residual stream ``x`` [tokens, hidden]; returns [tokens, hidden].

    With h = rms(x, attn_norm): (norm(delta rule of conv(u), alpha, beta) * silu(z)) Wout, where u
    (queries, keys and values), z (the output gate), alpha (decay of the state) and beta (rate of
    writing to it) are projections of h. The opcodes SSM_CONV1D, SSM_DELTA_NET and SSM_GATED_NORM
    define the parts. With ``grouped``, consecutive value heads share a key head; without it, value
    head n uses key head n modulo the number of key heads."""
    config, net = e.config, sizes(e)
    h = e.norm(x, NORM, layer)
    u, z = _inputs_and_gate(e, h, layer)
    beta, alpha = _beta_and_alpha(e, h, layer)
    taps = e.parameters("ssm_conv1d.weight", layer, net.channels, net.taps)
    convolved = _convolved(e, u, "conv", layer, taps, net.channels)
    decay = e.parameters("ssm_a", layer, net.value_heads)
    gates = {"alpha": alpha, "beta": beta, "decay": decay}
    read = _delta_rule(e, convolved, layer, gates, net.value_heads, grouped)
    gated = e.builder.emit(
        Opcode.SSM_GATED_NORM,
        f"ssm_norm[{layer}]",
        x=read,
        gate=z,
        weight=e.parameters("ssm_norm.weight", layer, net.state_size),
        heads=net.value_heads,
        eps=config.rms_eps,
    )
    return e.linear(gated, "ssm_out", layer, config.hidden, net.value_width)


def kimi_delta_net(e: Emitter, x: View, layer: int) -> View:
    """The same with sigmoid(z) in place of silu(z), where each of queries, keys and values has a
    convolution of its own, alpha is a number for each key, and alpha and z are products of two
    matrices."""
    config, net = e.config, sizes(e)
    heads, size, width = net.value_heads, net.state_size, net.value_width
    h = e.norm(x, NORM, layer)
    u = e.builder.scratch(f"scratch.ssm_conv[{layer}]", "tokens", net.channels)
    for n, part in enumerate("qkv"):
        projected = e.linear(h, f"attn_{part}", layer, width, config.hidden)
        stored = 1, width, 1, net.taps
        taps = _reshaped(e, f"ssm_conv1d_{part}.weight", layer, (width, net.taps), stored)
        y = u[n * width : (n + 1) * width]
        _convolved(e, projected, f"conv_{part}", layer, taps, width, y)
    alpha, z = (
        e.linear(
            e.linear(h, f"ssm_{name}_a", layer, size, config.hidden),
            f"ssm_{name}_b", layer, width, size,
        )
        for name in "fg"
    )  # fmt: skip
    gates = {
        "alpha": alpha,
        "beta": e.linear(h, "ssm_beta", layer, heads, config.hidden),
        "decay": _reshaped(e, "ssm_a", layer, (heads,), (1, 1, heads, 1)),
    }
    read = _delta_rule(e, u, layer, gates, width)
    normed = e.builder.emit(
        Opcode.RMS_NORM,
        f"ssm_norm[{layer}]",
        x=read,
        weight=e.parameters("ssm_norm.weight", layer, size),
        eps=config.rms_eps,
        groups=heads,
    )
    gated = e.builder.emit(
        Opcode.SWIGLU, f"ssm_gated[{layer}]", gate=z, up=normed, activation=SIGMOID
    )
    return e.linear(gated, "attn_output", layer, config.hidden, width)


def _convolved(
    e: Emitter, x: View, name: str, layer: int, taps: View, channels: int, y: View | None = None
) -> View:
    history = sizes(e).taps - 1
    return e.builder.emit(
        Opcode.SSM_CONV1D,
        f"ssm_{name.replace('conv', 'conv1d')}[{layer}]",
        x=x,
        weight=taps,
        query=e.query,
        state=e.state(f"state.{name}[{layer}]", history, channels),
        history=history,
        states=e.limits.slot_states,
        y=y,
    )


def _delta_rule(
    e: Emitter, x: View, layer: int, gates: dict[str, View], rates: int, grouped: bool = False
) -> View:
    """Emit the rule with ``rates`` numbers of alpha."""
    net = sizes(e)
    heads, size = net.value_heads, net.state_size
    return e.builder.emit(
        Opcode.SSM_DELTA_NET,
        f"ssm_delta[{layer}]",
        x=x,
        **gates,
        dt_bias=e.parameters("ssm_dt.bias", layer, rates),
        query=e.query,
        state=e.state(f"state.delta[{layer}]", heads, size, size),
        key_heads=net.key_heads,
        value_heads=heads,
        state_size=size,
        grouped=int(grouped),
        eps=e.config.rms_eps,
        states=e.limits.slot_states,
    )


def _reshaped(
    e: Emitter, name: str, layer: int, shape: tuple[int, ...], stored: tuple[int, ...]
) -> View:
    file = file_name(name, layer)
    return e.tensors.reshaped(e.builder, f"{e.tensors.owner}.{file}", file, shape, stored)


def sizes(e: Emitter) -> DeltaNet:
    """The sizes of the delta-net layers; the model must have some."""
    assert e.config.delta_net is not None
    return e.config.delta_net


def _inputs_and_gate(e: Emitter, h: View, layer: int) -> tuple[View, View]:
    """The input of the convolution (columns of queries, keys, values), [tokens, channels], and the
    output gate, [tokens, value_width].

    A joint tensor holds, for each key head, its rows of query, key, values and gates."""
    net, hidden = sizes(e), e.config.hidden
    if not e.has(f"{JOINT_INPUT}.weight", layer):
        u = e.linear(h, "attn_qkv", layer, net.channels, hidden)
        return u, e.linear(h, "attn_gate", layer, net.value_width, hidden)
    size, keys = net.state_size, net.key_width
    values = net.value_width // net.key_heads
    edges = (0, size, 2 * size, 2 * size + values, 2 * (size + values))
    rows = [RowSlice(start, stop, edges[-1]) for start, stop in pairwise(edges)]
    u = e.builder.scratch(f"scratch.ssm_in[{layer}]", "tokens", net.channels)
    parts = (u[0:keys], u[keys : 2 * keys], u[2 * keys : net.channels])
    outputs = {"q": keys, "k": keys, "v": net.value_width, "z": net.value_width}
    *_, z = (
        e.linear(h, f"ssm_in_{name}", layer, width, hidden, y=y, tensor=JOINT_INPUT, rows=part)
        for (name, width), y, part in zip(outputs.items(), (*parts, None), rows, strict=True)
    )
    return u, z


def _beta_and_alpha(e: Emitter, h: View, layer: int) -> tuple[View, View]:
    """The projections beta and alpha, both [tokens, value_heads].

    A joint tensor holds, for each key head, the rows of beta and then of alpha of its value
    heads."""
    net, hidden = sizes(e), e.config.hidden
    heads = net.value_heads
    if not e.has(f"{JOINT_BETA_ALPHA}.weight", layer):
        beta = e.linear(h, "ssm_beta", layer, heads, hidden)
        return beta, e.linear(h, "ssm_alpha", layer, heads, hidden)
    group = heads // net.key_heads
    rows = RowSlice(0, group, 2 * group), RowSlice(group, 2 * group, 2 * group)
    beta, alpha = (
        e.linear(h, name, layer, heads, hidden, tensor=JOINT_BETA_ALPHA, rows=part)
        for name, part in zip(("ssm_beta", "ssm_alpha"), rows, strict=True)
    )
    return beta, alpha
