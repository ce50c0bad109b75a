"""Specifications of the recurrent layers of LFM 2 and Granite 4."""

from __future__ import annotations

from dataclasses import dataclass


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
