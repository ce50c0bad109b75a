"""Experts, and heads with matrices of their own, of docs/arithmetic.md: part of independent.py."""

import independent_rules as rules
import numpy as np
from independent_gguf import Matrix

F = np.float32


def flushed(x):
    return np.where(abs(x) < F(2.0**-126), F(0), x)


def case_route(logits, used, renormalize=True):
    e = rules.exp(logits - logits.max(axis=1, keepdims=True))
    p = e / rules.total_of(e)[:, None]
    p = flushed(p)
    return weighted(p, p, used, renormalize)


def case_choice(logits, used, choice_bias, renormalize=True, groups=1, groups_used=1):
    p = rules.sigmoid(logits)
    score = flushed(p + flushed(choice_bias))
    if groups > 1:
        best = np.sort(score.reshape(len(score), groups, -1), axis=-1)
        sums = flushed(best[..., -1] + best[..., -2])
        width = score.shape[1] // groups
        for row, of_group in zip(score, sums, strict=True):
            left_out = sorted(range(groups), key=lambda g: (-of_group[g], g))[groups_used:]
            for group in left_out:
                row[group * width : (group + 1) * width] = np.finfo(F).min
    return weighted(p, score, used, renormalize)


def weighted(p, score, used, renormalize):
    ids = [sorted(range(len(row)), key=lambda i: (-row[i], i))[:used] for row in score]
    weights = []
    for row, chosen in zip(p, ids, strict=True):
        total = F(0)
        for expert in chosen:
            total = total + row[expert]
        weights.append(row[chosen] / (max(total, F(2.0**-14)) if renormalize else F(1)))
    return {"ids": np.array(ids), "weights": np.array(weights)}


def case_mixture(products, weights, residual, ids, expert_scale=None, bias=None):
    y = residual
    for rank, expert in enumerate(ids):
        part = products[:, rank] if bias is None else products[:, rank] + bias[expert]
        part = part if expert_scale is None else part * expert_scale[expert]
        y = y + weights[:, rank, None] * part
    return y


def case_shared(residual, x, router, down):
    return residual + rules.sigmoid(rules.total_of(x * router))[:, None] * down


def case_heads(x, blocks, dtype, columns, matrix_of, rest):
    """Each head of a token times a matrix, behind channels that are not multiplied."""
    rows, heads = len(blocks) // (max(matrix_of) + 1), len(matrix_of)
    y = []
    for token, before in zip(x, rest, strict=True):
        for head, kept, n in zip(
            np.split(token, heads), np.split(before, heads), matrix_of, strict=True
        ):
            matrix = Matrix(dtype, blocks[n * rows : (n + 1) * rows])
            y += [*kept, *rules.product(head[-columns:], matrix)]
    return np.array(y).reshape(len(x), -1)
