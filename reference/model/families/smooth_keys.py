"""Moves outliers from keys to queries by powers of two, so that rule R6 rounds keys less.

Rule R6 gives a row of attention one exponent, so a channel far above the others costs them bits.
Scores do not change when a rotary pair of the keys is divided by 2^c and the same pair of the
queries is multiplied by 2^c. The exponents c are derived from the file alone: from the weights of
the norms over a head, or from the biases and matrices of queries and keys.

Sizes are compared by their binades (the exponents of two) as integers, and sums follow rule R3, so
every machine finds the same c."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from contract.arithmetic import KV_ROW_BITS
from contract.arrays import Floats
from contract.dtypes import F32
from contract.lazy_dataclass import dataclass
from reference.exact.attention_rows import query_bits
from reference.exact.sums import sum_axis
from reference.model.config import ModelConfig, Rope
from reference.model.gguf.file import GgufFile
from reference.quant import FORMATS

Channels = tuple[int, ...]

OUTLIER_BINADES = 3
"""Binades between the median and the largest channel from which a head counts as having
outliers."""
SAMPLED_ROWS = 16
"""Rows of a matrix sampled to estimate the size of its results, for comparison with the bias."""
MAX_BINADES = 12
"""The largest c; no working model has a channel farther above the others."""


@dataclass(frozen=True, slots=True)
class Powers:
    """Exponents of two for the channels of one layer's queries and keys.

    They are those of one head, [head_dim], when they scale the weights of norms over a head, else
    of all heads."""

    queries: Channels
    keys: Channels


def smoothing_powers(config: ModelConfig, file: GgufFile) -> dict[int, Powers]:
    """The powers of each layer whose keys have outliers.

    A layer that reads another layer's keys multiplies its queries by that layer's powers."""
    found: dict[int, Powers] = {}
    for layer in config.attention_layers:
        owner = config.kv_layers[layer]
        if owner != layer:
            if owner in found:
                found[layer] = found[owner]
            continue
        sizes = _norms(config, layer, file) or _biases(config, layer, file)
        if sizes is None:
            continue
        queries, keys = sizes
        if not (np.isfinite(queries).all() and np.isfinite(keys).all()):
            continue
        heads, group = len(keys), len(queries) // len(keys)
        largest = queries.reshape(heads, group, -1).max(axis=1)
        pairs = _pair_of_channel(config.ropes[layer], keys.shape[1])
        powers = np.array([_powers(q, k, pairs) for q, k in zip(largest, keys, strict=True)])
        if powers.any():
            of_queries, of_keys = powers.repeat(group, axis=0).ravel(), -powers.ravel()
            found[layer] = Powers(tuple(of_queries.tolist()), tuple(of_keys.tolist()))
    return found


def _norms(config: ModelConfig, layer: int, file: GgufFile) -> tuple[Floats, Floats] | None:
    """Sizes of the channels after the norms of queries and keys: [1, head_dim] for norms over a
    head, [heads, head_dim] and [kv_heads, head_dim] for norms over all heads."""
    names = [f"blk.{layer}.attn_{side}_norm.weight" for side in "qk"]
    if not _all_f32(names, file):
        return None
    size = config.head_dims[layer]
    queries, keys = (np.abs(file.tensor_array(name)) for name in names)
    if queries.shape == keys.shape == (size,):
        return queries[None], keys[None]
    heads, kv_heads = config.heads[layer], config.kv_heads[layer]
    if (queries.size, keys.size) != (heads * size, kv_heads * size):
        return None
    return queries.reshape(heads, size), keys.reshape(kv_heads, size)


def _biases(config: ModelConfig, layer: int, file: GgufFile) -> tuple[Floats, Floats] | None:
    """Sizes of the channels of biased projections, [heads, head_dim] and [kv_heads, head_dim].

    A channel's size is the larger of its bias and the typical result of the matrix for a normed
    input."""
    size = config.head_dims[layer]
    q_width, kv_width = config.heads[layer] * size, config.kv_heads[layer] * size
    prefix = f"blk.{layer}.attn_"
    if f"{prefix}qkv.bias" in file.tensors:
        names, starts, whole = [f"{prefix}qkv"] * 2, (0, q_width), q_width + 2 * kv_width
    else:
        names, starts, whole = [f"{prefix}q", f"{prefix}k"], (0, 0), 0
    if not _all_f32([f"{prefix}norm.weight", *(f"{name}.bias" for name in names)], file):
        return None
    found = []
    for name, start, width in zip(names, starts, (q_width, kv_width), strict=True):
        bias, matrix = file.tensor_array(f"{name}.bias"), file.tensors.get(f"{name}.weight")
        shape = (whole or width, config.hidden)
        if matrix is None or matrix.shape != shape or bias.shape != shape[:1]:
            return None
        rows = start + np.arange(SAMPLED_ROWS) * width // SAMPLED_ROWS
        level = _typical_size(file, f"{name}.weight", rows, f"{prefix}norm.weight")
        found.append(np.maximum(np.abs(bias[start : start + width]), level).reshape(-1, size))
    return found[0], found[1]


@np.errstate(all="ignore")
def _typical_size(file: GgufFile, matrix: str, rows: NDArray[np.intp], norm: str) -> np.float32:
    """The typical size of a matrix's results for a normed input: the median over ``rows`` w of
    sqrt(sum (w g)^2), where g are the weights of the norm before it."""
    dtype = file.tensors[matrix].dtype
    if dtype is None or file.tensors[norm].shape != file.tensors[matrix].shape[1:]:
        return np.float32(0.0)
    weights = FORMATS[dtype].dequantize(file.tensor_bytes(matrix)[rows])
    products = weights * file.tensor_array(norm)
    return np.float32(np.sort(np.sqrt(sum_axis(products * products)))[len(rows) // 2])


def _all_f32(names: list[str], file: GgufFile) -> bool:
    return all(name in file.tensors and file.tensors[name].dtype is F32 for name in names)


def _pair_of_channel(rope: Rope, head_dim: int) -> NDArray[np.intp]:
    """A pair number for every channel: two channels that are rotated together share one."""
    channel = np.arange(head_dim)
    together = channel % (rope.dims // 2) if rope.neox else channel // 2
    return np.where(channel < rope.dims, together, channel)


def _powers(queries: Floats, keys: Floats, pairs: NDArray[np.intp]) -> list[int]:
    """The exponent c of every channel of one KV head.

    For each level t from the median up, let c = max(0, binade of the key - t); choose the t with
    the least noise. Rounding keys costs each channel a step of the largest key, times all queries;
    rounding queries costs the same with queries and keys exchanged."""
    k, q = _binades(keys, pairs), _binades(queries, pairs)
    used = sorted(set(pairs.tolist()))
    highest = max(k)
    if highest < OUTLIER_BINADES:
        return [0] * len(pairs)
    finer = 2 * (query_bits(len(pairs)) - KV_ROW_BITS)
    best, least = highest, None
    for level in range(highest, max(0, highest - MAX_BINADES) - 1, -1):
        c = [max(0, binade - level) for binade in k]
        higher, lower = (
            [4 ** (a + b) for a, b in zip(q, c, strict=True)],
            [4 ** (a - b) for a, b in zip(k, c, strict=True)],
        )
        noise = (max(lower) * sum(higher[n] for n in used) << finer) + max(higher) * sum(
            lower[n] for n in used
        )
        if least is None or noise < least:
            best, least = level, noise
    return [max(0, k[pair] - best) for pair in pairs.tolist()]


def _binades(values: Floats, pairs: NDArray[np.intp]) -> list[int]:
    """For each pair number, the binades of its larger channel above the median pair, at least 0."""
    largest = np.zeros(len(pairs), np.float32)
    np.maximum.at(largest, pairs, values)
    exponents = np.frexp(np.where(largest > 0, largest, np.finfo(np.float32).tiny))[1]
    median = int(np.sort(exponents[np.unique(pairs)])[len(np.unique(pairs)) // 2])
    return [max(0, int(exponent) - median) for exponent in exponents]
