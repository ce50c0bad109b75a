"""The sampling parameters of a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np

from contract.errors import RequestError
from contract.types import MAX_INT32, MAX_UINT64, Request
from contract.types import SamplingParams as EngineSampling
from harness.named_adapters import Scales
from harness.settings import SETTINGS

Key = TypeVar("Key")
MAX_CHOICES = 128
MAX_STOP_TOKENS = 64


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Numbers(Mapping[Key, float]):
    """An immutable, hashable mapping to numbers, for logit biases and scales of adapters."""

    pairs: tuple[tuple[Key, float], ...] = ()

    def __getitem__(self, key: Key) -> float:
        return dict(self.pairs)[key]

    def __iter__(self) -> Iterator[Key]:
        return (key for key, _ in self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def __hash__(self) -> int:
        return hash(frozenset(self.pairs))

    def __repr__(self) -> str:
        return repr(dict(self.pairs))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a continuation; the defaults are those of ``zinc-rt run``.

    ``temperature`` 0 always takes the most likely token. ``top_k`` 0 or -1, ``top_p`` 1 and
    ``min_p`` 0 keep every token. The penalties count the last ``repeat_last_n`` tokens. None
    stands for the ``repeat_last_n`` of the LLM, which is also the maximum. Completion i of ``n``
    is sampled with ``seed`` + i.

    A text ends before any of the ``stop`` strings, at a token of ``stop_token_ids``, and at the
    model's end token unless ``ignore_end`` is set. ``ignore_eos`` is vLLM's name for it. The first
    ``min_tokens`` tokens never end a text. ``logit_bias`` maps token ids to numbers that are added
    to their logits. With ``force_tokens`` nothing is sampled: the given tokens are the whole
    answer, computed at the speed of a prompt, and ``max_tokens`` is their number.

    ``log_probabilities`` = k, or vLLM's name ``logprobs``, returns the log-probability of every
    token and of the k most likely ones at its position. ``logits`` returns all logits that tokens
    were sampled from, ``experts`` the experts of a mixture that each token used. ``lora`` maps
    names of the LLM's adapters to scales. None applies all adapters with their own scales, ``{}``
    none.

    An argument that is None counts as not given. Instances are immutable and hashable. Raises
    RequestError for invalid values.

    >>> SamplingParams(temperature=0.8, seed=7, stop="\\n").stop
    ('\\n',)
    >>> SamplingParams(temperature=-1)
    Traceback (most recent call last):
    contract.errors.RequestError: temperature: is -1, not a number in [0, 100]"""

    max_tokens: int = SETTINGS["max_tokens"].default
    temperature: float = SETTINGS["temperature"].default
    top_k: int = SETTINGS["top_k"].default
    top_p: float = SETTINGS["top_p"].default
    min_p: float = SETTINGS["min_p"].default
    repeat_penalty: float = SETTINGS["repeat_penalty"].default
    repeat_last_n: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = SETTINGS["seed"].default
    n: int = 1
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_end: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=Numbers)
    log_probabilities: int | None = None
    logprobs: int | None = None
    logits: bool = False
    experts: bool = False
    force_tokens: Sequence[int] | None = None
    lora: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        _check_integer("n", self.n, 1, MAX_CHOICES)
        _check_integer("max_tokens", self.max_tokens, 1, MAX_INT32)
        _check_integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        self.sampling(self.seed, MAX_INT32).validate()
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_tokens(self.stop_token_ids))
        if self.force_tokens is not None:
            forced = _token_ids("force_tokens", self.force_tokens)
            if not forced:
                raise RequestError("force_tokens", "is empty; give at least one token, or None")
            object.__setattr__(self, "force_tokens", forced)
            object.__setattr__(self, "max_tokens", len(forced))
            if self.n != 1 or self.stop or self.stop_token_ids or self.min_tokens:
                problem = "are a whole answer; leave out n, stop, stop_token_ids and min_tokens"
                raise RequestError("force_tokens", problem)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if self.lora is not None:
            object.__setattr__(self, "lora", _scales(self.lora))
        for name in ("log_probabilities", "logprobs"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), 0, MAX_INT32)
        if self.logprobs not in (None, self.log_probabilities, self.listed):
            raise RequestError("logprobs", "is another name of log_probabilities; give one")
        for name in ("ignore_end", "ignore_eos", "logits", "experts"):
            if type(getattr(self, name)) is not bool:
                raise RequestError(name, f"is {getattr(self, name)!r}, not True or False")

    @property
    def listed(self) -> int | None:
        """Number of likely tokens listed with the log-probability of each token; None for no
        log-probabilities."""
        return self.logprobs if self.log_probabilities is None else self.log_probabilities

    def requests(
        self, prompt: Sequence[int], ids: Iterator[int], window: int, adapters: Scales = ()
    ) -> list[Request]:
        """The engine requests: ``n`` continuations of ``prompt`` with ``adapters``. Penalties look
        back at ``window`` tokens unless the parameters say how far."""
        return [
            Request(
                id=next(ids),
                prompt=tuple(prompt),
                max_tokens=self.max_tokens,
                sampling=self.sampling((self.seed + choice) % (MAX_UINT64 + 1), window),
                stop=tuple(self.stop),
                ignore_end=self.ignore_end or self.ignore_eos,
                min_tokens=self.min_tokens,
                stop_tokens=tuple(self.stop_token_ids),
                logit_bias=tuple(self.logit_bias.items()),
                log_probabilities=self.listed,
                force_tokens=tuple(self.force_tokens or ()),
                adapters=adapters,
            )
            for choice in range(self.n)
        ]

    def sampling(self, seed: int, window: int) -> EngineSampling:
        """The parameters that the device reads."""
        reach = self.repeat_last_n
        return EngineSampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repeat_penalty=self.repeat_penalty,
            repeat_last_n=window if reach is None else reach,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=seed,
        )


