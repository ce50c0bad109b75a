"""Engines on simulated devices, and those who would bend them."""

from collections.abc import Callable, Iterable
from typing import Any

from contract.types import Request, Tenant, TokenEvent
from harness.simulation.clock import VirtualClock
from harness.simulation.runner import SimulatedRunner, StepSeconds
from reference.engine import Engine, EngineOptions
from reference.engine.drafter import Drafter
from reference.limits import Limits
from reference.observer import NO_OBSERVER, Observer
from reference.sched.tenants import Tenants

STEP_SECONDS = 0.05


def engine_of(
    *tenants: Tenant, slots: int = 2, pages: int = 30, context: int = 512, chunk: int = 32,
    recurrent: bool = False, saved_states: int = 0, drafter: Drafter | None = None,
    observer: Observer = NO_OBSERVER, **options: Any,
) -> tuple[Engine, VirtualClock]:  # fmt: skip
    """An engine in virtual time, whose steps take about STEP_SECONDS."""
    clock = VirtualClock()
    limits = Limits(
        slots, context, pages, step_tokens=slots + chunk, step_rows=slots,
        saved_states=saved_states, draft_tokens=3 if drafter else 0,
    )  # fmt: skip
    runner = SimulatedRunner(
        limits, clock, recurrent=recurrent, seconds=StepSeconds(fixed=STEP_SECONDS)
    )
    engine = Engine(
        runner, EngineOptions(**options), tenants=Tenants(tenants, clock=clock), clock=clock,
        drafter=drafter, observer=observer,
    )  # fmt: skip
    return engine, clock


class Flood:
    """Keeps ``waiting`` requests of a tenant in the queue for ever, one with each number: short
    prompts, no two alike."""

    def __init__(
        self, engine: Engine, tenant: int, *, waiting: int = 4, tokens: int = 20, first: int = 1000
    ) -> None:
        self._engine, self._tenant = engine, tenant
        self._waiting, self._tokens, self._next = waiting, tokens, first
        self._live: set[int] = set()

    def refill(self, events: Iterable[TokenEvent] = ()) -> None:
        """Ask again for every one that ended."""
        self._live -= {event.request_id for event in events if event.finish_reason is not None}
        while len(self._live) < self._waiting:
            number = self._next
            self._next += 1
            prompt = tuple((number * 31 + i * 7) % 1000 for i in range(20))
            request = Request(number, prompt, self._tokens, tenant=self._tenant, ignore_end=True)
            self._engine.submit(request)
            self._live.add(number)


def until(
    engine: Engine, clock: VirtualClock, seconds: float, each: Callable[[list[TokenEvent]], None],
    done: Callable[[], bool] = lambda: False,
) -> float:  # fmt: skip
    """Step for so many seconds of virtual time or until ``done``; the seconds it took."""
    began = clock()
    while clock() - began < seconds and not done():
        before = clock()
        each(engine.step())
        if clock() == before:
            clock.advance(STEP_SECONDS)
    return clock() - began
