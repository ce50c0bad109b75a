"""Making room: nobody is sent away in vain."""

import pytest

from contract.errors import RequestError
from contract.types import QosClass, Request, Tenant
from harness.simulation import history
from harness.simulation.clock import VirtualClock
from harness.simulation.runner import SimulatedRunner
from reference.engine import Engine, EngineOptions
from reference.engine.options import ENGINE_DEFAULTS
from reference.limits import Limits
from reference.sched.quantum import QUANTUM
from reference.sched.tenants import Tenants

ONE_DOCUMENT = tuple(range(100, 148))
"""Three whole pages."""


def test_nobody_is_preempted_for_pages_that_their_tenant_has_reserved():
    """The page that the victim gives back is its tenant's again, so the claimant gains nothing."""
    clock = VirtualClock()
    tenants = (Tenant(1, "claimant"), Tenant(2, "owner", qos=QosClass.BATCH, reserved_pages=1))
    engine = Engine(
        SimulatedRunner(Limits(2, 32, 4, step_tokens=19), clock),
        tenants=Tenants(tenants, clock=clock),
        clock=clock,
    )
    engine.submit(Request(1, (7,), 9, tenant=1, ignore_end=True))
    engine.submit(Request(2, (8,), 9, tenant=2, ignore_end=True))
    engine.step()
    engine.submit(Request(3, (9,) * 17, 5, tenant=1, ignore_end=True))
    ended = [event.request_id for event in engine.run() if event.finish_reason is not None]
    assert ended == [1, 2, 3]
    assert engine.statistics.preempted == 0


def engine_of(
    *tenants: Tenant, pages: int = 16, options: EngineOptions = ENGINE_DEFAULTS
) -> Engine:
    clock = VirtualClock()
    runner = SimulatedRunner(Limits(3, 128, pages, step_tokens=67, masks=3), clock)
    return Engine(runner, options, tenants=Tenants(tenants, clock=clock), clock=clock)


def test_a_page_that_two_requests_of_a_tenant_share_counts_once():
    """Three pages are shared, each of the requests has two more: seven of seven, nobody leaves."""
    engine = engine_of(Tenant(1, "one", max_kv_pages=7))
    engine.submit(Request(1, (*ONE_DOCUMENT, 7), 28, tenant=1, ignore_end=True))
    engine.step()
    engine.step()
    # Admitted while its quota was larger: where it will share is not known before it is placed.
    engine.put_tenant(Tenant(1, "one", max_kv_pages=16))
    engine.submit(Request(2, (*ONE_DOCUMENT, 8), 28, tenant=1, ignore_end=True))
    engine.step()
    engine.put_tenant(Tenant(1, "one", max_kv_pages=7))
    assert engine.tenants.usage(1).pages == engine.memory.held(1) == 5
    most = 0
    while not engine.idle:
        engine.step()
        most = max(most, engine.tenants.usage(1).pages)
        assert engine.tenants.usage(1).pages == engine.memory.held(1)
    assert most == 7
    assert engine.statistics.preempted == 0


def test_whoever_still_holds_a_shared_page_pays_for_it_when_the_payer_leaves():
    first, second = (Tenant(id, f"t{id}", isolation_group=1) for id in (1, 2))
    engine = engine_of(first, second)
    engine.submit(Request(1, (*ONE_DOCUMENT, 7), 30, tenant=1, ignore_end=True))
    engine.step()
    engine.step()
    engine.submit(Request(2, (*ONE_DOCUMENT, 8), 30, tenant=2, ignore_end=True))
    engine.step()
    assert (engine.tenants.usage(1).pages, engine.tenants.usage(2).pages) == (4, 1)
    engine.cancel(1)
    assert (engine.tenants.usage(1).pages, engine.tenants.usage(2).pages) == (0, 4)


def test_a_request_may_ask_for_a_lower_class_than_its_tenants():
    """It gives way to the tenant's other requests; asking for a higher one changes nothing."""
    engine = engine_of(Tenant(1, "one", qos=QosClass.STANDARD))
    for id in range(3):
        engine.submit(Request(id, (id,), 40, tenant=1, ignore_end=True, qos=QosClass.BATCH))
    engine.step()
    engine.submit(Request(3, (7,), 4, tenant=1, ignore_end=True, qos=QosClass.INTERACTIVE))
    ended = [event.request_id for event in engine.run() if event.finish_reason is not None]
    assert ended == [3, 0, 1, 2]
    assert engine.statistics.preempted == 1
    engine.submit(Request(4, (7,), 4, tenant=1, ignore_end=True))
    for id in (5, 6):
        engine.submit(Request(id, (id,), 40, tenant=1, ignore_end=True))
    engine.step()
    engine.submit(Request(7, (8,), 4, tenant=1, ignore_end=True, qos=QosClass.INTERACTIVE))
    assert [event.request_id for event in engine.run() if event.finish_reason] == [4, 7, 5, 6]
    assert engine.statistics.preempted == 1


