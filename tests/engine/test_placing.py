"""Making room: nobody is sent away in vain."""

from __future__ import annotations

from contract.types import QosClass, Request, Tenant
from harness.simulation.clock import VirtualClock
from harness.simulation.runner import SimulatedRunner
from reference.engine import Engine
from reference.limits import Limits
from reference.sched.tenants import Tenants


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
