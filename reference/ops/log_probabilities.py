"""LOG_PROBABILITIES: log-probabilities of the chosen token and of the most likely tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from contract.arrays import Floats, Ints
from reference.exact.elementary import exp, log
from reference.exact.sums import sum_axis
from reference.ops.sample import NO_TOKEN


def log_probabilities(*, logits: Floats, token: Ints, top: int) -> tuple[Floats, Ints, Floats]:
    """log p(v) = (x_v - m) - log(sum of exp(x - m)), where x is the row and m its largest (rule
    R10).

    ``logits`` is [rows, vocab], ``token`` [rows]. Returns log p of the tokens [rows], then the
    ``top`` most likely ids [rows, top] and their log p [rows, top], by falling logit, equal ones by
    rising id. A row with a NaN or infinity gives NaN and NO_TOKEN everywhere; a token outside 0 to
    vocab - 1 gives NaN."""
    rows, vocab = logits.shape
    finite = np.asarray(np.isfinite(logits).all(axis=1))
    x = np.where(finite[:, None], logits, np.float32(0.0))
    ids = np.array([likeliest(row, top) for row in x], np.int32).reshape(rows, top)
    known = finite & (token >= 0) & (token < vocab)
    requested = np.column_stack([np.where(known, token, 0), ids])
    logs = normalized(x, np.take_along_axis(x, requested, axis=1))
    nan = np.float32(np.nan)
    return (
        np.where(known, logs[:, 0], nan),
        np.where(finite[:, None], ids, np.int32(NO_TOKEN)),
        np.where(finite[:, None], logs[:, 1:], nan),
    )


def normalized(x: Floats, requested: Floats) -> Floats:
    """log p [rows, n] of the logits ``requested`` [rows, n], taken from the rows ``x`` [rows,
    vocab]."""
    largest = x.max(axis=1, keepdims=True)
    log_sum = log(sum_axis(exp(x - largest)))
    logs: Floats = (requested - largest) - log_sum[:, None]
    return logs


def likeliest(row: Floats, top: int) -> NDArray[np.intp]:
    """The ids of the ``top`` largest logits, largest first, equal ones by rising id."""
    least = np.partition(row, -top)[-top]
    ids = np.flatnonzero(row >= least)
    return ids[np.argsort(-row[ids], kind="stable")[:top]]
