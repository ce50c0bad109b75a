"""Computes figures of a load from what clients recorded."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from harness.bench.load.clients import RequestOutcome

PERCENTILES = (50, 99)


def jain_index(shares: Sequence[float]) -> float:
    """Jain's fairness index (sum x)^2 / (n sum x^2): 1 for equal shares, 1 / n when one gets
    everything. R. Jain, D. Chiu and W. Hawe, A Quantitative Measure of Fairness, 1984."""
    values = np.asarray(shares, np.float64)
    squares = float((values**2).sum())
    return 1.0 if squares == 0 else float(values.sum()) ** 2 / (len(values) * squares)


def load_figures(answers: Sequence[RequestOutcome]) -> dict[str, float]:
    """The figures of one run, in seconds and tokens per second.

    ``rate``: generated tokens over the time from the first request to the last answer. ``first_*``:
    from when a request was due until its first text. ``interval_*``: between pieces of text of one
    answer. ``fairness``: Jain's index of the tenants' tokens per second of waiting, or the
    requests' with one tenant. Percentiles are present if any text arrived."""
    whole = [answer for answer in answers if answer.error is None]
    found = {
        "requests": float(len(answers)),
        "errors": float(len(answers) - len(whole)),
        "tokens": float(sum(answer.tokens for answer in whole)),
        "prompt_tokens": float(sum(answer.prompt_tokens for answer in whole)),
    }
    if not whole:
        return found
    seconds = max(answer.ended for answer in whole) - min(answer.due for answer in answers)
    found["seconds"] = seconds
    found["rate"] = found["tokens"] / seconds
    first = [answer.texts[0] - answer.due for answer in whole if answer.texts]
    between = [after - before for one in whole for before, after in pairwise(one.texts)]
    for name, values in (("first", first), ("interval", between)):
        if values:
            for percent, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True):
                found[f"{name}_p{percent}"] = float(value)
    found["fairness"] = jain_index(_rates(whole))
    return found


def error_counts(answers: Sequence[RequestOutcome]) -> dict[str, int]:
    """The number of failed requests by reason."""
    return dict(Counter(answer.error for answer in answers if answer.error is not None))


def _rates(answers: Sequence[RequestOutcome]) -> list[float]:
    """Tokens per second of waiting, by tenant; by request if there is one tenant."""
    tokens: defaultdict[int, float] = defaultdict(float)
    waited: defaultdict[int, float] = defaultdict(float)
    alone = len({answer.request.tenant for answer in answers}) == 1
    for answer in answers:
        who = answer.request.number if alone else answer.request.tenant
        tokens[who] += answer.tokens
        waited[who] += answer.ended - answer.due
    return [tokens[who] / waited[who] for who in tokens if waited[who] > 0]
