"""The gated delta net (Yang et al., arXiv:2412.06464): a recurrent layer in place of attention."""

from __future__ import annotations

from itertools import pairwise

from contract.ir.graph import View
from contract.ir.source import RowSlice
from contract.opcodes import Opcode
from reference.model.config import DeltaNet
from reference.model.families.emitter import Emitter

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
    builder, config, net = e.builder, e.config, sizes(e)
    h = e.norm(x, "attn_norm", layer)
    u, z = _inputs_and_gate(e, h, layer)
    beta, alpha = _beta_and_alpha(e, h, layer)
    convolved = builder.emit(
        Opcode.SSM_CONV1D,
        f"ssm_conv1d[{layer}]",
        x=u,
        weight=e.parameters("ssm_conv1d.weight", layer, net.channels, net.taps),
        query=e.query,
        state=e.state(f"state.conv[{layer}]", net.taps - 1, net.channels),
        history=net.taps - 1,
        states=e.limits.slot_states,
    )
    heads, size = net.value_heads, net.state_size
    read = builder.emit(
        Opcode.SSM_DELTA_NET,
        f"ssm_delta[{layer}]",
        x=convolved,
        alpha=alpha,
        beta=beta,
        decay=e.parameters("ssm_a", layer, heads),
        dt_bias=e.parameters("ssm_dt.bias", layer, heads),
        query=e.query,
        state=e.state(f"state.delta[{layer}]", heads, size, size),
        key_heads=net.key_heads,
        value_heads=heads,
        state_size=size,
        grouped=int(grouped),
        eps=config.rms_eps,
        states=e.limits.slot_states,
    )
    gated = builder.emit(
        Opcode.SSM_GATED_NORM,
        f"ssm_norm[{layer}]",
        x=read,
        gate=z,
        weight=e.parameters("ssm_norm.weight", layer, size),
        heads=heads,
        eps=config.rms_eps,
    )
    return e.linear(gated, "ssm_out", layer, config.hidden, net.value_width)


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
