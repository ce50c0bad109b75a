"""Records of the steps of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from contract.cancel_token import CancelToken
from reference.engine.sequence import Sequence
from reference.runner import Submission
from reference.sched.planner import Chunk

Counted = list[tuple[Callable[[int, int], None], list[int]]]
"""For each tenant, a function that counts tokens towards its rates, and the tokens [prefilled,
decoded]."""


class Step(NamedTuple):
    """A step in flight: for each of its ``sequences`` a chunk, the admission under which it is
    computed, and the number of output rows.

    The step attends to ``attended`` positions in all and was submitted at ``began`` seconds.
    Beside it a draft block that follows some of its sequences read ``read`` tokens.
    ``waiting``, ``free_pages`` and ``cached_pages`` are counts at that time, ``admitted`` that of
    all admissions before."""

    number: int
    submission: Submission
    token: CancelToken
    sequences: list[Sequence]
    admissions: list[int]
    requests: list[int]
    chunks: list[Chunk]
    rows: list[int]
    attended: int
    began: float
    read: int | None
    waiting: int
    free_pages: int
    cached_pages: int
    admitted: int
    counted: Counted

    def of_current_admission(self) -> Iterator[bool]:
        """For each sequence, whether it still has the slot that the step was computed for."""
        for sequence, admission in zip(self.sequences, self.admissions, strict=True):
            yield sequence.slot >= 0 and sequence.admission == admission


class Starting(NamedTuple):
    """A step that is being submitted."""

    token: CancelToken
    sequences: list[Sequence]
    chunks: list[Chunk]
    rows: list[int]


class Abandoned(NamedTuple):
    """Steps that were abandoned: their sequences, each with the first position that may not be
    computed, and the number of ``admitted`` sequences before the first step."""

    sequences: list[tuple[Sequence, int]]
    admitted: int


class Computed(NamedTuple):
    """The part of a step that belongs to one sequence: positions ``start`` to ``stop`` - 1, which
    are tokens from ``first_token`` on among the ``tokens`` of the step, and output rows
    ``first_row`` to ``end_row`` - 1."""

    sequence: Sequence
    start: int
    stop: int
    first_row: int
    end_row: int
    first_token: int
    tokens: int

    @property
    def drafted(self) -> bool:
        """Whether all tokens but the first were drafted."""
        return self.sequence.drafted(self.start, self.end_row - self.first_row)
