"""Rule R5, first half: activations become integers with one power-of-two scale per segment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from contract.arithmetic import ACTIVATION_BITS, ACTIVATION_MAX, ACTIVATION_MIN_EXPONENT, SEGMENT
from contract.arrays import Floats, Ints


@dataclass(frozen=True, slots=True)
class Activation:
    """Quantized activations: x[t, k] is close to m[t, k] * scale[t, k // 256].

    ``m`` int32[T, K] with magnitudes up to 2047; ``scale`` f32[T, n_segments], a power of two,
    0 for an all-zero segment and NaN for a segment that holds NaN or infinity (its m are 0)."""

    m: Ints
    scale: Floats


@np.errstate(invalid="ignore")
def quantize_activation(x: Floats) -> Activation:
    """Quantize f32[T, K] by rule R5.

    With a = max|x| over a segment and 2^E <= a < 2^(E+1):
    m = clamp(rint(x * 2^(10-E)), -2047, 2047), scale = 2^(E-10). a < 2^-64 gives m = 0. A short
    last segment takes its exponent from its own elements. A NaN or infinity reaches every output
    of its token through the scale and no other token."""
    tokens, columns = x.shape
    n_segments = -(-columns // SEGMENT)
    segments = np.zeros((tokens, n_segments * SEGMENT), np.float32)
    segments[:, :columns] = x
    segments = segments.reshape(tokens, n_segments, SEGMENT)
    largest = np.abs(segments).max(axis=-1)
    broken = ~(largest < np.inf)
    silent = broken | (largest < 2.0**ACTIVATION_MIN_EXPONENT)
    if silent.any():
        segments[silent] = 0
        largest[silent] = 1
    _, exponent = np.frexp(largest)  # largest = fraction * 2^exponent with 0.5 <= fraction < 1
    shift = exponent - (ACTIVATION_BITS + 1)
    m = np.rint(segments * np.ldexp(np.float32(1), -shift)[..., None])
    m = np.minimum(np.maximum(m, -ACTIVATION_MAX), ACTIVATION_MAX).astype(np.int32)
    scale = np.ldexp(np.float32(1), shift)
    scale[silent] = 0
    scale[broken] = np.nan
    return Activation(m.reshape(tokens, n_segments * SEGMENT)[:, :columns], scale)