def _with_hints(make: Callable[..., None]) -> Callable[..., None]:
    """The constructor with a better TypeError: for an unknown argument it suggests a similar
    name."""

    @functools.wraps(make)
    def init(self: SamplingParams, *others: object, **given: Any) -> None:
        unknown = [name for name in given if name not in NAMES]
        if others:
            raise TypeError("SamplingParams takes arguments by name, such as max_tokens=64")
        if unknown:
            from zinc_rt.arguments import hint_for

            hint = hint_for(unknown[0], NAMES)
            raise TypeError(f"SamplingParams has no argument {unknown[0]!r}{hint}")
        make(self, **{name: _plain(value) for name, value in given.items() if value is not None})

    return init


NAMES = tuple(one.name for one in fields(SamplingParams))
SamplingParams.__init__ = _with_hints(SamplingParams.__init__)  # type: ignore[method-assign]


def _plain(value: Any) -> Any:
    """A number of numpy as Python's, other values as they are."""
    return value.item() if isinstance(value, np.generic) else value


def _check_integer(name: str, value: object, minimum: int, maximum: int) -> None:
    if type(value) is not int or not minimum <= value <= maximum:
        raise RequestError(name, f"is {value!r}, not an integer in [{minimum}, {maximum}]")


def _stop_strings(given: object) -> tuple[str, ...]:
    strings = (given,) if isinstance(given, str) else given
    if not isinstance(strings, Sequence) or not all(isinstance(one, str) for one in strings):
        raise RequestError("stop", f"is {given!r}, not a text or a list of texts")
    if not all(strings):
        raise RequestError("stop", "holds an empty text, which would end every answer")
    return tuple(strings)


def _stop_tokens(given: object) -> tuple[int, ...]:
    tokens = _token_ids("stop_token_ids", given)
    if len(tokens) > MAX_STOP_TOKENS:
        raise RequestError("stop_token_ids", f"has {len(tokens)} ids, at most {MAX_STOP_TOKENS}")
    return tokens


def _token_ids(name: str, given: object) -> tuple[int, ...]:
    if isinstance(given, np.ndarray):
        given = given.tolist()
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise RequestError(name, f"is {given!r}, not a list of token ids")
    tokens = tuple(map(_plain, given))
    for token in tokens:
        _check_integer(name, token, 0, MAX_INT32)
    return tokens


def _biases(given: object) -> Numbers[int]:
    if not isinstance(given, Mapping):
        raise RequestError("logit_bias", f"is {given!r}, not a dict of token ids and numbers")
    biases = tuple((_plain(token), _plain(bias)) for token, bias in given.items())
    for token, bias in biases:
        _check_integer("logit_bias", token, 0, MAX_INT32)
        if type(bias) not in (int, float) or not abs(bias) < float("inf"):
            raise RequestError("logit_bias", f"of token {token} is {bias!r}, not a finite number")
    return Numbers(biases)


def _scales(given: object) -> Numbers[str]:
    if not isinstance(given, Mapping):
        raise RequestError("lora", f"is {given!r}, not a dict of adapters and scales")
    scales = tuple((str(name), _plain(scale)) for name, scale in given.items())
    for name, scale in scales:
        if type(scale) not in (int, float) or not abs(scale) < float("inf"):
            raise RequestError("lora", f"of {name!r} is {scale!r}, not a finite number")
    return Numbers(scales)
