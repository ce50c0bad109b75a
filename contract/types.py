"""Records of the engine's callers: requests, sampling parameters, tenants, token events."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import field
from enum import Enum
from typing import NamedTuple

from contract.errors import ConfigError, RequestError
from contract.lazy_dataclass import dataclass

MIN_TEMPERATURE = 1e-3
"""Lowest temperature above 0; below it a quotient of logits could overflow binary32."""
MAX_TEMPERATURE = 100.0
MIN_TOP_P = 2.0**-16
"""The smallest top_p, since rule R9 compares it in units of 2^-16."""
MAX_INT32 = 2**31 - 1
MAX_UINT32 = 2**32 - 1
MAX_UINT64 = 2**64 - 1

Clock = Callable[[], float]
"""A function that returns seconds since a fixed moment and never decreases. All code that needs the
time takes a clock as a parameter."""


class QosClass(Enum):
    """The urgency of a request: less urgent requests wait for others and are preempted first."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"

    rank: int
    """0 for the most urgent class, then 1 and 2."""

    __hash__ = object.__hash__
    """Of the one object that each class is: that of the library is written in Python."""

    def __init__(self, value: str) -> None:
        self.rank = len(type(self).__members__)

    def lowered_to(self, requested: QosClass | None) -> QosClass:
        """The class of a request that asks for ``requested``, of a tenant of this class: the less
        urgent of both; this class for None."""
        return self if requested is None or requested.rank < self.rank else requested


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of requests, and the limits on what they may use at once.

    - ``weight`` scales the tenant's fair share.
    - ``max_slots`` and ``max_kv_pages`` are hard limits; a request beyond them waits.
    - A request also waits while the tenant computes more than ``decode_tokens_per_s`` or
      ``prefill_tokens_per_s`` over a sliding window of 5 s; running requests are not slowed.
    - A request of more than ``max_context`` tokens, prompt and answer, is refused; so is a request
      while ``max_waiting`` others wait.
    - ``reserved_pages`` KV pages are never given to other tenants.
    - Tenants of the same ``isolation_group`` share prefix pages; None shares with nobody."""

    id: int
    name: str
    weight: float = 1.0
    max_slots: int = 4
    max_kv_pages: int = 4096
    isolation_group: int | None = None
    qos: QosClass = QosClass.STANDARD
    decode_tokens_per_s: int = 1000
    prefill_tokens_per_s: int = 100_000
    max_context: int = 128_000
    max_waiting: int = 4096
    reserved_pages: int = 0

    def validate(self) -> None:
        """Raise ConfigError naming the field that is out of range."""
        group = 0 if self.isolation_group is None else self.isolation_group
        for name, value in (("id", self.id), ("isolation_group", group)):
            if not _is_int(value, 0, MAX_UINT32):
                raise ConfigError(
                    f"tenant {self.name!r}: {name} is {value!r}, {_not_whole_number(0, MAX_UINT32)}"
                )
        if type(self.name) is not str or not self.name or not self.name.isprintable():
            raise ConfigError(f"tenant {self.id}: name {self.name!r} is empty or not printable")
        if not _is_real(self.weight, 0.0, math.inf) or not 0 < self.weight < math.inf:
            raise ConfigError(
                f"tenant {self.name!r}: weight is {self.weight!r}, not a finite number above 0"
            )
        if not isinstance(self.qos, QosClass):
            raise ConfigError(f"tenant {self.name!r}: qos is {self.qos!r}, not a QosClass")
        for name in _TENANT_QUOTAS:
            value = getattr(self, name)
            if not _is_int(value, 1, MAX_INT32):
                raise ConfigError(
                    f"tenant {self.name!r}: {name} is {value!r}, {_not_whole_number(1, MAX_INT32)}"
                )
        if not _is_int(self.reserved_pages, 0, self.max_kv_pages):
            raise ConfigError(
                f"tenant {self.name!r}: reserved_pages is {self.reserved_pages!r}, "
                f"{_not_whole_number(0, self.max_kv_pages)} (max_kv_pages)"
            )


_TENANT_QUOTAS = (
    "max_slots",
    "max_kv_pages",
    "decode_tokens_per_s",
    "prefill_tokens_per_s",
    "max_context",
    "max_waiting",
)

LOCAL_TENANT = Tenant(
    0,
    "local",
    max_slots=MAX_INT32,
    max_kv_pages=MAX_INT32,
    decode_tokens_per_s=MAX_INT32,
    prefill_tokens_per_s=MAX_INT32,
    max_context=MAX_INT32,
    max_waiting=MAX_INT32,
)
"""The user of the machine, whom only the engine's own limits restrict."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of a request (rule R9). The defaults are greedy and change no logit.

    ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 keep every token. The
    penalties look at the last ``repeat_last_n`` tokens of prompt and output. ``seed`` is the 64-bit
    key of the random numbers."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0

    @property
    def penalizes(self) -> bool:
        """True when the recent tokens change the logits."""
        return self.repeat_last_n > 0 and (
            self.repeat_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def validate(self) -> None:
        """Raise RequestError naming the first parameter that is not a number in its range."""
        for name, low, high in _REAL_RANGES:
            value = getattr(self, name)
            # NaN is not within: comparisons with it are False.
            if type(value) not in (int, float) or not low <= value <= high:
                raise RequestError(name, f"is {value!r}, not a number in [{low:g}, {high:g}]")
        for name, top in _INT_RANGES:
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= top:
                raise RequestError(name, f"is {value!r}, not an integer in [0, {top}]")
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise RequestError(
                "temperature",
                f"is {self.temperature!r}; use 0 for greedy or at least {MIN_TEMPERATURE:g}",
            )


_REAL_RANGES = (
    ("temperature", 0.0, MAX_TEMPERATURE),
    ("top_p", MIN_TOP_P, 1.0),
    ("min_p", 0.0, 1.0),
    ("repeat_penalty", 0.01, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)
_INT_RANGES = (("top_k", MAX_INT32), ("repeat_last_n", MAX_INT32), ("seed", MAX_UINT64))


@dataclass(frozen=True, slots=True)
class Request:
    """A request to generate at most ``max_tokens`` tokens (the answer) after ``prompt``.

    - The answer also ends at the end of the context and, unless ``ignore_end``, at an
      end-of-generation token. The engine's caller ends it at one of the ``stop`` strings and at one
      of the ``stop_tokens``.
    - The first ``min_tokens`` tokens of the answer are neither ``stop_tokens`` nor, unless
      ``ignore_end``, end-of-generation tokens, except where its masks allow nothing else.
    - ``tenant`` is the id of the owner. ``qos`` requests a less urgent class than the tenant's.
    - ``logit_bias`` holds pairs (token, number added to its logit) with distinct tokens.
    - ``log_probabilities`` k requests the log-probability of every generated token and of the k
      most likely tokens at its position; None requests none.
    - ``score_from`` p (1 or more) requests the log-probability of every token of the prompt from
      position p on, and of the ``score_top`` most likely tokens at each of these positions.
    - ``force_tokens``, if any, are the whole answer, ``max_tokens`` of them; nothing is sampled.
    - ``adapters`` holds pairs (index, scale) with distinct indices: the LoRA adapters of the model
      that change its projections.
    - ``turns`` are the positions of the prompt at which turns of a conversation begin. Later
      prompts are likely to differ from there on, so recurrent states are saved there; no token
      depends on them."""

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    tenant: int = 0
    ignore_end: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    log_probabilities: int | None = None
    qos: QosClass | None = None
    score_from: int | None = None
    score_top: int = 0
    turns: tuple[int, ...] = ()
    force_tokens: tuple[int, ...] = ()
    adapters: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_tokens: tuple[int, ...] = ()


class FinishReason(Enum):
    """The reason why a request ended."""

    STOP = "stop"
    """An end-of-generation token, a stop string or a stop token."""
    LENGTH = "length"
    """``max_tokens``, or the end of the context."""
    CANCELLED = "cancelled"
    CLIENT_TOO_SLOW = "client_too_slow"
    """Its consumer took no tokens for too many steps."""
    ERROR = "error"

    __hash__ = object.__hash__
    """Of the one object that each reason is: that of the library is written in Python."""


class TokenEvent(NamedTuple):
    """One generated token of a request, or the end of the request.

    ``token`` is -1 when the request ends without a token. ``position`` is the token's index in the
    sequence, which starts with the prompt. ``finish_reason`` is None until the last event.

    If the request asked for them, ``log_probability`` is that of the token and ``top`` lists the
    most likely tokens at its position as (token, log-probability), by falling logit. They are
    natural logarithms of the model's probabilities before mask, bias, penalties and temperature
    (rule R10)."""

    request_id: int
    token: int
    position: int
    finish_reason: FinishReason | None = None
    log_probability: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def _not_whole_number(low: int, high: int) -> str:
    return f"not a whole number from {low} to {high}"


def _is_int(value: object, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _is_real(value: object, low: float, high: float) -> bool:
    """Whether ``value`` is an int or float from ``low`` to ``high``. NaN is not: comparisons with
    it are False."""
    return type(value) in (int, float) and low <= value <= high  # type: ignore[operator]
