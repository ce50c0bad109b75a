"""What a careless kernel does instead of each rule."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference.exact import elementary
from reference.exact.activation import Activation, quantize_activation
from reference.exact.kv_storage import stored
from reference.exact.sums import sum_axis
from reference.ops import sample

Float32 = NDArray[np.float32]
ONE = np.float32(1.0)


def numpy_exp(x: Float32) -> Float32:
    """A library's exp."""
    return np.exp(x)


def log_by_base_two(x: Float32) -> Float32:
    """The instruction many devices have, times ln 2."""
    return np.log2(x) * np.float32(np.log(2.0))


def left_fold(products: Float32) -> Float32:
    """One running sum over the whole axis."""
    total = np.zeros(products.shape[:-1], np.float32)
    for column in range(products.shape[-1]):
        total = total + products[..., column]
    return total


def one_tree(products: Float32) -> Float32:
    """A tree over the whole axis, as a reduction on a GPU does it."""
    length = products.shape[-1]
    size = 1 << max(0, length - 1).bit_length()
    values = np.zeros((*products.shape[:-1], size), np.float32)
    values[..., :length] = products
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def unchunked_dot(q: Float32, keys: Float32) -> Float32:
    """q.k as one left fold."""
    return left_fold(q * keys)


def contracted(a: Float32, b: Float32, c: Float32) -> Float32:
    """a b + c with the product unrounded: binary64 holds it exactly, as a fused unit does."""
    return (a.astype(np.float64) * b.astype(np.float64) + c).astype(np.float32)


def contracted_dot(q: Float32, keys: Float32) -> Float32:
    """q.k by the rule's folds, with contraction."""
    total = np.zeros(len(keys), np.float32)
    for start in range(0, len(q), 16):
        chunk = np.zeros(len(keys), np.float32)
        for column in range(start, min(start + 16, len(q))):
            chunk = contracted(keys[:, column], q[column], chunk)
        total = total + chunk
    return total


def contracted_rope(
    *,
    x: Float32,
    rope_table: Float32,
    query: NDArray[np.int32],
    heads: int,
    head_dim: int,
    neox: int,
) -> Float32:
    """The rotation with the first product of each line contracted into the sum."""
    y = x.reshape(len(x), heads, head_dim).copy()
    pairs = rope_table.shape[-1]
    low = slice(0, pairs) if neox else slice(0, 2 * pairs, 2)
    high = slice(pairs, 2 * pairs) if neox else slice(1, 2 * pairs, 2)
    cosine, sine = np.moveaxis(rope_table[query[:, 2]], 1, 0)[:, :, None, :]
    a, b = y[..., low].copy(), y[..., high].copy()
    y[..., low] = contracted(a, cosine, -(b * sine))
    y[..., high] = contracted(a, sine, b * cosine)
    return y.reshape(x.shape)


def reciprocal_silu(x: Float32) -> Float32:
    """x / (1 + exp(-x)) as x times a reciprocal."""
    return x * (ONE / (ONE + elementary.exp(-x)))


def reciprocal_soft_cap(*, x: Float32, cap: float) -> Float32:
    """x / cap as x times a reciprocal."""
    bound = np.float32(cap)
    return bound * elementary.tanh(x * (ONE / bound))


def reciprocal_root_norm(
    *, x: Float32, eps: float, weight: Float32 | None = None, groups: int = 1
) -> Float32:
    """1 / sqrt in one rounding instead of two, as a hardware rsqrt gives it at best."""
    width = x.shape[-1] // groups
    heads = x.reshape(len(x), groups, width)
    mean = sum_axis(heads * heads) / np.float32(width)
    r = (1.0 / np.sqrt((mean + np.float32(eps)).astype(np.float64))).astype(np.float32)
    y = heads * r[..., None]
    return (y if weight is None else y * weight).reshape(x.shape)


def eight_bit_activation(x: Float32) -> Activation:
    """127 steps instead of 2,047."""
    right = quantize_activation(x)
    return Activation(np.rint(right.m / 16).astype(np.int32), right.scale * np.float32(16))


def truncated_activation(x: Float32) -> Activation:
    """Towards zero instead of to the nearest integer."""
    right = quantize_activation(x)
    with np.errstate(all="ignore"):
        exact = x / np.repeat(right.scale, 256, axis=1)[:, : x.shape[1]]
    exact = np.nan_to_num(exact, posinf=0.0, neginf=0.0)
    return Activation(np.clip(exact, -2047, 2047).astype(np.int32), right.scale)


