"""MOE_GATE_TOPK: chooses the experts of each token and their weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from contract.arrays import Floats, Ints
from reference.exact.elementary import exp, sigmoid
from reference.exact.sums import sum_axis
from reference.matrix import Matrix
from reference.quant.dot import matmul

SMALLEST_SUM = np.float32(2.0**-14)
SMALLEST_NORMAL = np.float32(2.0**-126)
LOWEST = np.finfo(np.float32).min


def moe_gate_topk(
    *,
    x: Floats,
    gate_weight: Matrix,
    used: int,
    renormalize: int = 1,
    groups: int = 1,
    groups_used: int = 1,
    softmax: int = 0,
    bias: Floats | None = None,
    choice_bias: Floats | None = None,
) -> tuple[Floats, Ints, Floats]:
    """p = softmax(x gate_weight^T + bias); the ``used`` largest p, divided by their sum if
    ``renormalize`` is 1 (rules R4, R7).

    With ``choice_bias`` p is the sigmoid unless ``softmax`` is 1, and the largest p + choice_bias
    are chosen, of ``groups_used`` of the ``groups`` of experts if there are several. x is [tokens,
    hidden], both biases [experts]. Returns logits [tokens, experts], then the ids and weights of
    ``route`` or ``choose``."""
    logits = matmul(gate_weight.blocks, gate_weight.dtype, x)
    if bias is not None:
        logits = logits + bias
    choice = routing(
        logits, used, choice_bias, bool(renormalize), groups, groups_used, bool(softmax)
    )
    return (logits, *choice)


def routing(
    logits: Floats,
    used: int,
    choice_bias: Floats | None,
    renormalize: bool,
    groups: int = 1,
    groups_used: int = 1,
    softmax: bool = False,
) -> tuple[Ints, Floats]:
    """The experts of each token and their weights: of ``choose`` with ``choice_bias``, else of
    ``route``, which knows no groups."""
    if choice_bias is None:
        return route(logits, used, renormalize)
    return choose(logits, used, choice_bias, renormalize, groups, groups_used, softmax)


def route(logits: Floats, used: int, renormalize: bool = True) -> tuple[Ints, Floats]:
    """The ids int32 [tokens, used] of the chosen experts and their weights, from logits [tokens,
    experts].

    ids are ordered by falling probability, equal ones by rising index; a probability below 2^-126
    counts as +0, so that a device that flushes subnormals finds the same ties. The weights are p /
    max(sum of the used p, 2^-14), where the sum adds from left to right in that order, or p itself
    unless ``renormalize``. A token whose largest logit is NaN or infinite gets experts 0, 1, ...
    with NaN weights."""
    p = _softmax(logits)
    ids = np.argsort(-p, axis=-1, kind="stable")[:, :used].astype(np.int32)
    return ids, _weights(p, ids, renormalize)


def choose(
    logits: Floats,
    used: int,
    choice_bias: Floats,
    renormalize: bool = True,
    groups: int = 1,
    groups_used: int = 1,
    softmax: bool = False,
) -> tuple[Ints, Floats]:
    """The experts with the largest p + choice_bias and their weights: p = sigmoid(logits), or that
    of ``route`` with ``softmax``.

    ids are ordered by falling p + choice_bias, equal ones by rising index; choice_bias and the sum
    count as +0 below 2^-126, as a device may flush them. Of several ``groups`` the experts of all
    but the ``groups_used`` best have the lowest finite number instead. The weights are those of
    ``route``. A token with a sum that is not finite gets experts 0, 1, ... with NaN weights."""
    p = _softmax(logits) if softmax else sigmoid(logits)
    sums = score = _flushed(p + _flushed(choice_bias))
    if groups > 1:
        score = np.where(_of_best_groups(sums, groups, groups_used), sums, LOWEST)
    ids = np.argsort(-score, axis=-1, kind="stable")[:, :used].astype(np.int32)
    broken = ~np.isfinite(sums).all(axis=-1)
    ids[broken] = np.arange(used, dtype=np.int32)
    weights = _weights(p, ids, renormalize)
    weights[broken] = np.nan
    return ids, weights


def _softmax(logits: Floats) -> Floats:
    """The probability of each expert, +0 below 2^-126."""
    exponentials = exp(logits - logits.max(axis=-1, keepdims=True))
    p: Floats = exponentials / sum_axis(exponentials)[:, None]
    p[p < SMALLEST_NORMAL] = 0.0
    return p


@np.errstate(invalid="ignore", over="ignore")
def _of_best_groups(score: Floats, groups: int, chosen: int) -> NDArray[np.bool_]:
    """Whether each expert is of one of the ``chosen`` groups with the largest sums of their two
    largest scores, which count as +0 below 2^-126; of equal sums the first groups are chosen."""
    of_group = np.sort(score.reshape(len(score), groups, score.shape[1] // groups), axis=-1)
    value = _flushed(of_group[..., -1] + of_group[..., -2])
    best = np.argsort(-value, axis=-1, kind="stable")[:, :chosen]
    kept = np.zeros(value.shape, np.bool_)
    np.put_along_axis(kept, best, True, axis=-1)
    return kept.repeat(score.shape[1] // groups, axis=-1)


def _flushed(x: Floats) -> Floats:
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.float32(0.0), x)


def _weights(p: Floats, ids: Ints, renormalize: bool) -> Floats:
    """The p of the chosen experts, / max(their sum, 2^-14) if ``renormalize``, added from left to
    right."""
    chosen = np.take_along_axis(p, ids, axis=-1)
    if not renormalize:
        return chosen
    total = np.zeros(len(p), np.float32)
    for rank in range(ids.shape[1]):
        total = total + chosen[:, rank]
    bounded: Floats = np.maximum(total, SMALLEST_SUM)
    return chosen / bounded[:, None]
