"""Tenants for tests of the policy: large quotas, any class, drawn sets of them."""

from dataclasses import replace

from hypothesis import strategies as st

from contract.types import QosClass, Tenant
from reference.sched.wait_queue import WaitingRequest

AGING = 10.0
BIG = Tenant(0, "big", max_slots=100, max_kv_pages=1000, decode_tokens_per_s=1000)


def of_class(id: int, qos: QosClass, **fields: float) -> Tenant:
    return replace(BIG, id=id, name=f"tenant {id}", qos=qos, **fields)


def always(waiting: WaitingRequest) -> bool:
    return True


@st.composite
def tenant_sets(draw: st.DrawFn) -> list[Tenant]:
    """One to six tenants of any class, weight and quota."""
    return [
        of_class(
            id,
            draw(st.sampled_from(QosClass)),
            weight=draw(st.sampled_from((0.5, 1.0, 1.0, 3.0))),
            max_slots=draw(st.integers(1, 5)),
            max_kv_pages=draw(st.integers(4, 40)),
        )
        for id in range(draw(st.integers(1, 6)))
    ]
