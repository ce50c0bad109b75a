"""A request on its way, and the place it has while it runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import field

import numpy as np
from numpy.typing import NDArray

from contract.lazy_dataclass import dataclass
from contract.types import Request
from reference.limits import RING_STEPS, pages_for
from reference.memory.prefix import Difference, PathEnd
from reference.runner import LOGITS
from reference.sched.constraints import Mask
from reference.sched.scores import ScoreSink
from reference.sched.slots import NO_ROWS

LogitsSink = Callable[[int, NDArray[np.float32]], None]
"""Receives (first position, float32[positions, n]) for every chunk, n being the vocabulary or the
width of what was asked for in place of logits; the array is its own."""

MaskProvider = Callable[[list[int]], Mask | None]
"""The tokens generated so far -> the mask (``reference.sched.constraints``) of those that may come
next, None for all. It is asked again, with the same tokens, about a step that was lost."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request under way.

    ``order`` numbers requests by arrival, ``since`` is when it began to wait. ``tokens`` int32 has
    room for all it may ever have; the first ``known`` of them the host knows: the prompt and what
    was sampled and read. ``last`` is the position its last token may have, ``allowed`` says which
    tokens may come next. Logits of the first ``scored`` positions, or rows of another ``output``,
    were handed over, and to ``on_scores`` the log-probabilities of the prompt's tokens before
    position ``next_score``. ``faults`` counts the steps that failed under it, ``stalled_steps``
    those since its consumer stopped taking tokens, none while that is ``patient``. It was submitted
    at ``arrived``, and its last tokens were handed over at ``given``. It once had ``reached``
    positions computed.
    """

    request: Request
    order: int
    since: float
    scope: Hashable
    tokens: NDArray[np.int32]
    known: int
    last: int
    on_logits: LogitsSink | None = None
    output: str = LOGITS
    allowed: MaskProvider | None = None
    scored: int = 0
    on_scores: ScoreSink | None = None
    next_score: int = 0
    faults: int = 0
    stalled: bool = False
    stalled_steps: int = 0
    patient: bool = False
    arrived: float = 0.0
    given: float | None = None
    reached: int = 0
    active: RunningSequence | None = None

    @property
    def cacheable(self) -> int:
        """How many of its tokens may come from the prefix cache: not the last one known, whose
        logits are wanted, none whose logits are still to be handed over, and none that penalties
        look at, since only a computed token enters the slot's recent ones."""
        sampling = self.request.sampling
        recent = sampling.repeat_last_n if sampling.penalizes else 0
        return max(0, min(self.known - max(1, recent), self.rows_from))

    @property
    def rows_from(self) -> int:
        """The first position of those that each have a row."""
        scoring = self.on_scores is not None and self.next_score < len(self.request.prompt)
        return min(
            NO_ROWS if self.on_logits is None else self.scored,
            self.next_score - 1 if scoring else NO_ROWS,
        )

    @property
    def pages_to_begin(self) -> int:
        """Pages its quota must have room for: with those of the tokens that steps under way would
        sample. These are lost with a place, so one that had to leave for the page behind all it
        knows would have gained nothing, and two of a tenant's on two models could do that for
        ever."""
        return self.pages_to(0)

    def pages_to(self, quantum: int) -> int:
        """Pages of what is known or of ``quantum`` positions, and of the tokens of steps under way
        behind them."""
        return pages_for(min(max(self.known, quantum) + RING_STEPS - 1, self.last) + 1)

    @property
    def reach(self) -> int:
        """The most positions it can come to, its last token included."""
        return self.last + 1

    @property
    def end(self) -> int:
        """Positions that are computed at most: the last token is sampled only."""
        return max(self.known, self.last)

    def drafted(self, start: int, rows: int) -> bool:
        """Whether a chunk from position ``start`` on with so many rows has guessed tokens."""
        return rows > 1 and self.on_logits is None and start >= len(self.request.prompt) - 1

    @property
    def samples(self) -> bool:
        """Whether anything is generated at all."""
        return self.request.max_tokens > 0


@dataclass(slots=True, eq=False)
class RunningSequence:
    """A sequence in a slot, from its admission until it leaves. Steps refer to it: one that was
    preempted and came back is another placement, and what older steps computed is nobody's.

    ``published`` is how far the prefix cache knows its pages. ``states`` are recurrent states that
    are kept of its answer, (tokens, place) each: the place of that after so many tokens. ``undo``
    is the place of the one before guesses. A sequence that has computed ``quantum`` positions has
    got on; while it has not, nobody takes the slot of one that is ``protected``. Pages of its first
    ``matched`` tokens were cached when it was admitted, and ``difference`` is where a cached
    sequence of its tenant went on otherwise.
    """

    sequence: Sequence
    slot: int
    pages: list[int] = field(default_factory=list)
    published: PathEnd | None = None
    states: list[tuple[int, int]] = field(default_factory=list)
    undo: int | None = None
    quantum: int = 0
    protected: bool = False
    matched: int = 0
    difference: Difference | None = None

    @property
    def masked(self) -> bool:
        """Whether the tokens that may come next depend on the last one."""
        return self.sequence.allowed is not None


def new_sequence(
    request: Request,
    *,
    order: int,
    scope: Hashable,
    reach: int,
    arrived: float,
    on_logits: LogitsSink | None,
    logits_from: int,
    output: str,
    allowed: MaskProvider | None,
    on_scores: ScoreSink | None,
) -> Sequence:
    """The state of a request that was just accepted and can come to ``reach`` positions."""
    tokens = np.empty(reach, np.int32)
    tokens[: len(request.prompt)] = request.prompt
    # Of a prompt that is only scored nothing is read behind the last token.
    only_scored = on_scores is not None and on_logits is None and not request.max_tokens
    return Sequence(
        request=request,
        order=order,
        since=0.0,
        scope=scope,
        tokens=tokens,
        known=len(request.prompt) - only_scored,
        last=reach - 1,
        on_logits=on_logits,
        output=output,
        allowed=allowed,
        scored=logits_from,
        on_scores=on_scores,
        next_score=request.score_from or 0,
        arrived=arrived,
    )
