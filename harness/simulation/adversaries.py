"""The actions of adversaries in a schedule: clients and operators that try to break the engine's
rules."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from contract.types import QosClass, Request, SamplingParams, Tenant
from harness.simulation.history import VOCAB
from harness.simulation.schedule import (
    Action,
    Arrive,
    Cancel,
    EngineShape,
    FailCopy,
    Interrupt,
    Prefix,
    Quota,
    Remove,
)

FIRST_ID = 5000
"""The first id of the requests of a flood; ids of other requests are below."""
MAX_INTERRUPTS = 6
LABELS = (None, *QosClass)
GROUPS = (None, None, 7, 8)
ADAPTERS = ((), (), ((0, 1.0),), ((1, 0.5),), ((1, 2.0), (0, -1.5)), ((0, 0.0),))
"""What requests combine of two adapters."""


def draw_adversaries(
    random: Random, shape: EngineShape, tenants: Sequence[Tenant], steps: int, *, copies: bool
) -> list[Action]:
    """Draw adversaries' actions within ``steps`` steps; copies fail where ``copies`` is true."""
    actions: list[Action] = []
    if random.random() < 0.6:
        actions += _flood(random, shape, tenants, random.randrange(steps))
    if random.random() < 0.6:
        for _ in range(random.randint(1, 3)):
            actions += _leaves_and_comes_back(random, shape, random.choice(tenants), steps)
    if random.random() < 0.6:
        for _ in range(random.randint(1, 4)):
            tenant = _changed(random, shape, random.choice(tenants))
            actions.append(Quota(random.randrange(steps), tenant))
    if random.random() < 0.5 and copies:
        for _ in range(random.randint(1, 3)):
            actions.append(FailCopy(random.randrange(steps), random.randrange(shape.models)))
    if random.random() < 0.5:
        for _ in range(random.randint(1, MAX_INTERRUPTS)):
            line = random.choice([3, 40, 900]) * random.randint(1, 9)
            actions.append(Interrupt(random.randrange(steps), line))
    return actions


def with_adapters(random: Random, actions: Sequence[Action]) -> list[Action]:
    """The actions with ADAPTERS added to some of the requests."""
    return [
        replace(action, request=replace(action.request, adapters=random.choice(ADAPTERS)))
        if isinstance(action, Arrive)
        else action
        for action in actions
    ]


def draw_callers(random: Random, arrivals: Sequence[Arrive], steps: int) -> list[Action]:
    """Draw calls that save, load and drop what is cached of some requests within ``steps`` steps,
    the same prompts asked again, and interrupts of calls that are no steps."""
    actions: list[Action] = []
    if random.random() < 0.5:
        again = iter(range(FIRST_ID + 500, FIRST_ID + 600))
        for _ in range(random.randint(1, 3)):
            arrival = max(random.choices(arrivals, k=3), key=lambda each: len(each.request.prompt))
            request, step = arrival.request, arrival.step + random.choice([3, 10, 40])
            actions.append(Prefix(step, request.id, "save"))
            for _ in range(random.randint(1, 3)):
                step += random.choice([0, 1, 5, 30])
                what = random.choice(["load", "load", "drop", "save"])
                actions.append(Prefix(step, request.id, what))
                same = replace(request, id=next(again), max_tokens=3)
                actions.append(replace(arrival, step=step + 1, request=same))
    if random.random() < 0.5:
        for _ in range(random.randint(1, MAX_INTERRUPTS)):
            line = random.choice([1, 5, 20]) * random.randint(1, 20)
            actions.append(Interrupt(random.randrange(steps), line, call=True))
    return actions


def _flood(
    random: Random, shape: EngineShape, tenants: Sequence[Tenant], step: int
) -> list[Action]:
    """One tenant submits many requests at once, labelled with each class in turn, with the longest
    and shortest prompts, and cancels half of them."""
    tenant, context = random.choice(tenants), shape.limits.context
    actions: list[Action] = []
    for number in range(random.randint(6, 24)):
        length = random.choice([1, 1, 9, context])
        request = Request(
            FIRST_ID + number,
            tuple([random.randrange(VOCAB) for _ in range(length)]),
            random.choice([1, 3, 17, context]),
            SamplingParams(seed=random.getrandbits(64)),
            tenant=tenant.id,
            ignore_end=True,
            qos=LABELS[number % len(LABELS)],
        )
        at = step + number // 4
        actions.append(Arrive(at, request, model=random.randrange(shape.models)))
        if random.random() < 0.5:
            actions.append(Cancel(at + random.choice([0, 1, 2, 5]), request.id))
    return actions


def _leaves_and_comes_back(
    random: Random, shape: EngineShape, tenant: Tenant, steps: int
) -> list[Action]:
    """A tenant is removed, and another one gets its id, with other limits."""
    gone = random.randrange(steps)
    back = gone + random.choice([0, 1, 4, 20])
    another = replace(_changed(random, shape, tenant), name=f"another-{tenant.id}")
    return [Remove(gone, tenant.id), Quota(back, another)]


def _changed(random: Random, shape: EngineShape, tenant: Tenant) -> Tenant:
    """The tenant with another isolation group or other reserved pages."""
    pages = shape.limits.pages
    reserved = random.choice([0, 0, pages // 6, pages // 2])
    return replace(
        tenant,
        isolation_group=random.choice(GROUPS),
        reserved_pages=reserved,
        max_kv_pages=max(tenant.max_kv_pages, reserved),
    )
