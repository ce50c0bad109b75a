"""A contest of shares: of tenants that always have requests, one tries to hold more slots."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from random import Random

import numpy as np
from numpy.typing import NDArray

from contract.types import FinishReason, QosClass, Request, SamplingParams, Tenant
from harness.simulation.adversaries import LABELS
from harness.simulation.crowd import Crowd, timed_engine
from harness.simulation.history import VOCAB, solo_run
from harness.simulation.invariants import Invariant, require
from harness.simulation.served import Guesses
from reference.engine import EngineOptions
from reference.limits import Limits, pages_for, with_drafts
from reference.observer import Observer
from reference.sched.tenants import PART_OF_A_SLOT, SHARE_SECONDS

CONTEXT = 256
PROMPT = 8
"""Tokens of an honest tenant's prompts."""
CHUNK = 32
STEP_SECONDS = 0.05
WINDOW_SECONDS = 10.0
BEGIN_SECONDS, END_SECONDS = 20.0, 45.0
WEIGHTS = ((1, 1), (1, 1, 1, 1), (1, 2, 1), (1, 3))


@dataclass(frozen=True, slots=True)
class Cheat:
    """Requests of a tenant that tries to hold more slots than its share.

    It asks for each of the classes ``labels`` in turn, for each in ``period`` requests. So many
    ``copies`` in a row have the same prompt, and all its prompts begin with the same ``shared``
    tokens, as those of the others do. Its answers are drafted right if they are ``guessed``. Before
    each step it cancels one of its requests with the probability ``cancels``."""

    prompt: int = PROMPT
    tokens: int = 30
    labels: Sequence[QosClass | None] = (None,)
    period: int = 1
    copies: int = 1
    shared: int = 0
    guessed: bool = False
    cancels: float = 0.0


def draw_cheat(random: Random, max_tokens: int) -> Cheat:
    """A cheat that does some of these things at once."""

    def sometimes(value: int) -> int:
        return value if random.random() < 0.4 else 0

    prompt = sometimes(random.choice([1, 40, 100])) or PROMPT
    return Cheat(
        prompt=prompt,
        tokens=min(max_tokens, random.choice([1, 6, 30, 150])),
        labels=LABELS if random.random() < 0.5 else (None,),
        period=random.choice([1, 7, 50]),
        copies=sometimes(random.choice([2, 8])) or 1,
        shared=sometimes(prompt - 1),
        guessed=random.random() < 0.2,
        cancels=sometimes(1) * random.choice([0.05, 0.5]),
    )


class SlotTimes(Observer):
    """The slots that each tenant holds, and has held at most, the longest time that a request held
    one, and each tenant's slot-seconds so far after every change."""

    def __init__(self, tenants: int) -> None:
        self.slots, self.max_slots = [0] * tenants, [0] * tenants
        self.longest = 0.0
        self._began: dict[int, float] = {}
        self._tenant: dict[int, int] = {}
        self._moments, self._sums = [0.0], [[0.0] * tenants]

    def submitted(self, at: float, request: Request) -> None:
        """Note whose request it is."""
        self._tenant[request.id] = request.tenant

    def admitted(self, at: float, request_id: int, slot: int, known: int, reused: int) -> None:
        """Its tenant holds a slot more."""
        self._began[request_id] = at
        self._change(at, self._tenant[request_id], 1)

    def preempted(self, at: float, request_id: int, slot: int, known: int) -> None:
        """Its tenant holds a slot less."""
        self.longest = max(self.longest, at - self._began[request_id])
        self._change(at, self._tenant[request_id], -1)

    def finished(self, at: float, request_id: int, slot: int | None, reason: FinishReason) -> None:
        """The same, if it ran."""
        if slot is not None:
            self.preempted(at, request_id, slot, 0)

    def until(self, moments: NDArray[np.float64]) -> NDArray[np.float64]:
        """Slot-seconds of each tenant from the beginning to each moment."""
        sums = np.array(self._sums)
        return np.stack([np.interp(moments, self._moments, each) for each in sums.T], axis=1)

    def _change(self, at: float, tenant: int, slots: int) -> None:
        passed = at - self._moments[-1]
        self._sums.append([s + n * passed for s, n in zip(self._sums[-1], self.slots, strict=True)])
        self._moments.append(at)
        self.slots[tenant] += slots
        self.max_slots[tenant] = max(self.max_slots[tenant], self.slots[tenant])


def play_shares(seed: int) -> None:
    """Let one of some tenants that always have requests cheat, however it asks. Raises Violation
    where ``check_slots_held`` does."""
    random = Random(seed)
    weights = random.choice(WEIGHTS)
    whole = sum(weights) * random.choice([1, 2])
    slots = whole - (random.random() < 0.4)
    # A tenant that waits until it is aged takes its turn whatever it has had.
    max_tokens = 150 if slots == whole else 30
    compete(
        random,
        weights,
        slots,
        cheat=random.randrange(len(weights)),
        how=draw_cheat(random, max_tokens),
        tokens=min(max_tokens, random.choice([6, 30, 150])),
    )


