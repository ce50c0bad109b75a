"""A contest with adversaries: how long a flood delays a request."""

from collections.abc import Sequence
from random import Random

from contract.types import QosClass, Request, SamplingParams, Tenant
from harness.simulation.adversaries import LABELS
from harness.simulation.clock import VirtualClock
from harness.simulation.crowd import Crowd, timed_engine
from harness.simulation.history import VOCAB
from harness.simulation.invariants import Invariant, require
from reference.engine import Engine, EngineOptions
from reference.limits import Limits, pages_for
from reference.sched.quantum import max_turns

STEP_SECONDS = 0.05
SLOWEST_STEP = 0.07
"""The most seconds a step takes: it has at most CHUNK prompt tokens and a few others."""
CHUNK = 32
CONTEXT = 512
AGING_SECONDS = 10.0


def play_flood(seed: int) -> None:
    """Let one request compete with interactive tenants that could fill every slot for ever, and
    that label and cancel. Raises Violation where it does not end within the bound of
    docs/scheduling.md."""
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
    require(
        ended,
        Invariant.PROGRESS,
        lambda: f"a request of {prompt} and {tokens} tokens has not ended after {bound:.0f} s",
    )


def longest(reach: int, answer: int, floods: int, slots: int) -> float:
    """The seconds within which a request of ``reach`` positions ends next to tenants whose requests
    have ``answer`` tokens: the bound of docs/scheduling.md. Room appears at the latest when the
    running requests have ended: each of the flood reads a page or two and answers, and those that
    are preempted for pages begin again, once for each slot."""
    room = (answer + 4) * (slots + 1) * SLOWEST_STEP
    turns = max_turns(reach)
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
