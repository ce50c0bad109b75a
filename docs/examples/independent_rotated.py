"""R13: the rotation of heads, and keys and values in codes of a few bits."""

import independent_rules as rules
import numpy as np

F = np.float32
WORD = 0xFFFFFFFF


def signs(count, philox):
    """1 or -1 for channels 0 to count - 1."""
    words = [word for n in range(4) for word in philox((0, 0), (n, 0, 0, 0))]
    return np.array([1 - 2 * (words[i // 32] >> i % 32 & 1) for i in range(count)], F)


def transformed(x):
    """The Walsh-Hadamard transform of the blocks of heads x[..., n]."""
    n = x.shape[-1]
    block, step = n & -n, 1
    y = np.where(np.abs(x) < F(2.0**-64), F(0), x)
    while step < block:
        i = np.arange(n)
        y = np.where(i & step, y[..., i ^ step] - y, y + y[..., i ^ step])
        step *= 2
    return y * F(1 / np.sqrt(float(block)))


def rotated(x, philox):
    return transformed(x * signs(x.shape[-1], philox))


def rotated_back(x, philox):
    return transformed(x) * signs(x.shape[-1], philox)


def coded(m, bits):
    """Integers m[..., n] as their codes and scales give them back."""
    out, top = np.empty_like(m).reshape(-1, 32), 2**bits - 1
    for group, back in zip(m.reshape(-1, 32), out, strict=True):
        largest, least = min(-(-int(np.abs(group).max()) // top), 2048 // top, 255), None
        for part in range(6):
            scale = largest - largest * part // 16
            levels = scale * np.arange(-top, top + 1, 2)
            # The first of the nearest levels is the lower of two.
            found = levels[np.abs(group[:, None] - levels).argmin(axis=1)]
            squares = ((group - found) ** 2).sum()
            if least is None or squares < least:
                least, back[:] = squares, found
    return out.reshape(m.shape)


def both_ways(x, philox):
    y = rotated(x, philox)
    return {"y": y, "back": rotated_back(y, philox)}


def case_codes(x, bits):
    return {"m": coded(rules.row(x, 10)[0], bits)}
