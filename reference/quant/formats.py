"""The unpacked forms of blocks, and arithmetic that all formats share.

Blocks are uint8[rows, row_bytes] as a GGUF file stores them. Values are in row order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from contract.arrays import Floats
from contract.lazy_dataclass import dataclass

Float16 = NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class Blocks32:
    """A matrix of 32-element blocks: value = q * scale (+ minimum).

    ``q`` int8[rows, K]; ``scale`` f32[rows, K/32]; ``minimum`` f32[rows, K/32] or None."""

    q: NDArray[np.int8]
    scale: Floats
    minimum: Floats | None

    def values(self) -> Floats:
        """f32[rows, K]: one rounded product and, with a minimum, one rounded addition."""
        blocks = self.q.reshape(*self.scale.shape, 32).astype(np.float32) * self.scale[..., None]
        if self.minimum is not None:
            blocks += self.minimum[..., None]
        return blocks.reshape(self.q.shape)


@dataclass(frozen=True, slots=True)
class SuperBlocks:
    """A matrix of 256-element super-blocks: value = scale*sub_scale*q (- minimum*sub_minimum).

    ``q`` int8[rows, K]; ``scale``, ``minimum`` f32[rows, K/256]; ``sub_scale``, ``sub_minimum``
    int16[rows, K/sub_elements]; ``sub_elements`` is 16 or 32. Formats without a minimum have None
    for both minima."""

    q: NDArray[np.int8]
    scale: Floats
    minimum: Floats | None
    sub_scale: NDArray[np.int16]
    sub_minimum: NDArray[np.int16] | None
    sub_elements: int

    def values(self) -> Floats:
        """f32[rows, K]: (scale*sub_scale)*q - (minimum*sub_minimum), every operation rounded."""
        per_super = 256 // self.sub_elements
        sub_blocks = self.q.reshape(*self.sub_scale.shape, self.sub_elements).astype(np.float32)
        scale = np.repeat(self.scale, per_super, axis=-1) * self.sub_scale.astype(np.float32)
        values = scale[..., None] * sub_blocks
        if self.minimum is not None and self.sub_minimum is not None:
            minimum = np.repeat(self.minimum, per_super, axis=-1)
            values -= (minimum * self.sub_minimum.astype(np.float32))[..., None]
        return values.reshape(self.q.shape)


def to_half(values: Floats) -> Float16:
    """Round to binary16, to nearest even and saturating at +-65504 (rule R1)."""
    return np.clip(values, -65504.0, 65504.0).astype(np.float16)


def reciprocal(values: Floats) -> Floats:
    """1 / values; 0 if a value is 0 or so small that its reciprocal is not finite."""
    usable = np.abs(values) > np.float32(2.0**-126)
    one = np.float32(1.0)
    return np.where(usable, one / np.where(usable, values, one), np.float32(0.0))