def compete(
    random: Random, weights: Sequence[int], slots: int, *, cheat: int, how: Cheat, tokens: int
) -> None:
    """Let tenants of these weights compete for slots: the tenant ``cheat``, and others whose
    answers have ``tokens`` tokens. Raises Violation if ``check_slots_held`` does."""
    times, pages = SlotTimes(len(weights)), slots * pages_for(CONTEXT)
    qos = random.choice([QosClass.INTERACTIVE, QosClass.STANDARD])
    group = 7 if how.shared else None
    tenants = [
        Tenant(
            id,
            f"t{id}",
            weight,
            max_slots=slots,
            max_kv_pages=pages,
            qos=qos,
            isolation_group=group,
        )
        for id, weight in enumerate(weights)
    ]
    limits = Limits(
        slots,
        CONTEXT,
        pages,
        step_tokens=2 * slots + CHUNK,
        step_rows=2 * slots,
        saved_states=random.choice([0, 0, 1, 4]),
    )
    asked = _Asked(random, cheat, how, tokens)
    engine, clock = timed_engine(
        with_drafts(limits, EngineOptions().draft_tokens) if how.guessed else limits,
        EngineOptions(
            chunk_tokens=random.choice([3, CHUNK]),
            steps_ahead=random.choice([0, 1, 3]),
            prefix_cache=random.random() < 0.7,
        ),
        tenants,
        STEP_SECONDS,
        drafter=Guesses(asked.answer, VOCAB, random) if how.guessed else None,
        observer=times,
    )
    crowd = Crowd(engine, clock, dict.fromkeys(range(len(weights)), 2 * slots), asked.next)
    crowd.refill()
    while clock() < END_SECONDS:
        crowd.refill(engine.step())
        if random.random() < how.cancels:
            crowd.give_up(cheat, random)
    check_slots_held(times, weights, slots, cheat)


class _Asked:
    """The requests of a contest."""

    def __init__(self, random: Random, cheat: int, how: Cheat, tokens: int) -> None:
        self._random, self._cheat, self._how, self._tokens = random, cheat, how, tokens
        self._document = self._draw(how.shared)
        self._requests: list[Request] = []
        self._answers: dict[int, Sequence[int]] = {}
        self._turn = 0
        self._prompt: tuple[int, ...] = ()

    def next(self, tenant: int, number: int) -> Request:
        """The next request of a tenant."""
        how, label = self._how, None
        if tenant == self._cheat:
            label = how.labels[self._turn // how.period % len(how.labels)]
            if self._turn % how.copies == 0:
                self._prompt = self._document + self._draw(how.prompt - how.shared)
            self._turn += 1
            prompt, tokens = self._prompt, how.tokens
        else:
            prompt, tokens = self._document + self._draw(PROMPT), self._tokens
        sampling = SamplingParams(seed=self._random.getrandbits(64))
        request = Request(
            number, prompt, tokens, sampling, tenant=tenant, ignore_end=True, qos=label
        )
        self._requests.append(request)
        return request

    def answer(self, order: int) -> Sequence[int] | None:
        """All tokens of a request of the cheat, None for one of another tenant."""
        request = self._requests[order]
        if request.tenant != self._cheat:
            return None
        if order not in self._answers:
            self._answers[order] = solo_run(request, CONTEXT).tokens
        return self._answers[order]

    def _draw(self, length: int) -> tuple[int, ...]:
        return tuple([self._random.randrange(VOCAB) for _ in range(length)])


def check_slots_held(times: SlotTimes, weights: Sequence[int], slots: int, cheat: int) -> None:
    """Raise Violation unless the cheat never held more slots than ``max_slots_held``, and

    - where its part is whole, and so are the others': no other tenant misses more of any
      WINDOW_SECONDS than its part of the time in which one request holds a slot;
    - where it is not: of tenants of equal weight no other has had less than the cheat, at any
      moment, by more than ``max_ahead``."""
    limit = max_slots_held(weights, slots, cheat)
    require(
        times.max_slots[cheat] <= limit,
        Invariant.SHARES,
        lambda: (
            f"tenant {cheat} held {times.max_slots[cheat]} of {slots} slots, its limit is {limit}"
        ),
    )
    ends = np.arange(BEGIN_SECONDS + WINDOW_SECONDS, END_SECONDS, 0.01)
    others = [id for id in range(len(weights)) if id != cheat]
    if slots % sum(weights) == 0:
        held = times.until(ends) - times.until(ends - WINDOW_SECONDS)
        parts = np.array(weights) * (slots // sum(weights))
        missed = (parts * WINDOW_SECONDS - held)[:, others].max(0)
        bound = parts[others] * times.longest
    elif len(set(weights)) == 1:
        held = times.until(ends)
        missed = (held[:, [cheat]] - held[:, others]).max(0)
        bound = np.full(len(others), max_ahead(times.longest, END_SECONDS))
    else:
        return
    require(
        bool((missed <= bound).all()),
        Invariant.SHARES,
        lambda: f"{others} missed {missed} slot-seconds next to {cheat}, at most {bound}",
    )


def max_slots_held(weights: Sequence[int], slots: int, tenant: int) -> int:
    """The most slots that a tenant can hold next to others that always have requests.

    It gets one when it holds ``h`` by weight no more than any other does with PART_OF_A_SLOT
    more, and one slot is free. So where parts are whole it is the tenant's part."""
    own = weights[tenant]

    def others(h: int) -> int:
        return sum(ceil(h * weight / own - PART_OF_A_SLOT) for weight in weights) - ceil(
            h - PART_OF_A_SLOT
        )

    return 1 + max(h for h in range(slots) if h + others(h) <= slots - 1)


def max_ahead(longest: float, seconds: float) -> float:
    """The most slot-seconds by which a tenant can be ahead of one of equal weight after
    ``seconds`` in which both had requests, where requests hold a slot for at most ``longest``.

    While it has the slot that is left over its lead a, in which older seconds count exponentially
    less, grows by at most ``longest``, and it gets this slot only where a <= 0. The lead without
    such weights is a plus the integral of a / SHARE_SECONDS."""
    return longest * (1 + seconds / SHARE_SECONDS)
