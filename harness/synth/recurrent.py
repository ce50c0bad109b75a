"""Specifications of recurrent layers: delta nets, LFM 2's convolutions, Granite 4's Mamba-2."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Gated delta-net layers: all but every ``interval``-th.

    ``state`` is the size of a key and of a value. ``packing`` ``ssm_in`` stores the projections
    interleaved by key head, as early qwen3next files do. ``listed`` writes the list of recurrent
    layers to the metadata instead of their interval.
    """

    interval: int = 4
    state: int = 32
    key_heads: int = 2
    value_heads: int = 4
    kernel: int = 4
    packing: str = "split"
    listed: bool = False

    @property
    def inner(self) -> int:
        """Width of the values."""
        return self.value_heads * self.state


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """LFM 2's convolutions of ``kernel`` tokens, in all but every ``interval``-th layer."""

    interval: int = 3
    kernel: int = 3


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """Mamba-2 in all but every ``interval``-th layer; the values of its ``heads`` are together
    twice as wide as the residual stream."""

    interval: int = 3
    state: int = 32
    heads: int = 8
    groups: int = 1
    kernel: int = 4
