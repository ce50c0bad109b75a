"""The gated short convolution: a recurrent layer used instead of attention."""

from __future__ import annotations

from contract.ir.graph import View
from contract.opcodes import Opcode
from reference.model.families.emitter import Emitter


def short_conv(e: Emitter, x: View, layer: int) -> View:
    """(c * conv(b * u)) Wout, where b, c and u are three projections of h = rms(x, attn_norm)."""
    assert e.config.short_conv is not None
    hidden, taps = e.config.hidden, e.config.short_conv.taps
    h = e.norm(x, "attn_norm", layer)
    projected = e.linear(h, "shortconv.in_proj", layer, 3 * hidden, hidden)
    convolved = e.builder.emit(
        Opcode.SSM_CONV1D,
        f"shortconv[{layer}]",
        x=projected[2 * hidden : 3 * hidden],
        weight=e.parameters("shortconv.conv.weight", layer, hidden, taps),
        query=e.query,
        input_gate=projected[0:hidden],
        output_gate=projected[hidden : 2 * hidden],
        state=e.state(f"state.conv[{layer}]", taps - 1, hidden),
        history=taps - 1,
        states=e.limits.slot_states,
    )
    return e.linear(convolved, "shortconv.out_proj", layer, hidden, hidden)
