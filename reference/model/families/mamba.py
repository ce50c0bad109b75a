"""Mamba-2: a recurrent layer used instead of attention; ``mamba2``, which has no other layers."""

from __future__ import annotations

from functools import partial

from contract.ir.graph import View
from contract.ir.source import RowSlice
from contract.opcodes import Opcode
from reference.model.families.emitter import Emitter
from reference.model.families.forward import forward

NORM = "ssm_norm.weight"


def mamba(e: Emitter, x: View, layer: int, norm: str | None = "attn_norm") -> View:
    """norm(silu(z) * scan(silu(conv(u)))) Wout; z, u and the time steps are parts of one
    projection of rms(x, norm), or of x without a norm."""
    builder, sizes = e.builder, e.config.mamba
    assert sizes is not None
    inner, heads, channels = sizes.inner, sizes.heads, sizes.channels
    h = e.norm(x, norm, layer) if norm else x
    projected = e.linear(h, "ssm_in", layer, inner + channels + heads, e.config.hidden)
    bias = "ssm_conv1d.bias"
    convolved = builder.emit(
        Opcode.SSM_CONV1D,
        f"ssm_conv1d[{layer}]",
        x=projected[inner : inner + channels],
        weight=e.parameters("ssm_conv1d.weight", layer, channels, sizes.taps),
        query=e.query,
        bias=e.parameters(bias, layer, channels) if e.has(bias, layer) else None,
        state=e.state(f"state.conv[{layer}]", sizes.taps - 1, channels),
        history=sizes.taps - 1,
        states=e.limits.slot_states,
    )
    read = builder.emit(
        Opcode.SSM_SCAN,
        f"ssm_scan[{layer}]",
        x=convolved,
        dt=projected[inner + channels : inner + channels + heads],
        decay=e.vector("ssm_a", layer, heads, 1),
        dt_bias=e.parameters("ssm_dt.bias", layer, heads),
        skip=e.vector("ssm_d", layer, heads, 1),
        query=e.query,
        state=e.state(f"state.scan[{layer}]", heads, sizes.head_dim, sizes.state_size),
        heads=heads,
        groups=sizes.groups,
        head_dim=sizes.head_dim,
        state_size=sizes.state_size,
        states=e.limits.slot_states,
    )
    gated = builder.emit(Opcode.SWIGLU, f"ssm_gated[{layer}]", gate=projected[0:inner], up=read)
    return e.linear(_normed(e, gated, layer), "ssm_out", layer, e.config.hidden, inner)


def _normed(e: Emitter, x: View, layer: int) -> View:
    """The RMS norm of every group, each with weights of its own; x itself in the sizes of
    Falcon-H1 that have no such norm."""
    sizes = e.config.mamba
    assert sizes is not None
    if sizes.attends and not e.has(NORM, layer):
        return x
    groups, width = sizes.groups, sizes.inner // sizes.groups
    y = e.builder.scratch(f"scratch.ssm_norm[{layer}]", "tokens", sizes.inner)
    for group in range(groups):
        part = slice(group * width, (group + 1) * width)
        name = NORM if groups == 1 else f"ssm_norm_{group}.weight"
        rows = None if groups == 1 else RowSlice(group, group + 1, groups)
        e.builder.emit(
            Opcode.RMS_NORM,
            f"{name.removesuffix('.weight')}[{layer}]",
            x=x[part],
            weight=e.vector(name, layer, 1, width, stored=NORM, rows=rows),
            eps=e.config.rms_eps,
            y=y[part],
        )
    return y


def _layer(e: Emitter, x: View, layer: int) -> View:
    """x += mamba(rms(x))."""
    return e.add("residual", layer, x, mamba(e, x, layer))


build = partial(forward, layer=_layer)
