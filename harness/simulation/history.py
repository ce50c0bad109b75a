"""The simulated model: every token is a hash of all tokens before it.

The *history* of a prefix is the sum, modulo 2^64, of a random number for each (token, position) in
it, as in Zobrist hashing: one number that stands for exactly these tokens in this order. A token is
sampled from the history of all tokens before it. So one wrong or missing position changes all
tokens after it, and the answer of a request is known without running an engine.

All numbers are Python integers: for the few tokens of a simulated step numpy takes ten times as
long."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from contract.types import FinishReason, Request, TokenEvent
from harness.simulation.constraint import Constraint, nearest

NO_LOG_PROBABILITIES: tuple[None, tuple[()]] = (None, ())
VOCAB = 1024
MAX_POSITIONS = 1024
END_OF_GENERATION = frozenset(range(24))
"""Each sampled token ends its sequence with a probability of 24 in 1024."""
NON_FINITE_ONE_IN = 512
"""One sampled token of this many is -1, as if its logits were not finite."""

WORD = (1 << 64) - 1
_SEED_FACTOR = 0x9E3779B97F4A7C15
_OTHERS_FACTOR = 0xD1B54A32D192ED03
_MIX_FACTOR = 0xBF58476D1CE4E5B9
_MODEL_FACTOR = 0x94D049BB133111EB
_RANDOM = np.random.PCG64(20)
OF_TOKEN: list[int] = _RANDOM.random_raw(VOCAB).tolist()
OF_POSITION: list[int] = (_RANDOM.random_raw(MAX_POSITIONS) | np.uint64(1)).tolist()
"""A token at a position adds the product of its two numbers to a history, modulo 2^64."""


def sample(history: int, seed: int, others: int) -> int:
    """The token that follows, -1 where the logits are not finite.

    ``others`` is the sum of the other numbers it depends on: the history of the tokens that
    penalties look at, ``bias_number`` and ``model_number``."""
    mixed = (history + seed * _SEED_FACTOR + others * _OTHERS_FACTOR) & WORD
    mixed = ((mixed ^ (mixed >> 32)) * _MIX_FACTOR) & WORD
    mixed ^= mixed >> 29
    return -1 if (mixed >> 40) % NON_FINITE_ONE_IN == 0 else mixed % VOCAB


def model_number(model: int) -> int:
    """A number that makes the tokens of each model different; 0 for model 0."""
    return model * _MODEL_FACTOR


def bias_number(pairs: Iterable[tuple[int, float]]) -> int:
    """A number that makes tokens depend on logit biases, multiples of 1/2; 0 for no biases."""
    return sum(
        OF_TOKEN[token] * OF_POSITION[index] * int(2 * bias)
        for index, (token, bias) in enumerate(pairs)
    )


def listed(history: int, token: int, count: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """The log-probability of ``token`` after ``history``, and (token, log-probability) of ``count``
    likeliest tokens: numbers that binary32 holds exactly."""
    mixed = ((history + 1) * _MIX_FACTOR) & WORD
    chosen = -((mixed + OF_TOKEN[token]) >> 32 & 0xFFFF) / 1024
    top = [(mixed >> 10 * index) % VOCAB for index in range(1, count + 1)]
    return chosen, tuple([(id, -(id + mixed % 1024) / 512) for id in top])


@dataclass(frozen=True, slots=True)
class Solo:
    """The result of a request that runs alone: all its ``events``, its ``tokens`` with the prompt,
    and ``histories``, the history of its first 0, 1, ... tokens."""

    events: tuple[TokenEvent, ...]
    tokens: tuple[int, ...]
    histories: tuple[int, ...]


def adapted(adapters: Iterable[tuple[int, float]]) -> int:
    """A number that makes the history depend on adapters, (index, scale) each, with scales that are
    multiples of 1/2; 0 for none."""
    return sum(OF_TOKEN[index] * int(2 * scale) for index, scale in adapters)


def histories_of(tokens: Sequence[int], adapters: int = 0) -> list[int]:
    """The history of the first 0, 1, ..., len(tokens) tokens under ``adapted`` adapters."""
    histories, history = [0], 0
    for position, token in enumerate(tokens):
        history = (history + (OF_TOKEN[token] + adapters) * OF_POSITION[position]) & WORD
        histories.append(history)
    return histories


@lru_cache(maxsize=64)
def solo_run(
    request: Request, context: int, constraint: Constraint | None = None, model: int = 0
) -> Solo:
    """The result of ``request`` alone, within ``context`` positions."""
    tokens = list(request.prompt)
    adapters = adapted(request.adapters)
    histories = histories_of(tokens, adapters)
    last = min(len(tokens) + request.max_tokens, context) - 1
    events: list[TokenEvent] = []
    if request.max_tokens == 0:
        events.append(TokenEvent(request.id, -1, len(tokens), FinishReason.LENGTH))
    sampling = request.sampling
    window = sampling.repeat_last_n if sampling.penalizes else 0
    always = model_number(model) + bias_number(request.logit_bias)
    id, seed, history, position = request.id, sampling.seed, histories[-1], len(tokens)
    ends = frozenset() if request.ignore_end else END_OF_GENERATION
    reason = None if not events else FinishReason.LENGTH
    while reason is None:
        others = always
        if window:
            others += (history - histories[max(0, position - window)]) & WORD
        token = sample(history, seed, others)
        if constraint is not None:
            generated = tokens[len(request.prompt) :]
            token = nearest(token, constraint.allowed(generated, VOCAB))
        if token < 0:
            reason = FinishReason.ERROR
        elif token in ends:
            reason = FinishReason.STOP
        elif position >= last:
            reason = FinishReason.LENGTH
        else:
            tokens.append(token)
        logs = _logs_of(request, history, token)
        events.append(TokenEvent(id, token, position, reason, *logs))
        if reason is None:
            history = (history + (OF_TOKEN[token] + adapters) * OF_POSITION[position]) & WORD
            histories.append(history)
            position += 1
    return Solo(tuple(events), tuple(tokens), tuple(histories))


def _logs_of(
    request: Request, history: int, token: int
) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    """The log-probabilities in the event of ``token``."""
    if request.log_probabilities is None or token < 0:
        return NO_LOG_PROBABILITIES
    return listed(history, token, request.log_probabilities)
