"""Contests with adversaries: what a tenant gains by labels, and how long a flood delays a
request."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from contract.types import QosClass, Request, SamplingParams, Tenant
from harness.simulation.adversaries import LABELS
from harness.simulation.clock import VirtualClock
from harness.simulation.crowd import Crowd, Delivered, timed_engine, token_counts
from harness.simulation.history import VOCAB
from harness.simulation.invariants import Invariant, Violation, require
from reference.engine import Engine, EngineOptions
from reference.limits import Limits, pages_for
from reference.sched.quantum import most_turns

STEP_SECONDS = 0.05
SLOWEST_STEP = 0.07
"""The most seconds a step takes: it has at most CHUNK prompt tokens and a few others."""
CHUNK = 32
CONTEXT = 512
PROMPT = 8
"""Tokens of every prompt in a contest of labels."""
WINDOW_SECONDS = 10.0
MOST_EXCESS = 0.02
BEGIN_SECONDS, END_SECONDS = 20.0, 45.0
AGING_SECONDS = 10.0
WEIGHTS = ((1.0, 1.0), (1.0, 1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (1.0, 3.0))


def play_labels(seed: int) -> Violation | None:
    """Let tenants compete that always have requests. One of them asks for each class in turn and
    sometimes cancels: it must not get more than its weight's part of any ten seconds, and no other
    tenant much less than its own."""
    random = Random(seed)
    weights = random.choice(WEIGHTS)
    slots = int(sum(weights)) * random.choice([1, 2])
    qos = random.choice([QosClass.INTERACTIVE, QosClass.STANDARD])
    tokens = random.choice([6, 30, 150])
    period = random.choice([1, 7, 50])
    cheat, cancels = random.randrange(len(weights)), random.random() < 0.5
    engine, clock = _engine(
        random,
        [
            Tenant(id, f"t{id}", weight, max_slots=slots, max_kv_pages=slots * 32, qos=qos)
            for id, weight in enumerate(weights)
        ],
        slots,
        slots * pages_for(CONTEXT),
    )

    def ask(tenant: int, number: int) -> Request:
        label = LABELS[number // period % len(LABELS)] if tenant == cheat else None
        return _request(random, number, tenant, PROMPT, tokens, label)

    crowd = Crowd(engine, clock, dict.fromkeys(range(len(weights)), 2 * slots), ask)
    crowd.refill()
    while clock() < END_SECONDS:
        crowd.refill(engine.step())
        if cancels and random.random() < 0.05:
            crowd.give_up(cheat, random)
    parts = [weight / sum(weights) for weight in weights]
    try:
        loss = most_loss(tokens, slots, engine.chunk_tokens)
        check_parts(crowd.delivered, parts, cheat, loss, BEGIN_SECONDS, END_SECONDS)
    except Violation as violation:
        return violation
    return None


def most_loss(tokens: int, slots: int, chunk: int) -> float:
    """The largest fraction of its part that an honest tenant may miss in any WINDOW_SECONDS next
    to a tenant that gives up slots and takes them again, where answers have so many ``tokens``. An
    answer takes the steps of its tokens and those that read the prompts of all ``slots``, oldest
    first, in parts of ``chunk`` tokens.

    Nobody is preempted for fairness within a class, and no slot idles: a slot that is given up goes
    to another tenant for one answer. When the tenant that gave it up returns, it takes the next
    slot that becomes free, having been given the fewest tokens lately. The tenant that had this
    slot is then the next one: it misses at most what its part yields in the time of one answer.
    """
    reading = -(-slots * PROMPT // chunk)
    return (tokens + max(2, reading)) * SLOWEST_STEP / WINDOW_SECONDS


def check_parts(
    delivered: Delivered,
    parts: Sequence[float],
    cheat: int,
    loss: float,
    begin: float,
    end: float,
) -> None:
    """Raise Violation where the cheat got more than its part of any WINDOW_SECONDS between two
    moments, or another less than its part by more than the fraction ``loss`` of it."""
    for moment, counts in token_counts(delivered, WINDOW_SECONDS, begin, end):
        shares = [counts[id] / counts.total() for id in range(len(parts))]
        excess = [share - part for share, part in zip(shares, parts, strict=True)]
        lost = max([-more / parts[id] for id, more in enumerate(excess) if id != cheat])
        if excess[cheat] > MOST_EXCESS or lost > loss:
            raise Violation(
                Invariant.SHARES,
                f"until {moment:.2f} s the tenants got {shares}, tenant {cheat} by its labels",
            )


def play_flood(seed: int) -> Violation | None:
    """Let one request compete with interactive tenants that could fill every slot for ever, and
    that label and cancel: it must end within the bound of docs/scheduling.md."""
    random = Random(seed)
    slots, floods = random.randint(1, 4), random.randint(1, 3)
    prompt, tokens = random.choice([1, 60, 200, 400]), random.choice([1, 8, 100])
    answer = random.choice([1, 10, 30])
    pages = max(pages_for(prompt + tokens) + random.choice([1, 4, 20]), 4)
    victim = Tenant(0, "victim", qos=random.choice([QosClass.STANDARD, QosClass.BATCH]))
    flooding = [
        Tenant(id, f"flood-{id}", qos=QosClass.INTERACTIVE, weight=random.choice([1.0, 50.0]))
        for id in range(1, floods + 1)
    ]
    engine, clock = _engine(random, [victim, *flooding], slots, pages)
    labels = random.random() < 0.3

    def ask(tenant: int, number: int) -> Request:
        label = LABELS[number % len(LABELS)] if labels else None
        return _request(random, number, tenant, 20, answer, label)

    crowd = Crowd(engine, clock, {tenant.id: 2 * slots for tenant in flooding}, ask)
    crowd.refill()
    for _ in range(3):
        crowd.refill(engine.step())
    request = _request(random, 1, 0, prompt, tokens, None)
    engine.submit(request)
    bound = longest(prompt + tokens, answer, floods, slots)
    began, ended = clock(), False
    while not ended and clock() - began <= bound:
        events = engine.step()
        ended = any(e.request_id == 1 and e.finish_reason is not None for e in events)
        crowd.refill(events)
        if random.random() < 0.02:
            crowd.give_up(random.randint(1, floods), random)
    try:
        require(
            ended,
            Invariant.PROGRESS,
            lambda: f"a request of {prompt} and {tokens} tokens has not ended after {bound:.0f} s",
        )
    except Violation as violation:
        return violation
    return None


def longest(reach: int, answer: int, floods: int, slots: int) -> float:
    """The seconds within which a request of ``reach`` positions ends next to tenants whose requests
    have ``answer`` tokens: the bound of docs/scheduling.md. Room appears at the latest when the
    running requests have ended: each of the flood reads a page or two and answers, and those that
    are preempted for pages begin again, once for each slot."""
    room = (answer + 4) * (slots + 1) * SLOWEST_STEP
    turns = most_turns(reach)
    return turns * (AGING_SECONDS + (floods + 1) * room) + 4 * reach * SLOWEST_STEP


def _engine(
    random: Random, tenants: Sequence[Tenant], slots: int, pages: int
) -> tuple[Engine, VirtualClock]:
    recurrent = random.random() < 0.3
    limits = Limits(
        slots, CONTEXT, pages, step_tokens=slots + CHUNK, step_rows=slots,
        saved_states=random.choice([1, 4]) if recurrent else 0,
    )  # fmt: skip
    options = EngineOptions(
        chunk_tokens=random.choice([3, CHUNK]),
        steps_ahead=random.choice([0, 1, 3]),
        prefix_cache=random.random() < 0.7,
    )
    return timed_engine(limits, options, tenants, STEP_SECONDS)


def _request(
    random: Random, number: int, tenant: int, prompt: int, tokens: int, label: QosClass | None
) -> Request:
    return Request(
        number,
        tuple([random.randrange(VOCAB) for _ in range(prompt)]),
        tokens,
        SamplingParams(seed=random.getrandbits(64)),
        tenant=tenant,
        ignore_end=True,
        qos=label,
    )
