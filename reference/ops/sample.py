"""SAMPLE: bias, penalties, temperature, mask, then top-k, top-p, min-p and the draw, in integers
(rule R9).

This definition fixes what the rule leaves open. The repetition penalty divides a positive logit and
multiplies any other. top-p keeps a token while the weight before it is below ``rint(top_p 2^16) /
2^16`` of the total; min-p keeps it while its weight is at least ``rint(min_p 2^16) / 2^16`` of the
largest. The draw walks the kept tokens in order of id, which needs no sort. The mask is applied
last, since a forbidden token is -infinity whatever is added, multiplied or divided."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from contract.arithmetic import SAMPLE_WEIGHT_BITS
from contract.arrays import Floats, Ints
from contract.records import LOGIT_BIAS, SAMPLING
from reference.exact.elementary import exp
from reference.exact.philox import draw

NO_TOKEN = -1
"""The result of a row with a logit that is not finite, or without an allowed token."""

THRESHOLD_BITS = 16
WEIGHT_SCALE = np.float32(1 << SAMPLE_WEIGHT_BITS)


def sample(
    *,
    logits: Floats,
    sampling: Ints,
    recent: Ints,
    allowed: Ints | None = None,
    bias: Ints | None = None,
) -> Ints:
    """Sample one token per row; NO_TOKEN where any logit is not finite (also of a forbidden token),
    the largest overflows, or no token is allowed.

    ``sampling`` is [rows, 16] words, one SAMPLING record per row, which says what of the other
    operands applies to the row. ``recent`` is [slots, n] token ids for the penalties. ``allowed``
    is [masks, words]: bit v mod 32 of word v / 32 allows token v. ``bias`` is [biases, 2] words,
    one LOGIT_BIAS record per row."""
    records = np.ascontiguousarray(sampling).view(SAMPLING)[:, 0]
    token = np.full(len(logits), NO_TOKEN, np.int32)
    for row, (values, record) in enumerate(zip(logits, records, strict=True)):
        if np.isfinite(values).all():
            adjusted = adjust(values, record, bias, window(record, recent))
            token[row] = _sample_row(adjusted, record, allowed)
    return token


def _sample_row(values: Floats, record: np.void, allowed: Ints | None) -> int:
    random = record["temperature"] > 0
    if random:
        values = values / record["temperature"]
    values = forbid(values, record, allowed)
    if not np.isfinite(values.max()):
        return NO_TOKEN
    if not random:
        return int(values.argmax())
    order = np.argsort(-values, kind="stable")
    if record["top_k"] > 0:
        order = order[: record["top_k"]]
    weights = np.rint(exp(values[order] - values[order[0]]) * WEIGHT_SCALE).astype(np.int64)
    candidates = order[keep(weights, float(record["top_p"]), float(record["min_p"]))]
    by_id = np.argsort(candidates)
    ids, weights = candidates[by_id], weights[: len(candidates)][by_id]
    seed = int(record["seed_high"]) << 32 | int(record["seed_low"])
    cumulative = np.cumsum(weights)
    target = draw(seed, int(record["position"])) * int(cumulative[-1]) >> 32
    return int(ids[np.searchsorted(cumulative, target, side="right")])


def forbid(values: Floats, record: np.void, allowed: Ints | None) -> Floats:
    """``values`` with -infinity for the tokens that the row's mask does not allow."""
    if allowed is None or not record["mask"] > 0:
        return values
    octets = allowed[record["mask"] - 1].astype("<i4").view(np.uint8)
    bits = np.unpackbits(octets, count=len(values), bitorder="little")
    return np.where(bits, values, np.float32(-np.inf))


def adjust(values: Floats, record: np.void, bias: Ints | None, recent: Ints) -> Floats:
    """Logits plus the row's biases, then with its penalties."""
    return penalized(biased(values, record, bias), record, recent)


def biased(values: Floats, record: np.void, bias: Ints | None) -> Floats:
    """Logits plus the row's biases; each addition rounds once."""
    if bias is None:
        return values
    first = int(record["bias_first"])
    rows = np.ascontiguousarray(bias[first : first + int(record["bias_count"])])
    biases = rows.view(LOGIT_BIAS)[:, 0]
    values = values.copy()
    values[biases["token"]] += biases["bias"]
    return values


def window(record: np.void, recent: Ints) -> Ints:
    """The tokens before the sampled position that the penalties count."""
    position = int(record["position"])
    positions = np.arange(max(0, position - int(record["repeat_last_n"])), position)
    seen: Ints = recent[record["slot"], positions % recent.shape[1]]
    return seen


def penalized(values: Floats, record: np.void, recent: Ints) -> Floats:
    """Logits after the repetition, presence and frequency penalties of the recent tokens."""
    ids, counts = np.unique(recent, return_counts=True)
    if not len(ids):
        return values
    values = values.copy()
    seen = values[ids]
    penalty = record["repeat_penalty"]
    seen = np.where(seen > 0, seen / penalty, seen * penalty)
    seen = seen - counts.astype(np.float32) * record["frequency_penalty"]
    values[ids] = seen - record["presence_penalty"]
    return values


def keep(weights: NDArray[np.int64], top_p: float, min_p: float) -> slice:
    """The part of the descending ``weights`` that top-p and min-p keep: a prefix, never empty."""
    count = len(weights)
    if top_p < 1.0:
        threshold = round(top_p * (1 << THRESHOLD_BITS)) * int(weights.sum())
        before = np.cumsum(weights) - weights
        count = int(np.count_nonzero(before << THRESHOLD_BITS < threshold))
    if min_p > 0.0:
        threshold = round(min_p * (1 << THRESHOLD_BITS)) * int(weights[0])
        count = min(count, int(np.count_nonzero(weights << THRESHOLD_BITS >= threshold)))
    return slice(0, max(count, 1))
