"""Who has to make room for whom."""

from hypothesis import given
from hypothesis import strategies as st

from contract.types import QosClass
from reference.sched.tenants import Tenants
from reference.sched.wait_queue import RunningRequest, choose_victim
from tests.sched.manual_clock import ManualClock
from tests.sched.tenant_sets import of_class, tenant_sets


@st.composite
def populations(draw: st.DrawFn) -> tuple[Tenants, list[RunningRequest]]:
    """Tenants that use what their running requests hold."""
    declared = draw(tenant_sets())
    tenants = Tenants(declared, clock=ManualClock())
    running = []
    for slot in range(draw(st.integers(0, 10))):
        tenant = draw(st.sampled_from(declared))
        entry = RunningRequest(
            order=draw(st.integers(0, 1000).filter(lambda o: all(o != r.order for r in running))),
            tenant=tenant.id, qos=tenant.qos.lowered_to(draw(st.sampled_from((None, *QosClass)))),
            slot=slot, pages=draw(st.integers(0, 9)), protected=draw(st.booleans()),
        )  # fmt: skip
        tenants.occupy(entry.tenant, slots=1, pages=entry.pages)
        running.append(entry)
    return tenants, running


@given(populations(), st.data())
def test_a_claimant_displaces_only_what_is_below_it(population, data):
    """Never an interactive request, one of its own class or above, or a protected one; of the
    rest the lowest class, the highest share, the youngest."""
    tenants, running = population
    claimant = data.draw(st.sampled_from(list(tenants)), "claimant")
    below = [
        entry for entry in running if entry.qos.rank > claimant.qos.rank and not entry.protected
    ]
    chosen = choose_victim(running, tenants, claimant.qos)
    if chosen is None:
        assert not below
        return
    assert chosen in below
    assert chosen.qos is not QosClass.INTERACTIVE
    ranks = [entry.qos.rank for entry in below]
    assert chosen.qos.rank == max(ranks)
    lowest = [e for e, rank in zip(below, ranks, strict=True) if rank == max(ranks)]
    share = tenants.dominant_share(chosen.tenant)
    assert share == max(tenants.dominant_share(entry.tenant) for entry in lowest)
    assert all(
        entry.order <= chosen.order
        for entry in lowest
        if tenants.dominant_share(entry.tenant) == share
    )


@given(populations())
def test_memory_can_always_be_had(population):
    """Without a claimant somebody is chosen while anything runs, of the lowest class: a protected
    request only when all of the class are."""
    tenants, running = population
    chosen = choose_victim(running, tenants, None)
    if not running:
        assert chosen is None
        return
    assert chosen is not None
    lowest = max(entry.qos.rank for entry in running)
    of_it = [entry for entry in running if entry.qos.rank == lowest]
    assert chosen in ([entry for entry in of_it if not entry.protected] or of_it)


def test_preemption_ends():
    """Taking victims one after the other, the whole order: batch, standard, then interactive, the
    protected after the others of their class."""
    classes = (QosClass.INTERACTIVE, QosClass.STANDARD, QosClass.BATCH)
    tenants = Tenants([of_class(id, qos) for id, qos in enumerate(classes)], clock=ManualClock())
    running = [
        RunningRequest(order, order % 3, classes[order % 3], order, 1, order < 3)
        for order in range(9)
    ]
    for entry in running:
        tenants.occupy(entry.tenant, slots=1, pages=entry.pages)
    taken = []
    while (chosen := choose_victim(running, tenants, None)) is not None:
        running.remove(chosen)
        tenants.occupy(chosen.tenant, slots=-1, pages=-chosen.pages)
        taken.append(chosen.order)
    assert taken == [8, 5, 2, 7, 4, 1, 6, 3, 0]