def unsaturated(x: Float32, dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    """binary16 that overflows to infinity."""
    if dtype == np.uint8:
        return stored(x, dtype)
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def reciprocal_blocks(x: Float32, element: np.dtype[np.generic]) -> NDArray[np.generic]:
    """Q8_0 pages by the reciprocal of the scale that binary16 rounded."""
    if element != np.uint8:
        return stored(x, element)
    parts = x.reshape(*x.shape[:-1], x.shape[-1] // 32, 32)
    d = np.clip(np.abs(parts).max(axis=-1) / np.float32(127), 0, 65504).astype("<f2")
    inverse = ONE / np.where(d > 0, d, np.inf).astype(np.float32)
    q = np.clip(np.rint(parts * inverse[..., None]), -127, 127).astype(np.int8)
    blocks = np.concatenate([d[..., None].view(np.uint8), q.view(np.uint8)], axis=-1)
    return blocks.reshape(*x.shape[:-1], x.shape[-1] // 32 * 34)


def unrounded_scale(x: Float32, element: np.dtype[np.generic]) -> NDArray[np.generic]:
    """Q8_0 pages whose integers come from the scale before binary16 rounds it."""
    right = stored(x, element)
    if element != np.uint8:
        return right
    parts = x.reshape(*x.shape[:-1], x.shape[-1] // 32, 32)
    d = np.abs(parts).max(axis=-1, keepdims=True) / np.float32(127)
    q = np.clip(np.rint(parts / np.where(d > 0, d, ONE)), -127, 127).astype(np.int8)
    blocks = right.reshape(*x.shape[:-1], x.shape[-1] // 32, 34)
    blocks[..., 2:] = q.view(np.uint8)
    return right


def no_penalties(values: Float32, record: np.void, recent: NDArray[np.int32]) -> Float32:
    """Recent tokens forgotten."""
    return values


def unbiased(values: Float32, record: np.void, bias: NDArray[np.int32] | None) -> Float32:
    """Biases forgotten."""
    return values


def bias_after_penalties(
    values: Float32, record: np.void, bias: NDArray[np.int32] | None, recent: NDArray[np.int32]
) -> Float32:
    """The repetition penalty of the logit alone."""
    return sample.biased(sample.penalized(values, record, recent), record, bias)


def everything_allowed(
    values: Float32, record: np.void, allowed: NDArray[np.int32] | None
) -> Float32:
    """The mask forgotten."""
    return values


def mask_from_the_high_bit(
    values: Float32, record: np.void, allowed: NDArray[np.int32] | None
) -> Float32:
    """Token v at bit 31 - v mod 32."""
    if allowed is None or not record["mask"] > 0:
        return values
    octets = allowed[record["mask"] - 1].astype(">i4").view(np.uint8)
    return np.where(np.unpackbits(octets, count=len(values)), values, np.float32(-np.inf))


def row_before_the_mask(
    values: Float32, record: np.void, allowed: NDArray[np.int32] | None
) -> Float32:
    """Mask k at row k, the last at row 0."""
    if allowed is None or not record["mask"] > 0:
        return values
    octets = allowed[record["mask"] % len(allowed)].astype("<i4").view(np.uint8)
    bits = np.unpackbits(octets, count=len(values), bitorder="little")
    return np.where(bits, values, np.float32(-np.inf))


def logits_less_one_sum(x: Float32, wanted: Float32) -> Float32:
    """log p as x - (m + log s): one rounding elsewhere."""
    largest = x.max(axis=1, keepdims=True)
    log_sum = elementary.log(sum_axis(elementary.exp(x - largest)))
    logs: Float32 = wanted - (largest + log_sum[:, None])
    return logs


def unshifted_sum(x: Float32, wanted: Float32) -> Float32:
    """The sum of exp(x), without the largest taken away first."""
    return wanted - elementary.log(sum_axis(elementary.exp(x)))[:, None]


def likeliest_from_the_last(row: Float32, top: int) -> NDArray[np.intp]:
    """Equal logits by falling id."""
    backwards = np.argsort(-row[::-1], kind="stable")
    return len(row) - 1 - backwards[:top]


def last_argmax(*, logits: Float32) -> NDArray[np.int32]:
    """Ties broken by the higher id."""
    return (logits.shape[1] - 1 - logits[:, ::-1].argmax(axis=1)).astype(np.int32)
