"""Rules written a second time with scalar binary32 operations, one rounding each."""

from collections.abc import Sequence

import numpy as np

F = np.float32


def halves(values: Sequence[np.float32]) -> np.float32:
    """R4: pad with +0 to 256, add the upper half to the lower until one is left."""
    padded = [F(v) for v in values] + [F(0.0)] * (256 - len(values))
    while len(padded) > 1:
        middle = len(padded) // 2
        padded = [F(a + b) for a, b in zip(padded[:middle], padded[middle:], strict=True)]
    return padded[0]


def long_sum(values: Sequence[np.float32]) -> np.float32:
    """R3: segments of 256, left fold into spans of 1024, left fold of the spans."""
    total = F(0.0)
    for span in range(0, len(values), 1024):
        part = F(0.0)
        for first in range(span, min(span + 1024, len(values)), 256):
            part = F(part + halves(values[first : min(first + 256, len(values))]))
        total = F(total + part)
    return total


def rms_norm_row(
    x: Sequence[np.float32], weight: Sequence[np.float32] | None, eps: float
) -> list[np.float32]:
    """r = 1 / sqrt(sum(x x) / n + eps); (x r) w."""
    mean = F(long_sum([F(v * v) for v in x]) / F(len(x)))
    r = F(F(1.0) / F(np.sqrt(F(mean + F(eps)))))
    scaled = [F(v * r) for v in x]
    return scaled if weight is None else [F(v * w) for v, w in zip(scaled, weight, strict=True)]
