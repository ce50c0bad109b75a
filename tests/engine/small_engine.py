"""A tiny model with few slots and pages, and what tests of its engine ask."""

from contract.types import Request, TokenEvent
from reference.cpu.tier import CpuTier
from reference.engine import Engine
from reference.limits import Limits
from tests.named_tiers import around_steps

SLOTS = 3
PAGES = 12
CONTEXT = 96
LIMITS = Limits(
    slots=SLOTS, context=CONTEXT, pages=PAGES, step_tokens=32, step_rows=16, draft_tokens=11
)

TIERS = around_steps("native", "opencl", "cuda")
ALL_TIERS = TIERS | around_steps("vulkan")
EVERY_TIER = {"cpu": CpuTier, **ALL_TIERS}


def request(number: int, length: int = 5, max_tokens: int = 4, **fields: object) -> Request:
    prompt = tuple((number * 31 + i * 7) % 256 for i in range(length))
    return Request(number, prompt, max_tokens, **fields)  # type: ignore[arg-type]


def assert_nothing_is_held(engine: Engine) -> None:
    """Every page is free or only the prefix cache's."""
    engine.memory.check([])
    assert engine.memory.free + engine.memory.cached == PAGES
    assert (engine.memory.meta["ref_count"] == 0).all()


def events_of(engine: Engine, *requests: Request) -> dict[int, list[TokenEvent]]:
    """All events until the engine is idle, of ``requests``, which are submitted, and of others."""
    events: dict[int, list[TokenEvent]] = {}
    for request in requests:
        engine.submit(request)
    for event in engine.run():
        events.setdefault(event.request_id, []).append(event)
    engine.memory.check([])
    return events


def tokens_of(engine: Engine, *requests: Request) -> dict[int, list[int]]:
    """The tokens of ``events_of``."""
    found = events_of(engine, *requests).items()
    return {number: [event.token for event in events] for number, events in found}
