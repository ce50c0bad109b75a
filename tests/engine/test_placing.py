"""Making room: nobody is sent away in vain."""

from __future__ import annotations

from contract.types import QosClass, Request, Tenant
from harness.simulation.clock import VirtualClock
from harness.simulation.runner import SimulatedRunner
from reference.engine import Engine
from reference.limits import Limits
from reference.sched.tenants import Tenants

ONE_DOCUMENT = tuple(range(100, 148))
"""Three whole pages."""


def test_nobody_is_preempted_for_pages_that_their_tenant_has_reserved() -> None:
    """The page that the victim gives back is its tenant's again, so the claimant gains nothing."""
    clock = VirtualClock()
    tenants = (
        Tenant(1, "claimant"),
        Tenant(2, "owner", qos=QosClass.BATCH, reserved_pages=1),
    )
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


def engine_of(*tenants: Tenant, pages: int = 16) -> Engine:
    clock = VirtualClock()
    runner = SimulatedRunner(Limits(3, 128, pages, step_tokens=67), clock)
    return Engine(runner, tenants=Tenants(tenants, clock=clock), clock=clock)


def test_a_page_that_two_requests_of_a_tenant_share_counts_once() -> None:
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


def test_whoever_still_holds_a_shared_page_pays_for_it_when_the_payer_leaves() -> None:
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
