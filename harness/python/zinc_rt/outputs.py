"""What comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.errors import ZincError


@dataclass(frozen=True, slots=True)
class Piece:
    """The text that became certain with ``token``, which is None for what comes at the end."""

    text: str
    token: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One continuation.

    ``tokens`` are those of the text; ``finish_reason`` is "stop" or "length". With
    ``log_probabilities`` in the parameters there are arrays with a row for each of the tokens:
    ``log_probabilities`` float32[tokens], natural logarithms, and of the likeliest in each place
    ``top_tokens`` int32[tokens, k] and ``top_log_probabilities`` float32[tokens, k]. With
    ``logits`` there is float32[tokens, vocab].

    ``message`` is what a conversation with tools or a format goes on with: the answer as a message
    of OpenAI's, in which ``tool_calls`` and ``reasoning_content`` are told apart from ``content``.
    ``finish_reason`` is then "tool_calls" where tools are called.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    stop_string: str | None = None
    log_probabilities: NDArray[np.float32] | None = None
    top_tokens: NDArray[np.int32] | None = None
    top_log_probabilities: NDArray[np.float32] | None = None
    logits: NDArray[np.float32] | None = None
    message: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """What became of prompt number ``index``: its completions, or the ``error`` that it met.

    ``prompt_tokens`` are the ids the model was given, and ``cached_tokens`` of them were known
    from other requests. The short ways to the first completion raise the error if there is one.
    """

    index: int
    prompt_tokens: tuple[int, ...]
    completions: Sequence[Completion] = ()
    cached_tokens: int = 0
    error: ZincError | None = None

    @property
    def completion(self) -> Completion:
        """The first completion."""
        if self.error is not None:
            raise self.error
        return self.completions[0]

    @property
    def text(self) -> str:
        """The text of the first completion."""
        return self.completion.text

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of the first completion."""
        return self.completion.tokens
