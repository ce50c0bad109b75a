"""Guessing the tokens that come next, so that one step yields several.

A step computes the last token of a sequence and the guesses behind it, with a row of logits for
each, and samples every row by its own position. What is sampled after a right token is what would
have been sampled without guessing; what follows a wrong one is dropped, and its keys and values are
written again before anybody reads them. So guessing changes no token, whatever is guessed.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from contract.lazy_dataclass import dataclass

Tokens = NDArray[np.int32]

LOOKUP_TOKENS = 3
"""How many tokens must have occurred before for prompt lookup to guess."""
PAUSE_TOKENS = 32
"""For how many tokens a sequence is not guessed for after guessing did not pay."""
MEMORY = 0.75
"""What an older step counts in the running mean of tokens a step yields, for each newer one."""


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A sequence that guesses are wanted for: its ``key`` for as long as it has its slot, all its
    known ``tokens``, and how many guesses there is room for."""

    key: int
    slot: int
    tokens: Tokens
    most: int


class Drafter(Protocol):
    """Guesses what follows."""

    def draft(self, sequences: Items[DraftRequest]) -> list[Tokens]:
        """At most ``most`` token ids for each sequence, none where it does not pay to guess."""

    def ready(self, key: int, tokens: Tokens) -> bool:
        """Whether there would be a guess: what decides if a sequence waits for its tokens on the
        host instead of having its next steps queued."""

    def forget(self, key: int) -> None:
        """A sequence lost its slot."""


class PromptLookup:
    """Guesses that what followed the same tokens earlier in the sequence follows again.

    Right where an answer repeats its prompt: editing, quoting, code. Costs a dictionary entry a
    token.
    """

    def __init__(self, match: int = LOOKUP_TOKENS) -> None:
        self._match = match
        self._places: dict[int, _Occurrences] = {}

    def draft(self, sequences: Items[DraftRequest]) -> list[Tokens]:
        guesses = []
        for one in sequences:
            start = self._start(one.key, one.tokens)
            guesses.append(one.tokens[start : start + one.most])
        return guesses

    def ready(self, key: int, tokens: Tokens) -> bool:
        return self._start(key, tokens) < len(tokens)

    def forget(self, key: int) -> None:
        self._places.pop(key, None)

    def _start(self, key: int, tokens: Tokens) -> int:
        """Where what followed the last tokens before begins; the end where they are new."""
        return self._places.setdefault(key, _Occurrences()).following(tokens, self._match)


@dataclass(slots=True)
class _Occurrences:
    """Where each run of tokens last ended, up to ``read`` tokens, and the answer for those."""

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    read: int = 0
    start: int = 0

    def following(self, tokens: Tokens, match: int) -> int:
        if self.read == len(tokens):
            return self.start
        first = max(match, self.read + 1)
        recent = tokens[max(0, first - match) :].tolist()
        self.start = len(tokens)
        for end in range(first, len(tokens) + 1):
            run = tuple(recent[end - first : end - first + match])
            if end == len(tokens):
                self.start = self.ends.get(run, len(tokens))
            self.ends[run] = end
        self.read = len(tokens)
        return self.start


@dataclass(slots=True)
class AcceptedTokens:
    """How many tokens the steps of one sequence with guesses gave, as a running mean."""

    mean: float = 0.0
    steps: int = 0
    paused_until: int = 0

    def note(self, tokens: int) -> None:
        """A step gave so many tokens, the one it would have given anyway included."""
        self.steps += 1
        weight = max(1 - MEMORY, 1 / self.steps)
        self.mean += (tokens - self.mean) * weight

    def pause(self, known: int) -> None:
        """Do not guess again before there are PAUSE_TOKENS more tokens; then begin afresh."""
        self.paused_until = known + PAUSE_TOKENS
        self.mean, self.steps = 0.0, 0


@dataclass(frozen=True, slots=True)
class SpeculationStatistics:
    """Tokens guessed, those of them that were right, the steps with guesses, and how often
    guessing was paused because it did not pay."""

    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    pauses: int = 0
