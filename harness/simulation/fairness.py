"""A contest of equal tenants that always have requests: their shares of any five seconds."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from random import Random

from contract.types import QosClass, Request, SamplingParams, Tenant
from harness.simulation.clock import VirtualClock
from harness.simulation.history import VOCAB
from harness.simulation.invariants import Invariant, Violation
from harness.simulation.schedule import EngineShape
from harness.simulation.world import SimulatedWorld, World
from reference.engine import Engine, EngineOptions
from reference.limits import Limits, pages_for
from reference.sched.tenants import Tenants

WINDOW_SECONDS = 5.0
LEAST_JAIN_INDEX = 0.98
BEGIN_SECONDS = 2.0
"""Seconds after which the first requests of all tenants run."""
END_SECONDS = 14.0
LONGEST_ANSWER = 18
"""Tokens of the longest answer."""
STEP_SECONDS = 0.02
CONTEXT = 64


def play_mix(seed: int) -> Violation | None:
    """Let two to four equal tenants compete, with very different numbers of waiting requests."""
    random = Random(seed)
    slots = random.choice([2, 3, 4, 6])
    pages = slots * pages_for(CONTEXT)
    qos = random.choice(list(QosClass))
    tenants = [
        Tenant(id, f"tenant-{id}", max_slots=slots, max_kv_pages=pages, qos=qos)
        for id in range(random.choice([2, 3, 4]))
    ]
    shape = EngineShape(
        limits=Limits(slots, CONTEXT, pages, step_tokens=slots + 24, step_rows=slots),
        page_order=tuple(range(pages)),
        chunk_tokens=24,
        steps_ahead=random.choice([0, 1, 3]),
        stall_steps=10,
        queue_depth=1024,
        step_seconds=STEP_SECONDS,
    )
    backlogs = [random.choice([slots, 2 * slots, 10 * slots]) for _ in tenants]
    backlogs[0] = 10 * slots
    try:
        delivered = _compete(shape, tenants, backlogs, random)
        check_shares(delivered, len(tenants), BEGIN_SECONDS, END_SECONDS)
    except Violation as violation:
        return violation
    return None


def check_shares(
    delivered: Sequence[tuple[float, int]], tenants: int, begin: float, end: float
) -> None:
    """``delivered`` are the (moment, tenant) of every token, in order. Raises Violation unless
    the tenants' shares of every window from ``begin`` to ``end`` seconds are as good as equal, or
    differ by an answer at each end of the window at most: slots are given for whole answers.
    Jain's index, (sum x)^2 / (n sum x^2), is 1 for equal shares and 1 / n for one who gets all."""
    counts: Counter[int] = Counter()
    window: deque[tuple[float, int]] = deque()
    for moment, tenant in delivered:
        if not begin <= moment <= end:
            continue
        window.append((moment, tenant))
        counts[tenant] += 1
        while window[0][0] <= moment - WINDOW_SECONDS:
            counts[window.popleft()[1]] -= 1
        if moment < begin + WINDOW_SECONDS:
            continue
        shares = [counts[tenant] for tenant in range(tenants)]
        index = sum(shares) ** 2 / (tenants * sum(share * share for share in shares))
        part = sum(shares) / tenants
        apart = max(abs(share - part) for share in shares)
        if index < LEAST_JAIN_INDEX and apart > 2 * LONGEST_ANSWER:
            raise Violation(
                Invariant.FAIRNESS,
                f"until {moment:.2f} s the tenants got {shares} tokens, Jain index {index:.3f}",
            )


def _compete(
    shape: EngineShape, tenants: Sequence[Tenant], backlogs: Sequence[int], random: Random
) -> list[tuple[float, int]]:
    """Run until the end, with a constant number of requests of each tenant; returns (moment,
    tenant) of every token."""
    world: World = SimulatedWorld(shape, VirtualClock())
    world.runner.slot_scopes = [0] * shape.limits.slots
    engine = Engine(
        world.runner,
        EngineOptions(
            end_of_generation=world.end_of_generation,
            chunk_tokens=shape.chunk_tokens,
            steps_ahead=shape.steps_ahead,
            prefix_cache=False,
        ),
        tenants=Tenants(tenants, clock=world.clock),
        clock=world.clock,
    )
    owners: dict[int, int] = {}
    delivered: list[tuple[float, int]] = []

    def submit(tenant: int) -> None:
        id = len(owners)
        owners[id] = tenant
        prompt = tuple(random.randrange(VOCAB) for _ in range(random.randint(1, 8)))
        sampling = SamplingParams(seed=random.getrandbits(64))
        tokens = random.randint(6, LONGEST_ANSWER)
        engine.submit(Request(id, prompt, tokens, sampling, tenant=tenant, ignore_end=True))

    for tenant, backlog in enumerate(backlogs):
        for _ in range(backlog):
            submit(tenant)
    while world.clock() < END_SECONDS:
        for event in engine.step():
            tenant = owners[event.request_id]
            delivered.append((world.clock(), tenant))
            if event.finish_reason is not None:
                submit(tenant)
    return delivered
