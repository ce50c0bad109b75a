"""What a careless kernel does instead of each rule."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.arithmetic import ATTENTION_WEIGHT_BITS, KV_ROW_BITS, KV_TILE
from contract.records import SAMPLING
from reference.exact import elementary
from reference.exact.activation import Activation, quantize_activation
from reference.exact.attention_rows import (
    EXP2_MIN,
    LOG2_E,
    Partial,
    Rows,
    exp2,
    merge,
    power_of_two,
    row_integers,
)
from reference.exact.coded_rows import rotated
from reference.exact.kv_storage import stored
from reference.exact.sums import fold_segment, sum_axis
from reference.ops.flash_attn_batched import Score
from reference.ops.row_digest import row_digest, span_digests
from reference.ops.sample import NO_TOKEN, adjust, biased, forbid, penalized, sample, window

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


def contracted(a: Float32, b: Float32, c: Float32) -> Float32:
    """a b + c with the product unrounded: binary64 holds it exactly, as a fused unit does."""
    return (a.astype(np.float64) * b.astype(np.float64) + c).astype(np.float32)


def contracted_rope(
    *, x: Float32, rope_table: Float32, query: NDArray[np.int32], heads: int, head_dim: int,
    neox: int,
) -> Float32:  # fmt: skip
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


def exponent_over(positions: int) -> Callable[[Float32, int], Rows]:
    """Keys and values whose exponent is the largest of so many neighbouring positions."""

    def wrong(x: Float32, bits: int) -> Rows:
        right = row_integers(x, bits)
        if x.ndim < len(("side", "position", "head", "channel")):
            return right
        starts = np.arange(0, x.shape[1], positions)
        most = np.maximum.reduceat(right.exponent, starts, axis=1)
        exponent = most.repeat(positions, axis=1)[:, : x.shape[1]]
        return Rows(
            np.rint(x * power_of_two(bits - exponent)[..., None]).astype(np.int32), exponent
        )

    return wrong


def truncated_rows(x: Float32, bits: int) -> Rows:
    """Towards zero instead of to the nearest integer."""
    right = row_integers(x, bits)
    unit = power_of_two(bits - right.exponent)
    return Rows(np.trunc(x * unit[..., None]).astype(np.int32), right.exponent)


def masked_maximum(q: Rows, keys: Rows, values: Rows, first: int, score: Score) -> Partial:
    """U over whole tiles, keys before the window included."""
    total = None
    for start in range(first - first % KV_TILE, len(keys.m), KV_TILE):
        at = slice(start, min(start + KV_TILE, len(keys.m)))
        x = score(q, keys[at])
        top = np.rint((x + values.exponent[at].astype(np.float32)).max())
        tile = _tile_of(x - top, top, values[at], max(first - start, 0), 0)
        total = tile if total is None else merge(total, tile)
    assert total is not None
    return total


def fused_tile(q: Rows, keys: Rows, values: Rows, offset: int, score: Any) -> Partial:
    """U is taken from the product of J and its scale before that is rounded."""
    x = score(q, keys)
    top = np.rint((x + values.exponent.astype(np.float32)).max())
    unit = power_of_two(q.exponent - score.keywords["bits"] - KV_ROW_BITS)
    factor = np.float64((score.keywords["scale"] * LOG2_E) * unit)
    product = (keys.m @ q.m).astype(np.float32) * factor * power_of_two(keys.exponent)
    return _tile_of((product - top).astype(np.float32), top, values, 0, offset)


def _tile_of(d: Float32, top: Float32, values: Rows, hidden: int, offset: int) -> Partial:
    """The rest of a tile; the first ``hidden`` positions are masked."""
    p = exp2(np.maximum(d, EXP2_MIN))
    p[:hidden] = 0
    w = np.rint(p * power_of_two(values.exponent + ATTENTION_WEIGHT_BITS)).astype(np.int32)
    weights = np.zeros(KV_TILE, np.float32)
    weights[offset : offset + len(p)] = p
    return Partial(top, fold_segment(weights), (w @ values.m).astype(np.float32))


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
    return biased(penalized(values, record, recent), record, bias)


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


def logits_less_one_sum(x: Float32, requested: Float32) -> Float32:
    """log p as x - (m + log s): one rounding elsewhere."""
    largest = x.max(axis=1, keepdims=True)
    log_sum = elementary.log(sum_axis(elementary.exp(x - largest)))
    logs: Float32 = requested - (largest + log_sum[:, None])
    return logs


def unshifted_sum(x: Float32, requested: Float32) -> Float32:
    """The sum of exp(x), without the largest taken away first."""
    return requested - elementary.log(sum_axis(elementary.exp(x)))[:, None]


def likeliest_from_the_last(row: Float32, top: int) -> NDArray[np.intp]:
    """Equal logits by falling id."""
    backwards = np.argsort(-row[::-1], kind="stable")
    ids: NDArray[np.intp] = np.subtract(len(row) - 1, backwards[:top])
    return ids


def likeliest_by_bits(row: Float32, top: int) -> NDArray[np.intp]:
    """+0 before -0, as the bits of numbers have them."""
    ids: NDArray[np.intp] = np.lexsort((np.signbit(row), -row))[:top]
    return ids


def last_of_equals(
    *, logits: Float32, sampling: NDArray[np.int32], recent: NDArray[np.int32],
    allowed: NDArray[np.int32] | None = None, bias: NDArray[np.int32] | None = None,
) -> NDArray[np.int32]:  # fmt: skip
    """Ties broken by the higher id where nothing is drawn."""
    token = sample(logits=logits, sampling=sampling, recent=recent, allowed=allowed, bias=bias)
    for row, record in enumerate(np.ascontiguousarray(sampling).view(SAMPLING)[:, 0]):
        if record["temperature"] == 0 and token[row] != NO_TOKEN:
            values = adjust(logits[row], record, bias, window(record, recent))
            values = forbid(values, record, allowed)
            token[row] = np.flatnonzero(values == values.max())[-1]
    return token


def rotated_twice(x: Float32) -> Float32:
    """A head rotated again instead of back."""
    return rotated(x)


def leaves_of_neighbours(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The digests of spans whose leaves are 64 logits side by side."""
    apart = words.reshape(-1, 16, 64).transpose(0, 2, 1)
    return span_digests(np.ascontiguousarray(apart).reshape(-1))


def every_row_digested(*, logits: Float32, digested: NDArray[np.int32]) -> NDArray[np.int32]:
    """Digests of the rows that none was asked for, too."""
    return row_digest(logits=logits, digested=np.ones_like(digested))


def no_signs(head_dim: int) -> Float32:
    """A rotation whose signs are left out."""
    return np.ones(head_dim, np.float32)
