"""Norms of each head that subtract its mean: StableLM 2 12B, Command R+."""

from __future__ import annotations

from contract.ir.graph import View
from contract.opcodes import Opcode
from reference.model.families.emitter import Emitter, label
from reference.model.families.head_products import head_product
from reference.model.families.smooth_keys import Channels


def layer_norm_heads(e: Emitter, x: View, side: str, layer: int, powers: Channels, y: View) -> None:
    """Emit the layer norm of every head of x to y: queries or keys (``side`` is "q" or "k"), each
    head with its own weights, and with its columns times powers of two when there are any."""
    emit, size = e.builder.emit, e.config.head_dims[layer]
    heads = (e.config.heads if side == "q" else e.config.kv_heads)[layer]
    normed = emit(
        Opcode.RMS_NORM,
        label(f"{side}_norm", layer),
        x=_centred(e, x, side, layer, heads, size),
        eps=e.config.rms_eps,
        groups=heads,
    )
    scaled = emit(
        Opcode.SCALE_COLUMNS,
        label(f"{side}_norm_scale", layer),
        x=normed,
        factors=e.vector(f"attn_{side}_norm.weight", layer, heads, size),
        y=None if powers else y,
    )
    if powers:
        e.scale_powers(scaled, f"{side}_norm_smoothed", layer, powers, y)


def _centred(e: Emitter, x: View, side: str, layer: int, heads: int, size: int) -> View:
    """Emit x minus the mean of each head: its sum, and the copy to its columns, are products with
    ones."""
    sums, copies = (heads, 1, size), (heads, size, 1)
    ones = e.ones(f"rows_{heads}", *sums)
    total = head_product(e, x, f"{side}_sum", layer, sums, weight=ones)
    mean = e.builder.emit(Opcode.SCALE, label(f"{side}_mean", layer), x=total, factor=-1.0 / size)
    ones = e.ones(f"columns_{heads}", *copies)
    means = head_product(e, mean, f"{side}_means", layer, copies, weight=ones)
    return e.add(f"{side}_centred", layer, x, means)
