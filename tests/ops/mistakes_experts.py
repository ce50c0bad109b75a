"""What a careless kernel does with experts."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.exact.elementary import exp, sigmoid
from reference.exact.sums import sum_axis
from reference.matrix import Matrix
from reference.ops.moe_down_acc import weighted_sum
from reference.ops.moe_gate_topk import choose, route
from tests.ops.mistakes import contracted

Float32 = NDArray[np.float32]
Ids = NDArray[np.int32]


def softmax_of_chosen(logits: Float32, used: int, renormalize: bool) -> tuple[Ids, Float32]:
    """The largest logits first, then a softmax of those alone: the same numbers on paper."""
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, :used].astype(np.int32)
    chosen = np.take_along_axis(logits, ids, axis=-1)
    exponentials = exp(chosen - chosen.max(axis=-1, keepdims=True))
    return ids, exponentials / sum_axis(exponentials)[:, None]


def unnormalized(logits: Float32, used: int, renormalize: bool) -> tuple[Ids, Float32]:
    """The probabilities themselves as weights."""
    return route(logits, used, False)


def renormalized(logits: Float32, used: int, renormalize: bool) -> tuple[Ids, Float32]:
    """Weights divided by their sum whatever the node says."""
    return route(logits, used)


def ties_to_the_last(logits: Float32, used: int, renormalize: bool) -> tuple[Ids, Float32]:
    """Equal probabilities by falling index."""
    ids, weights = route(np.ascontiguousarray(logits[:, ::-1]), used, renormalize)
    return (logits.shape[1] - 1 - ids).astype(np.int32), weights


def weighted_with_bias(
    logits: Float32, used: int, choice_bias: Float32, renormalize: bool, *groups: int
) -> tuple[Ids, Float32]:
    """What chooses the experts weights them, too."""
    ids, _ = choose(logits, used, choice_bias, renormalize, *groups)
    chosen = np.take_along_axis(sigmoid(logits) + choice_bias, ids, axis=-1)
    return ids, chosen / chosen.sum(axis=-1, keepdims=True)


def chosen_without_bias(
    logits: Float32, used: int, choice_bias: Float32, renormalize: bool, *groups: int
) -> tuple[Ids, Float32]:
    """The largest sigmoids are chosen."""
    return choose(logits, used, np.zeros_like(choice_bias), renormalize, *groups)


def sum_by_rising_expert(
    products: Float32, ids: Ids, weights: Float32, scale: Any, residual: Any
) -> Float32:
    """What walking the experts and adding to every token they serve gives."""
    order = np.argsort(ids, axis=1)
    return weighted_sum(
        np.take_along_axis(products, order[..., None], axis=1),
        np.take_along_axis(ids, order, axis=1),
        np.take_along_axis(weights, order, axis=1),
        scale,
        residual,
    )


def residual_last(
    products: Float32, ids: Ids, weights: Float32, scale: Any, residual: Any
) -> Float32:
    """The experts first, the residual added to their sum."""
    total = weighted_sum(products, ids, weights, scale, None)
    return total if residual is None else residual + total


def scale_of_rank(
    products: Float32, ids: Ids, weights: Float32, scale: Any, residual: Any
) -> Float32:
    """The scale of the expert's rank among those of the token, not of its id."""
    ranks = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    return weighted_sum(products, ranks, weights, scale, residual)


def contracted_sum(
    products: Float32, ids: Ids, weights: Float32, scale: Any, residual: Any
) -> Float32:
    """The weight's product fused into the sum."""
    if scale is not None:
        products = products * scale[ids][..., None]
    y = np.zeros_like(products[:, 0]) if residual is None else residual
    for rank in range(ids.shape[1]):
        y = contracted(products[:, rank], weights[:, rank, None], y)
    return y


def overlapping_expert(matrix: Matrix, index: int) -> Matrix:
    """An expert that begins a row too early for each one before it."""
    _, rows, columns = matrix.shape
    first = index * (rows - 1)
    return Matrix(matrix.dtype, (rows, columns), matrix.blocks[first : first + rows])


def unopened_gate(residual: Float32, x: Float32, router: Any, down: Float32) -> Float32:
    """The shared expert in full, its router forgotten."""
    return residual + down


def bias_of_rank(products: Float32, bias: Float32 | None, ids: Ids) -> Float32:
    """The bias of the rank, not of the expert's id."""
    return products if bias is None else products + bias[np.arange(ids.shape[1]) % len(bias)]


def unclamped(gate: Float32, up: Float32) -> Float32:
    """The clamped gate without its bounds."""
    one = np.float32(1.0)
    return (gate / (one + exp(-(np.float32(1.702) * gate)))) * (up + one)


def groups_by_best(score: Float32, groups: int, chosen: int) -> NDArray[np.bool_]:
    """Groups by their largest score alone."""
    of_group = score.reshape(len(score), groups, -1)
    best = np.argsort(-of_group.max(axis=-1), axis=-1, kind="stable")[:, :chosen]
    kept = (best[..., None] == np.arange(groups)).any(axis=1)
    return kept.repeat(of_group.shape[-1], axis=-1)


def rest_behind(rest: Float32 | None, products: Float32) -> Float32:
    """The channels that are not multiplied behind the others."""
    if rest is not None:
        before = rest.reshape(*products.shape[:2], rest.shape[1] // products.shape[1])
        products = np.concatenate((products, before), axis=-1)
    return products.reshape(len(products), -1)
