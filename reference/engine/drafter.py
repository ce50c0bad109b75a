"""Drafters propose the next tokens, so that one step can yield several.

A step computes the last token of a sequence and the drafted ones after it, with a row of logits for
each, and samples every row by its own position. The token sampled after an accepted draft is the
one that plain decoding samples. Tokens after a wrong draft are dropped, and their keys and values
are overwritten before they are read. So drafts never change a token."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from contract.arrays import Ints
from contract.lazy_dataclass import dataclass
from reference.limits import RING_STEPS
from reference.runner import ModelRunner, StepInput, Submission

Tokens = Ints

FREQUENT_TOKENS = 96 * 1024
"""A drafter computes the logits of so many tokens, from id 0 on, where it can. Vocabularies list
tokens as they were merged, so these are 97 to 100 % of European languages and code."""
RECENT_TOKENS = 256
MOST_RARE = 16
"""It computes all logits while more than 1 / MOST_RARE of the latest RECENT_TOKENS tokens of a
sequence have other ids, as in Chinese texts."""
LOOKUP_TOKENS = 3
"""Number of consecutive tokens that must have occurred before for prompt lookup to draft."""


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A sequence to draft for. ``key`` identifies it while it has its ``slot``; ``tokens`` are all
    its known tokens; ``limit`` is the number of drafts there is room for."""

    key: int
    slot: int
    tokens: Tokens
    limit: int


class Drafter(Protocol):
    """Proposes the next tokens of sequences."""

    def draft(self, sequences: Items[DraftRequest]) -> list[Tokens]:
        """At most ``limit`` token ids for each sequence; none if there is no good proposal."""

    def ready(self, key: int, tokens: Tokens) -> bool:
        """Whether ``draft`` would propose a token. If so, the sequence runs in lockstep instead of
        having its next steps queued."""

    def forget(self, key: int) -> None:
        """Forget a sequence that lost its slot."""


@runtime_checkable
class ReadsTokens(Protocol):
    """A drafter that computes the tokens of a sequence before it drafts."""

    def unread(self, key: int, known: int) -> int:
        """How many of the ``known`` tokens of a sequence it has not computed."""


def nothing_unread(key: int, known: int) -> int:
    """``unread`` of a drafter that computes nothing."""
    return 0


def are_frequent(sequences: Iterable[DraftRequest], frequent: int) -> bool:
    """Whether ids below ``frequent`` are nearly all that the sequences have lately had."""
    recent = [one.tokens[-RECENT_TOKENS:] for one in sequences]
    return all(np.count_nonzero(few >= frequent) * MOST_RARE <= len(few) for few in recent)


class ChainedStep(NamedTuple):
    """A step of a drafting model, and for each of its output rows the index of the sequence."""

    inputs: StepInput
    rows: list[int]


class ChainedDrafts:
    """Consecutive queued steps of a drafting model for ``sequences`` sequences. Their tokens stay
    on the device until ``read``."""

    def __init__(self, runner: ModelRunner, steps: Iterable[ChainedStep], sequences: int) -> None:
        self._runner = runner
        self._drafts: list[list[int]] = [[] for _ in range(sequences)]
        self._in_flight: list[tuple[Submission, list[int]]] = []
        for step in steps:
            if len(self._in_flight) == RING_STEPS:
                self.read()
            self._in_flight.append((runner.submit(step.inputs), step.rows))

    def read(self) -> list[list[int]]:
        """The tokens that the steps sampled, a list for each sequence. Waits for the steps."""
        collect = self._runner.collect
        # The last one ends last, so the host waits once.
        outputs = [collect(submission).token.tolist() for submission, _ in self._in_flight[::-1]]
        for (_, rows), tokens in zip(self._in_flight, outputs[::-1], strict=True):
            for index, token in zip(rows, tokens, strict=True):
                self._drafts[index].append(token)
        self._in_flight.clear()
        return self._drafts


def sound_drafts(drafted: list[int]) -> Tokens:
    """The drafted tokens before the first row whose logits were not finite."""
    draft = np.array(drafted, np.int32)
    broken = np.flatnonzero(draft < 0)
    return draft[: broken[0]] if len(broken) else draft


class PromptLookup:
    """Proposes what followed the same tokens earlier in the sequence.

    Often right if an answer repeats its prompt: editing, quoting, code. It takes a dictionary entry
    for each token."""

    def __init__(self, match: int = LOOKUP_TOKENS) -> None:
        self._match = match
        self._occurrences: dict[int, _Occurrences] = {}

    def draft(self, sequences: Items[DraftRequest]) -> list[Tokens]:
        drafts = []
        for one in sequences:
            start = self._start(one.key, one.tokens)
            drafts.append(one.tokens[start : start + one.limit])
        return drafts

    def ready(self, key: int, tokens: Tokens) -> bool:
        return self._start(key, tokens) < len(tokens)

    def forget(self, key: int) -> None:
        self._occurrences.pop(key, None)

    def _start(self, key: int, tokens: Tokens) -> int:
        """The position after the earlier occurrence of the last tokens; the end without one."""
        return self._occurrences.setdefault(key, _Occurrences()).following(tokens, self._match)


@dataclass(slots=True)
class _Occurrences:
    """The position at which each n-gram last ended, among the first ``read`` tokens, and the result
    of ``following`` for those."""

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


@dataclass(frozen=True, slots=True)
class SpeculationStatistics:
    """Counts: tokens drafted, drafts accepted, steps with drafts, and pauses of drafting because it
    was not worth its cost."""

    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    pauses: int = 0
