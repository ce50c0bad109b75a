"""Log-probabilities of a prompt's own tokens (rule R10), computed on the device during prefill.

The logits at position p give the probability of the token at position p + 1. The device only gives
the log-probability of the token that a row samples. So the row is sampled with a bias that makes
the prompt's own token the largest. Rule R10 uses the logits before any bias, so the bias changes no
log-probability."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from contract.arrays import Floats, Ints, Records
from contract.lazy_dataclass import dataclass
from contract.records import SAMPLING
from reference.runner import StepOutput

FORCING_BIAS = 2.0**127
"""A bias that makes a token the largest of its row if every logit is within 2^126 of zero."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probabilities of consecutive tokens of a prompt, the first at position ``first``.

    ``log_probability`` is float32[tokens]. ``top_ids`` int32[tokens, k] and
    ``top_log_probabilities`` float32[tokens, k] list the likeliest tokens at each position, by
    falling logit. The values of a row whose logits are not finite are NaN."""

    first: int
    log_probability: Floats
    top_ids: Ints
    top_log_probabilities: Floats


ScoreSink = Callable[[TokenScores], None]
"""Receives the scores of a prompt on the engine's thread, those of each token once, in order."""


def force_rows(sampling: Records, records: Records, rows: list[int], tokens: list[int]) -> None:
    """Make ``rows`` of a step sample ``tokens``: their records in ``sampling`` become greedy, with
    one bias each. The biases are written to the first of the bias ``records``."""
    forced = np.zeros(len(rows), SAMPLING)
    for name in ("slot", "position"):
        forced[name] = sampling[name][rows]
    forced["top_p"] = forced["repeat_penalty"] = 1.0
    forced["bias_first"], forced["bias_count"] = np.arange(len(rows)), 1
    sampling[rows] = forced
    biases = records[: len(rows)]
    biases["token"], biases["bias"] = tokens, FORCING_BIAS


def scores_in(
    output: StepOutput, rows: slice, first: int, tokens: Ints, listed: int
) -> TokenScores:
    """The scores of ``tokens``, the first at position ``first``, that a step computed in ``rows``;
    NaN for a token that the device did not sample."""
    chosen = output.log_probability[rows].copy()
    chosen[output.token[rows] != tokens] = np.nan
    return TokenScores(
        first,
        chosen,
        output.top_ids[rows, :listed].copy(),
        output.top_log_probabilities[rows, :listed].copy(),
    )


def perplexity(total: float, tokens: int) -> float:
    """The exponential of the mean negative log-probability of ``tokens`` tokens whose sum is
    ``total``: infinite if it is beyond binary64, NaN for no tokens."""
    if not tokens:
        return math.nan
    try:
        return math.exp(-total / tokens)
    except OverflowError:
        return math.inf
