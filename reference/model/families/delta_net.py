"""The gated delta net: a recurrent layer used instead of attention."""

from __future__ import annotations

from itertools import pairwise

from contract.ir.graph import View
from contract.ir.source import RowSlice
from contract.opcodes import Opcode
from reference.model.config import DeltaNet
from reference.model.families.emitter import Emitter

LEGACY = "ssm_in"
JOINT = "ssm_ba"


def delta_net(e: Emitter, x: View, layer: int, *, grouped: bool) -> View:
    """norm(delta rule of conv(u)) * silu(z), projected back; u, z, alpha and beta are projections.

    ``grouped``: consecutive value heads share a key head; otherwise key heads repeat cyclically."""
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
    """The sizes of the delta-net layers."""
    assert e.config.delta_net is not None
    return e.config.delta_net


def _inputs_and_gate(e: Emitter, h: View, layer: int) -> tuple[View, View]:
    """The convolution's input, [queries, keys, values], and the output gate.

    The legacy tensor holds, for each key head, its query, key, values and gates."""
    net, hidden = sizes(e), e.config.hidden
    if not e.has(f"{LEGACY}.weight", layer):
        u = e.linear(h, "attn_qkv", layer, net.channels, hidden)
        return u, e.linear(h, "attn_gate", layer, net.value_width, hidden)
    size, keys = net.state_size, net.key_width
    values = net.value_width // net.key_heads
    edges = (0, size, 2 * size, 2 * size + values, 2 * (size + values))
    rows = [RowSlice(start, stop, edges[-1]) for start, stop in pairwise(edges)]
    u = e.builder.scratch(f"scratch.ssm_in[{layer}]", "tokens", net.channels)
    parts = (u[0:keys], u[keys : 2 * keys], u[2 * keys : net.channels])
    for name, part, chosen in zip("qkv", parts, rows[:3], strict=True):
        width = net.value_width if name == "v" else keys
        e.linear(h, f"ssm_in_{name}", layer, width, hidden, y=part, tensor=LEGACY, rows=chosen)
    z = e.linear(h, "ssm_in_z", layer, net.value_width, hidden, tensor=LEGACY, rows=rows[3])
    return u, z


def _beta_and_alpha(e: Emitter, h: View, layer: int) -> tuple[View, View]:
    """The projections beta and alpha, one row per value head; a joint tensor alternates them by key
    head."""
    net, hidden = sizes(e), e.config.hidden
    heads = net.value_heads
    if not e.has(f"{JOINT}.weight", layer):
        beta = e.linear(h, "ssm_beta", layer, heads, hidden)
        return beta, e.linear(h, "ssm_alpha", layer, heads, hidden)
    group = heads // net.key_heads
    first, second = RowSlice(0, group, 2 * group), RowSlice(group, 2 * group, 2 * group)
    beta = e.linear(h, "ssm_beta", layer, heads, hidden, tensor=JOINT, rows=first)
    return beta, e.linear(h, "ssm_alpha", layer, heads, hidden, tensor=JOINT, rows=second)
