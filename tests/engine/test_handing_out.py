"""Between counting a token and handing it out: an interrupt there loses no token and pays for none,
whatever the client does next."""

from collections import Counter
from collections.abc import Callable

import pytest

from contract.types import FinishReason, Request, Tenant
from harness.simulation.clock import VirtualClock
from harness.simulation.history import solo_run
from harness.simulation.runner import SimulatedRunner
from reference.engine import Engine, EngineOptions
from reference.engine.models import Loaded, Models, no_loader
from reference.engine.output_processor import OutputProcessor
from reference.limits import Limits
from reference.sched.tenants import Tenants
from tests.engine.test_faults import CONTEXT, Interrupt, assert_all_given_back

pytestmark = pytest.mark.usefixtures("finite_logits")

ONE, TWO = Tenant(1, "one"), Tenant(2, "two")
REQUESTS = (
    Request(1, tuple(range(20)), 9, tenant=1, ignore_end=True),
    Request(2, tuple(range(30, 40)), 1, tenant=2, ignore_end=True),
    Request(3, tuple(range(50, 60)), 6, tenant=2, ignore_end=True),
)


class Server:
    """Two models that take turns, for tenants they share; what clients got is counted."""

    def __init__(self) -> None:
        clock = VirtualClock()
        self.tenants = Tenants([ONE, TWO], clock=clock)
        self.models = Models(no_loader, clock)
        self.engines: list[Engine] = []
        for number in range(2):
            runner = SimulatedRunner(Limits(2, CONTEXT, 20, step_tokens=34), clock, model=number)
            options = EngineOptions(steps_ahead=1)
            engine = Engine(runner, options, tenants=self.tenants, clock=clock)  # type: ignore[arg-type]
            self.engines.append(engine)
            self.models.add(str(number), Loaded(engine, 1, lambda: None))
        self.tokens: dict[int, list[int]] = {request.id: [] for request in REQUESTS}
        self.ends: Counter[tuple[int, FinishReason]] = Counter()
        self.gone: set[int] = set()
        for request in REQUESTS:
            self.model_of(request).submit(request)

    def model_of(self, request: Request) -> Engine:
        return self.engines[request.id % 2]

    def step(self, call: Callable[[], list] | None = None) -> None:  # type: ignore[type-arg]
        for event in self.models.step() if call is None else call():
            assert event.request_id not in self.gone, f"{event} follows a cancel"
            self.tokens[event.request_id].append(event.token)
            tenant = REQUESTS[event.request_id - 1].tenant
            if event.finish_reason is not None:
                self.ends[tenant, event.finish_reason] += 1

    def cancel(self, request: Request) -> None:
        self.model_of(request).cancel(request.id)
        self.gone.add(request.id)

    def finish(self) -> None:
        """Run to the end, and compare what was counted with what was handed out."""
        while not self.models.idle:
            self.step()
        for request in REQUESTS:
            model = request.id % 2
            expected = [event.token for event in solo_run(request, CONTEXT, model=model).events]
            if request.id not in self.gone:
                assert self.tokens[request.id] == expected
        for tenant in (1, 2):
            own = [r for r in REQUESTS if r.tenant == tenant]
            counted = [engine.usage.of(tenant) for engine in self.engines]
            handed_out = sum(len(self.tokens[request.id]) for request in own)
            assert sum(entry.tokens_generated for entry in counted) == handed_out
            ends: Counter[FinishReason] = Counter()
            for entry in counted:
                ends.update(entry.requests_finished)
            assert sum(ends.values()) == len(own)
            for reason in (FinishReason.LENGTH, FinishReason.STOP, FinishReason.ERROR):
                assert ends[reason] == self.ends[tenant, reason]
        for engine in self.engines:
            assert_all_given_back(engine)


def interrupted_before(line: int, steps: int, cancelled: tuple[int, ...]) -> bool:
    """Interrupt a step before a line of the product, then cancel requests. Whether it was."""
    server = Server()
    for _ in range(steps):
        server.step()
    try:
        server.step(lambda: Interrupt(line).during(server.models.step))
        came = False
    except KeyboardInterrupt:
        came = True
    for number in cancelled:
        server.cancel(REQUESTS[number - 1])
    server.finish()
    return came


@pytest.mark.parametrize("cancelled", [(), (1,), (2,), (2, 3), (1, 2, 3)])
@pytest.mark.parametrize("steps", [2, 3, 5])
def test_an_interrupt_at_any_line_of_a_step_of_models(cancelled, steps):
    """From the first line to the last: the turns of the models, the step, the counting."""
    line, step = 1 + steps % 3, 9 if cancelled else 4
    while interrupted_before(line, steps, cancelled):
        line += step
    assert line > 300


def test_a_counted_token_that_is_cancelled_is_not_paid_for():
    engine = Server().engines[0]
    engine.advance()
    assert engine.usage.of(2).tokens_generated == 1
    assert engine.usage.of(2).requests_finished == {FinishReason.LENGTH: 1}
    engine.cancel(2)
    assert engine.usage.of(2).tokens_generated == 0
    assert +Counter(engine.usage.of(2).requests_finished) == {FinishReason.CANCELLED: 1}
    assert engine.take_events() == []
    assert engine.idle
    engine.memory.check([])


def test_events_that_nobody_took_come_first():
    """Nothing more is computed until they are handed out."""
    server = Server()
    engine = server.engines[1]
    engine.advance()
    steps = engine.statistics.steps
    engine.advance()
    assert engine.statistics.steps == steps
    assert [event.request_id for event in engine.take_events()] == [1, 3]
    assert engine.take_events() == []


def test_where_tokens_are_not_counted_again_it_is_noticed(monkeypatch):
    """Negative control: what a cancel drops after it was counted stays in the usage."""
    count = OutputProcessor.count
    monkeypatch.setattr(
        OutputProcessor, "count", lambda self: count(self) if self.pending else None
    )
    with pytest.raises(AssertionError):
        test_a_counted_token_that_is_cancelled_is_not_paid_for()
