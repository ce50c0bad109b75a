"""Token masks, logit biases and log-probabilities of requests.

A grammar, or any other rule, becomes a mask: one bit for every token of the vocabulary, 1 if the
token may come next. Rule R9 defines the arithmetic of masks and biases, rule R10 that of
log-probabilities.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from contract.arithmetic import MASK_WORD_BITS
from contract.arrays import Records
from contract.errors import RequestError
from contract.records import LOGIT_BIAS
from contract.types import Request
from reference.limits import Limits, mask_words

Mask = NDArray[np.uint32]


def pack_mask(tokens: Iterable[int] | NDArray[np.integer], vocab: int) -> Mask:
    """The mask uint32[mask_words(vocab)] that allows ``tokens``: bit v mod 32 of word v / 32 is
    that of token v. Raises ValueError for a token outside the vocabulary."""
    ids = tokens if isinstance(tokens, np.ndarray) else np.fromiter(tokens, np.int64)
    if ((ids < 0) | (ids >= vocab)).any():
        raise ValueError(f"a mask holds a token id outside 0 to {vocab - 1}")
    bits = np.zeros(mask_words(vocab) * 32, np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view("<u4")


def bias_records(request: Request) -> Records:
    """The biases of a request, checked by ``check_constraints``, as LOGIT_BIAS[n] records."""
    return np.array(list(request.logit_bias), LOGIT_BIAS)


def is_allowed(mask: Mask | None, token: int) -> bool:
    """Whether ``mask`` allows ``token``; None allows all."""
    return mask is None or bool(int(mask[token // MASK_WORD_BITS]) >> token % MASK_WORD_BITS & 1)


def check_constraints(request: Request, limits: Limits, vocab: int, *, masked: bool) -> None:
    """Raise RequestError if biases, log-probabilities or scores of a request are invalid or exceed
    ``limits``, or if it is ``masked`` and ``limits`` have no masks."""
    _check_bias(request.logit_bias, limits.biases, vocab)
    listed, limit = request.log_probabilities, limits.top_log_probabilities
    if listed is not None:
        if type(listed) is not int or listed < 0:
            raise RequestError("log_probabilities", f"is {listed!r}, not None or 0 and more")
        if not limit:
            raise RequestError("log_probabilities", "this engine was built without any; use None")
        if listed > limit:
            raise RequestError("log_probabilities", f"is {listed}, at most {limit} are listed")
    start, tokens = request.score_from, len(request.prompt)
    if start is not None:
        if not limits.scores:
            raise RequestError("score_from", "this engine was built without scores; use None")
        if type(start) is not int or not 1 <= start < tokens:
            raise RequestError("score_from", f"is {start!r}, not from 1 to {tokens - 1}")
        if type(request.score_top) is not int or not 0 <= request.score_top <= limit:
            raise RequestError("score_top", f"is {request.score_top!r}, not from 0 to {limit}")
    if masked and not limits.masks:
        raise RequestError("allowed", "this engine was built without masks; use None")


def check_forced(request: Request, limits: Limits, vocab: int, *, masked: bool) -> None:
    """Raise RequestError if ``force_tokens`` are invalid or contradict other fields."""
    forced = request.force_tokens
    if not forced:
        return
    if not limits.scores:
        raise RequestError("force_tokens", "this engine was built without scores; give no tokens")
    if min(forced) < 0 or max(forced) >= vocab:
        raise RequestError("force_tokens", f"holds a token id outside 0 to {vocab - 1}")
    if request.max_tokens != len(forced):
        raise RequestError("max_tokens", f"is {request.max_tokens}, not {len(forced)} as forced")
    if masked or request.stop:
        what = "a grammar" if masked else "stop strings"
        raise RequestError(
            "force_tokens", f"is a whole answer; {what} would change nothing: leave it out"
        )


def _check_bias(pairs: tuple[tuple[int, float], ...], limit: int, vocab: int) -> None:
    if len(pairs) > limit:
        raise RequestError("logit_bias", f"has {len(pairs)} tokens, this engine takes {limit}")
    seen = set()
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise RequestError("logit_bias", f"holds {pair!r}, not a pair (token, bias)")
        token, bias = pair
        if type(token) is not int or not 0 <= token < vocab:
            raise RequestError("logit_bias", f"names token {token!r}, not one of 0 to {vocab - 1}")
        if token in seen:
            raise RequestError("logit_bias", f"names token {token} twice")
        seen.add(token)
        if type(bias) not in (int, float) or not abs(bias) <= LARGEST_BIAS:
            raise RequestError("logit_bias", f"of token {token} is {bias!r}, not a binary32 number")


LARGEST_BIAS = float(np.finfo(np.float32).max)
