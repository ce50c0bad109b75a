"""The results of calls: pieces, completions, outputs and scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from contract.arrays import Floats, Ints
from contract.errors import ZincError
from reference.sched.scores import perplexity
from zinc_rt.other_names import refuse_attribute

SHOWN = 60
"""Characters of a text that ``repr`` shows."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The text that became certain with ``token``; None for text at the end."""

    text: str
    token: int | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Logprob:
    """A possible token at a position, with vLLM's names: its log-probability, text, and rank, 1 for
    the likeliest; None for a token that is not listed."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Completion:
    """One continuation; ``str`` is its text.

    ``tokens`` are the tokens of the text; ``finish_reason`` is "stop", "length" or "tool_calls".
    ``index`` numbers the ``n`` continuations of a prompt. In a conversation with tools or a format,
    ``message`` is the answer as an OpenAI message with ``content``, ``tool_calls`` and
    ``reasoning_content``.

    Arrays, if requested: ``log_probabilities`` float32[tokens], natural logarithms; ``top_tokens``
    int32[tokens, k] and ``top_log_probabilities`` float32[tokens, k] of the likeliest tokens;
    ``logits`` float32[tokens, vocab]; ``experts`` int32[positions, layers, used], the ids of the
    experts at each position of prompt and answer except the last token, by falling weight.
    ``token_texts`` are the texts of tokens with log-probabilities.

    ``token_ids``, ``logprobs``, ``cumulative_logprob`` and ``stop_reason`` are vLLM's names. Unlike
    there, a token that ended the text is not included."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    stop_string: str | None = None
    log_probabilities: Floats | None = None
    top_tokens: Ints | None = None
    top_log_probabilities: Floats | None = None
    logits: Floats | None = None
    experts: Ints | None = None
    message: dict[str, Any] | None = None
    index: int = 0
    stop_token: int | None = None
    token_texts: Mapping[int, str] | None = None

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the text, as a list."""
        return list(self.tokens)

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string or the token of ``stop_token_ids`` that ended the text."""
        return self.stop_token if self.stop_string is None else self.stop_string

    @property
    def cumulative_logprob(self) -> float | None:
        """The log-probability of the text: the sum over its tokens, rounded once."""
        found = self.log_probabilities
        return None if found is None else math.fsum(found.tolist())

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """For every token a dict of the likeliest tokens at its position and of the token."""
        own, top, values = self.log_probabilities, self.top_tokens, self.top_log_probabilities
        if own is None or top is None or values is None:
            return None
        texts = self.token_texts or {}
        rows = []
        for token, value, ids, logs in zip(
            self.tokens, own.tolist(), top.tolist(), values.tolist(), strict=True
        ):
            row = {
                one: Logprob(log, rank, texts.get(one))
                for rank, (one, log) in enumerate(zip(ids, logs, strict=True), 1)
            }
            row.setdefault(token, Logprob(value, None, texts.get(token)))
            rows.append(row)
        return rows

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            refuse_attribute(self, name)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return (
            f"Completion({_shortened(self.text)}, {len(self.tokens)} tokens, "
            f"finish_reason={self.finish_reason!r})"
        )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Output:
    """The result of prompt number ``index``: its completions, or an ``error``. ``str`` is the text
    of the first completion, or the error.

    ``prompt_tokens`` are the prompt's token ids; ``cached_tokens`` of them came from the prefix
    cache. Properties of the first completion raise the error, if there is one."""

    index: int
    prompt_tokens: tuple[int, ...]
    completions: Sequence[Completion] = ()
    cached_tokens: int = 0
    error: ZincError | None = None
    prompt: str | None = None

    @property
    def completion(self) -> Completion:
        """The first completion."""
        return self.outputs[0]

    @property
    def outputs(self) -> list[Completion]:
        """The completions, as a list."""
        if self.error is not None:
            raise self.error
        return list(self.completions)

    @property
    def prompt_token_ids(self) -> list[int]:
        """The ids that the model was given, as a list."""
        return list(self.prompt_tokens)

    @property
    def num_cached_tokens(self) -> int:
        """vLLM's name of ``cached_tokens``."""
        return self.cached_tokens

    @property
    def request_id(self) -> str:
        """The number of the prompt, as a text."""
        return str(self.index)

    @property
    def finished(self) -> bool:
        """Always true; for programs written for vLLM."""
        return True

    @property
    def text(self) -> str:
        """The text of the first completion."""
        return self.completion.text

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of the first completion."""
        return self.completion.tokens

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            refuse_attribute(self, name)

    def __str__(self) -> str:
        return self.text if self.error is None else f"error: {self.error}"

    def __repr__(self) -> str:
        if self.error is not None:
            return f"Output(index={self.index}, error={self.error!r})"
        return f"Output(index={self.index}, completions={list(self.completions)!r})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Score:
    """Log-probabilities of the tokens of text number ``index``, or an ``error``.

    ``start`` is the position of the first scored token. For each of ``tokens``:
    ``log_probabilities`` float32[tokens], natural logarithms by rule R10, the same bits on every
    tier, NaN before ``start``. ``top_tokens`` int32[tokens, k], -1 before ``start``, and
    ``top_log_probabilities`` float32[tokens, k] of the likeliest tokens. ``likeliest``
    bool[tokens]: whether no other token was likelier. ``experts``: as in Completion. Properties
    raise the error, if there is one."""

    index: int
    tokens: tuple[int, ...]
    start: int
    log_probabilities: Floats
    top_tokens: Ints
    top_log_probabilities: Floats
    likeliest: NDArray[np.bool_]
    cached_tokens: int = 0
    error: ZincError | None = None
    experts: Ints | None = None

    @property
    def total(self) -> float:
        """The log-probability of the scored tokens: their sum, rounded once."""
        if self.error is not None:
            raise self.error
        return math.fsum(self.log_probabilities[self.start :].tolist())

    @property
    def greedy(self) -> bool:
        """Whether generation at temperature 0 would give the scored tokens."""
        if self.error is not None:
            raise self.error
        return bool(self.likeliest[self.start :].all())

    @property
    def perplexity(self) -> float:
        """The exponential of the mean negative log-probability; NaN where nothing was scored."""
        return perplexity(self.total, max(0, len(self.tokens) - self.start))

    def rank(self, position: int) -> int | None:
        """The rank of the token at a position, 1 for the likeliest; None if it is not listed."""
        found = np.flatnonzero(self.top_tokens[position] == self.tokens[position])
        return int(found[0]) + 1 if len(found) else 1 if self.likeliest[position] else None

    def __repr__(self) -> str:
        if self.error is not None:
            return f"Score(index={self.index}, error={self.error!r})"
        return (
            f"Score(index={self.index}, {len(self.tokens)} tokens, start={self.start}, "
            f"total={self.total:.4f})"
        )


def _shortened(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[: SHOWN - 3] + "...")
