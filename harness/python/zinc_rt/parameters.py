"""What a caller may say about one generation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from contract.errors import RequestError
from contract.types import MAX_INT32, MAX_UINT64, Request
from contract.types import SamplingParams as EngineSampling
from harness.settings import SETTINGS

MOST_CHOICES = 128


def _default(name: str) -> Any:
    """What ``zinc-rt run`` takes where nobody says anything."""
    return SETTINGS[name].default


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a text is continued; the defaults are those of ``zinc-rt run``.

    ``temperature`` 0 always takes the likeliest token. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0
    keep every token. The penalties look at the last ``repeat_last_n`` tokens. Completion i of
    ``n`` is sampled with ``seed`` + i. The text ends before any of the ``stop`` strings, and with
    ``ignore_end`` not where the model would end it. ``logit_bias`` adds to the logits of token
    ids. ``log_probabilities`` k asks for that of every token, and of the k likeliest in its place;
    ``logits`` for all logits that tokens were sampled from.

    >>> SamplingParams(temperature=0.8, seed=7, stop="\\n").temperature
    0.8
    """

    max_tokens: int = field(default_factory=lambda: int(_default("max_tokens")))
    temperature: float = field(default_factory=lambda: float(_default("temperature")))
    top_k: int = field(default_factory=lambda: int(_default("top_k")))
    top_p: float = field(default_factory=lambda: float(_default("top_p")))
    min_p: float = field(default_factory=lambda: float(_default("min_p")))
    repeat_penalty: float = field(default_factory=lambda: float(_default("repeat_penalty")))
    repeat_last_n: int = field(default_factory=lambda: int(_default("repeat_last_n")))
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = field(default_factory=lambda: int(_default("seed")))
    n: int = 1
    stop: str | Sequence[str] = ()
    ignore_end: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    log_probabilities: int | None = None
    logits: bool = False

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def requests(self, prompt: Sequence[int], ids: Iterator[int], window: int) -> list[Request]:
        """What the engine is asked for: ``n`` continuations of ``prompt``. Penalties look back at
        most ``window`` tokens. Raises RequestError."""
        for name, value, most in (
            ("n", self.n, MOST_CHOICES),
            ("max_tokens", self.max_tokens, MAX_INT32),
        ):
            if type(value) is not int or not 1 <= value <= most:
                raise RequestError(name, f"is {value!r}, not an integer in [1, {most}]")
        if type(self.seed) is not int or not 0 <= self.seed <= MAX_UINT64:
            raise RequestError("seed", f"is {self.seed!r}, not an integer in [0, {MAX_UINT64}]")
        return [
            Request(
                id=next(ids),
                prompt=tuple(prompt),
                max_tokens=self.max_tokens,
                sampling=self._sampling((self.seed + choice) % (MAX_UINT64 + 1), window),
                stop=self.stop_strings,
                ignore_end=self.ignore_end,
                logit_bias=tuple(self.logit_bias.items()),
                log_probabilities=self.log_probabilities,
            )
            for choice in range(self.n)
        ]

    def _sampling(self, seed: int, window: int) -> EngineSampling:
        return EngineSampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repeat_penalty=self.repeat_penalty,
            repeat_last_n=min(self.repeat_last_n, window),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=seed,
        )
