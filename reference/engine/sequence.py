"""The record of a request from its submission to its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field

import numpy as np
from numpy.typing import NDArray

from contract.lazy_dataclass import dataclass
from contract.types import Request
from reference.expert_outputs import ExpertSink
from reference.limits import RING_STEPS, pages_for
from reference.memory.prefix import Difference, PrefixHit, PublishedPrefix, Scope
from reference.runner import LOGITS
from reference.sched.constraints import Mask
from reference.sched.scores import ScoreSink
from reference.sched.slots import NO_ROWS

LogitsSink = Callable[[int, NDArray[np.float32]], None]
"""Receives (first position, float32[positions, n]) for every chunk; n is the vocabulary, or the
width of the output requested instead of logits. The array is a copy."""

MaskProvider = Callable[[list[int]], Mask | None]
"""Maps the tokens generated so far to the mask (``reference.sched.constraints``) of the allowed
next tokens, None for all. After a lost step it is called again with the same tokens."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request that waits or runs, and everything the engine knows about it. Times are in seconds.

    What was requested: ``on_logits`` receives the rows of ``output`` for every position;
    ``allowed`` gives the mask of each token; cached pages are shared with the ``scope``.

    Tokens: ``tokens`` int32 has room for all of them. The host knows the first ``known``: the
    prompt, and the sampled tokens that were read. ``last_position`` is the largest position of a
    token.
    - ``scored``: positions whose logits ``on_logits`` has received. ``routed``: those whose experts
      ``on_experts`` has received.
    - ``next_score``: log-probabilities of the given tokens (prompt and forced) at positions before
      this one were passed on, those of the prompt to ``on_scores``, those of forced tokens in
      events.

    History: ``order`` numbers requests by arrival. The request was submitted at ``arrived``, waits
    ``since``, and its latest token was read at ``read_at``.
    - ``faults``: failed steps while it ran. ``max_computed``: the most positions it ever had
      computed.
    - ``stalled``: its consumer takes no tokens. ``stalled_steps`` counts the steps since, unless
      ``patient``.
    - ``cancelled``: its end was already counted.

    While it runs: ``slot`` is its slot, -1 while it waits, and ``pages`` are its KV pages.
    - ``admission`` counts how often it got a slot; results of steps of an earlier admission are
      dropped. ``admitted`` numbers the engine's admissions.
    - ``published``: the part of its pages that the prefix cache has.
    - ``states``: its saved recurrent states, (tokens, state slot) each.
    - ``draft_masks``: the masks of the rows of a step with drafts.
    - ``quantum_end``: the number of positions at which it has made progress; a ``protected``
      sequence keeps its slot until then.
    - ``matched``: tokens whose pages were cached when it was admitted; ``from_disk`` of them were
      only on disk. ``difference``: where a cached sequence of its tenant has another token.
    - ``looked_up``: it was looked up in the disk cache since it waits.

    Derived from the request: ``samples``, whether it samples any token; ``scored_to``, the position
    after the given tokens that have log-probabilities, 0 for none; and the number of ``given``
    tokens, NO_ROWS if all are."""

    request: Request
    order: int
    since: float
    scope: Scope
    tokens: NDArray[np.int32]
    known: int
    last_position: int
    on_logits: LogitsSink | None = None
    output: str = LOGITS
    allowed: MaskProvider | None = None
    scored: int = 0
    on_scores: ScoreSink | None = None
    next_score: int = 0
    on_experts: ExpertSink | None = None
    routed: int = 0
    faults: int = 0
    stalled: bool = False
    stalled_steps: int = 0
    patient: bool = False
    cancelled: bool = False
    arrived: float = 0.0
    read_at: float | None = None
    max_computed: int = 0
    slot: int = -1
    admission: int = 0
    admitted: int = 0
    pages: list[int] = field(default_factory=list)
    published: PublishedPrefix | None = None
    states: list[tuple[int, int]] = field(default_factory=list)
    draft_masks: list[Mask | None] = field(default_factory=list)
    quantum_end: int = 0
    protected: bool = False
    matched: int = 0
    difference: Difference | None = None
    from_disk: int = 0
    looked_up: bool = False
    samples: bool = field(init=False)
    scored_to: int = field(init=False)
    given: int = field(init=False)

    def __post_init__(self) -> None:
        prompt, forced = len(self.request.prompt), len(self.request.force_tokens)
        self.samples = self.request.max_tokens > forced
        self.scored_to = prompt + forced if forced or self.on_scores is not None else 0
        self.given = NO_ROWS if forced else prompt

    def begin(
        self, slot: int, pages: list[int], hit: PrefixHit, quantum_end: int, protected: bool
    ) -> None:
        """Start to run in a slot with these pages, the first of which are those of ``hit``."""
        self.pages, self.published, self.states = pages, None, []
        self.quantum_end, self.protected = quantum_end, protected
        self.matched, self.difference = hit.matched, hit.difference
        self.from_disk = hit.from_disk
        self.admission += 1
        self.slot = slot

    @property
    def running(self) -> bool:
        """Whether it has a slot."""
        return self.slot >= 0

    @property
    def tenant(self) -> int:
        """The id of its tenant."""
        return self.request.tenant

    @property
    def masked(self) -> bool:
        """Whether a mask restricts its next token, which depends on the last one."""
        return self.allowed is not None

    @property
    def cacheable(self) -> int:
        """How many of its tokens may come from the prefix cache. The others are computed: the last
        known token, whose logits are needed; tokens whose logits or experts its sinks have not
        received; and tokens that penalties use, since only a computed token enters the slot's
        recent ones."""
        sampling = self.request.sampling
        recent = sampling.repeat_last_n if sampling.penalizes else 0
        routed = NO_ROWS if self.on_experts is None else self.routed
        return max(0, min(self.known - max(1, recent), self.rows_from, routed))

    @property
    def rows_from(self) -> int:
        """The first position from which on every position has an output row."""
        scoring = self.next_score < self.scored_to
        return min(
            NO_ROWS if self.on_logits is None else self.scored,
            self.next_score - 1 if scoring else NO_ROWS,
        )

    @property
    def pages_to_begin(self) -> int:
        """The pages that its tenant's quota must have room for at admission: those of its known
        tokens and of the tokens that steps in flight would sample. With fewer, two sequences of one
        tenant on two models could preempt each other forever, each for its next page."""
        return self.pages_to(0)

    def pages_to(self, quantum_end: int) -> int:
        """The pages of its known tokens or of ``quantum_end`` positions, whichever are more, and of
        the tokens of steps in flight after them."""
        return pages_for(min(max(self.known, quantum_end) + RING_STEPS - 1, self.last_position) + 1)

    @property
    def max_positions(self) -> int:
        """The most positions it can have, including its last token."""
        return self.last_position + 1

    @property
    def end(self) -> int:
        """The most positions that are computed: the last token is only sampled."""
        return max(self.known, self.last_position)

    def drafted(self, start: int, rows: int) -> bool:
        """Whether a chunk from position ``start`` on with ``rows`` output rows contains drafts."""
        return rows > 1 and self.on_logits is None and start >= self.given - 1


def new_sequence(
    request: Request,
    *,
    order: int,
    scope: Scope,
    max_positions: int,
    arrived: float,
    on_logits: LogitsSink | None,
    logits_from: int,
    output: str,
    allowed: MaskProvider | None,
    on_scores: ScoreSink | None,
    on_experts: ExpertSink | None,
) -> Sequence:
    """The record of a request that was just accepted."""
    tokens = np.empty(max_positions, np.int32)
    given = (*request.prompt, *request.force_tokens)
    tokens[: len(given)] = given
    # If tokens are only scored, nothing after the last one is read.
    only_scored = on_scores is not None and on_logits is None and not request.max_tokens
    first_score = len(request.prompt) if request.force_tokens else 0
    return Sequence(
        request=request,
        order=order,
        since=0.0,
        scope=scope,
        tokens=tokens,
        known=len(given) - (only_scored or bool(request.force_tokens)),
        last_position=max_positions - 1,
        on_logits=on_logits,
        output=output,
        allowed=allowed,
        scored=logits_from,
        on_scores=on_scores,
        on_experts=on_experts,
        next_score=first_score if request.score_from is None else request.score_from,
        arrived=arrived,
    )