def test_what_is_no_class_is_refused():
    with pytest.raises(RequestError, match="qos: is 'flex', not a QosClass"):
        engine_of(Tenant(0, "one")).submit(Request(1, (7,), 4, qos="flex"))  # type: ignore[arg-type]


def test_nobody_is_preempted_for_a_tenant_that_would_then_pay_beyond_its_quota():
    """The pages it shares with the victim would be charged to it when the victim leaves."""
    engine = engine_of(
        Tenant(1, "one", qos=QosClass.INTERACTIVE, max_kv_pages=5, isolation_group=1),
        Tenant(2, "other", isolation_group=1),
        pages=8,
    )
    engine.submit(Request(1, (*ONE_DOCUMENT, 7), 14, tenant=2, ignore_end=True))
    engine.step()
    engine.step()
    engine.submit(Request(2, (*ONE_DOCUMENT, 8), 14, tenant=1, ignore_end=True))
    engine.step()
    assert [engine.tenants.usage(id).pages for id in (1, 2)] == [1, 4]
    engine.submit(Request(3, tuple(range(200, 233)), 3, tenant=1, ignore_end=True))
    while not engine.idle:
        engine.step()
        assert engine.tenants.usage(1).pages <= 5
    assert engine.statistics.preempted == 0


def test_who_waited_too_long_gets_something_done_before_it_makes_room(monkeypatch):
    """QUANTUM positions beyond those that came from the cache; then it gives way to its betters."""
    monkeypatch.setattr(history, "NON_FINITE_ONE_IN", 1 << 62)
    clock = VirtualClock()
    tenants = (
        Tenant(1, "hurried", qos=QosClass.INTERACTIVE),
        Tenant(2, "batch", qos=QosClass.BATCH),
    )
    runner = SimulatedRunner(Limits(1, 256, 32, step_tokens=19), clock)
    engine = Engine(runner, tenants=Tenants(tenants, clock=clock), clock=clock)
    document = (*ONE_DOCUMENT, 7)
    engine.submit(Request(1, document, 2, tenant=2, ignore_end=True))
    list(engine.run())
    engine.submit(Request(2, (5,), 20, tenant=1, ignore_end=True))
    engine.step()
    engine.submit(Request(3, document, 150, tenant=2, ignore_end=True))
    clock.advance(11)
    while not engine.progress(3):
        engine.step()
    engine.submit(Request(4, (6,), 4, tenant=1, ignore_end=True))
    done = 0
    while not engine.statistics.preempted:
        done = max(done, engine.progress(3))
        engine.step()
    begun = len(ONE_DOCUMENT)
    # Between two looks at who waits there are up to twelve of these steps.
    assert begun + QUANTUM <= done <= begun + QUANTUM + 12
    assert len([event for event in engine.run() if event.request_id == 4]) == 4


def test_room_that_a_preemption_makes_is_used_at_once():
    """The only sequence that may compute needs a page, and leaves for it: whoever fits then is
    computed in the same step."""
    tenants = Tenant(1, "stalls", qos=QosClass.INTERACTIVE), Tenant(2, "long"), Tenant(3, "short")
    engine = engine_of(*tenants, pages=6, options=EngineOptions(steps_ahead=0))
    engine.submit(Request(1, (7,) * 40, 50, tenant=1, ignore_end=True))
    engine.step()
    engine.stall(1)
    request = Request(2, tuple(range(30)), 40, tenant=2, ignore_end=True)
    engine.submit(request, allowed=lambda generated: None)
    while engine.progress(2) < 30:
        engine.step()
    engine.submit(Request(3, (9,) * 3, 5, tenant=3, ignore_end=True))
    while not engine.statistics.preempted:
        engine.step()
        assert not engine.blocked
    assert engine.progress(2) == 0
    assert engine.progress(3) > 0
