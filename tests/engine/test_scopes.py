"""What was computed for somebody is found by nobody else: scopes end with whom they belong to."""

from dataclasses import replace

import pytest

from contract.errors import ConfigError, RequestError
from contract.types import FinishReason, Request, Tenant
from reference.engine import Engine
from tests.engine.adversaries import engine_of

pytestmark = pytest.mark.usefixtures("finite_logits")

DOCUMENT = tuple(range(100, 140))
ONE, TWO, THREE = (Tenant(id, f"t{id}") for id in (1, 2, 3))


def grouped(tenant: Tenant, group: int | None = 7) -> Tenant:
    return replace(tenant, isolation_group=group)


def hit(engine: Engine, number: int, tenant: int) -> int:
    """How many tokens of the document a request finds that reads it."""
    before = engine.statistics.prefix.tokens_hit
    engine.submit(Request(number, (*DOCUMENT, number), 2, tenant=tenant, ignore_end=True))
    list(engine.run())
    return engine.statistics.prefix.tokens_hit - before


def test_the_owner_of_an_id_after_one_that_joined_a_group_finds_nothing():
    engine, _ = engine_of(ONE, TWO)
    assert hit(engine, 1, 1) == 0
    engine.put_tenant(grouped(ONE))
    engine.remove_tenant(1)
    assert engine.memory.cached == 0
    engine.put_tenant(Tenant(1, "new"))
    assert hit(engine, 2, 1) == 0


@pytest.mark.parametrize("group", [None, 7])
def test_the_owner_of_an_id_whose_requests_still_run_finds_nothing(group):
    """They end with an error: the id is another's now."""
    engine, _ = engine_of(ONE, TWO)
    assert hit(engine, 1, 1) == 0
    engine.put_tenant(grouped(ONE, group))
    engine.submit(Request(2, (*DOCUMENT, 2), 60, tenant=1, ignore_end=True))
    for _ in range(4):
        engine.step()
    engine.remove_tenant(1)
    with pytest.raises(RequestError, match="removed"):
        engine.submit(Request(3, DOCUMENT, 2, tenant=1))
    engine.put_tenant(Tenant(1, "new"))
    assert engine.usage.of(1).tokens_prompted == 0
    assert engine.tenants.usage(1) == (0, 0, 0, 0.0, 0.0)
    assert not engine.idle
    ((event),) = engine.step()
    assert (event.request_id, event.finish_reason) == (2, FinishReason.ERROR)
    assert engine.idle
    assert engine.usage.of(1).requests_finished == {}
    assert hit(engine, 4, 1) == 0


def test_who_leaves_a_group_leaves_what_it_found_and_adds_nothing():
    engine, _ = engine_of(grouped(ONE), grouped(TWO))
    engine.submit(Request(1, (*DOCUMENT, 1), 60, tenant=1, ignore_end=True))
    tokens = [event.token for _ in range(2) for event in engine.step()]
    engine.put_tenant(ONE)
    tokens += [event.token for event in engine.run()]
    assert len(tokens) == 60
    other = (*DOCUMENT, 1, *tokens)
    engine.submit(Request(2, other, 1, tenant=2))
    before = engine.statistics.prefix.tokens_hit
    list(engine.run())
    # Of what was published while it belonged to the group.
    assert engine.statistics.prefix.tokens_hit - before <= len(DOCUMENT)
    assert engine.statistics.prefix.tokens_hit - before <= 32
    assert hit(engine, 3, 1) == 32


def test_a_group_ends_with_its_last_member():
    engine, _ = engine_of(grouped(ONE), grouped(TWO), THREE)
    assert (hit(engine, 1, 1), hit(engine, 2, 2)) == (0, 32)
    engine.put_tenant(ONE)
    assert engine.memory.cached > 0
    engine.remove_tenant(2)
    engine.put_tenant(grouped(THREE))
    assert hit(engine, 3, 3) == 0


def test_who_moves_between_groups_takes_nothing_along():
    engine, _ = engine_of(grouped(ONE), grouped(TWO, 8))
    engine.submit(Request(1, (*DOCUMENT, 1), 30, tenant=1, ignore_end=True))
    for _ in range(3):
        engine.step()
    engine.put_tenant(grouped(ONE, 8))
    list(engine.run())
    # It was computed anew, for those with whom it is now.
    assert hit(engine, 2, 2) == 32
    engine.put_tenant(grouped(TWO, 7))
    assert hit(engine, 3, 2) == 0
    engine.memory.check([])


def test_a_tenant_that_is_gone_leaves_nothing_behind():
    engine, _ = engine_of(replace(ONE, reserved_pages=9), TWO)
    assert hit(engine, 1, 1) == 0
    engine.submit(Request(2, (*DOCUMENT, 2), 5, tenant=1))
    engine.remove_tenant(1)
    list(engine.run())
    assert 1 not in engine.tenants
    assert 1 not in engine.usage.tenants
    assert engine.memory.free == 30
    assert engine.memory.available(2) == 30


def test_a_set_of_tenants_takes_effect_whole():
    """Two that exchange what they have reserved; more than there is; one that is not valid."""
    alice, bob = replace(ONE, reserved_pages=2), replace(TWO, reserved_pages=25)
    engine, _ = engine_of(alice, bob, THREE)
    swapped = [replace(alice, reserved_pages=25), replace(bob, reserved_pages=2)]
    engine.replace_tenants(swapped)
    assert engine.memory.available(1) == 28
    assert engine.memory.available(2) == 5
    assert 3 not in engine.tenants
    now = tuple(engine.tenants)
    for wrong, error in (
        ([replace(alice, reserved_pages=2), replace(bob, reserved_pages=29)], ValueError),
        ([alice, replace(bob, weight=-1.0)], ConfigError),
        ([alice, replace(bob, id=1)], ConfigError),
    ):
        with pytest.raises(error):
            engine.replace_tenants(wrong)
        assert tuple(engine.tenants) == now
        assert engine.memory.available(1) == 28
    with pytest.raises(ValueError, match="reserved"):
        engine.put_tenant(replace(ONE, reserved_pages=30, max_slots=1))
    assert engine.tenants[1].max_slots != 1


@pytest.mark.parametrize("order", [1, -1])
def test_tenants_that_swap_groups_take_nothing_over(order):
    """Of neither group somebody is left, though there are such groups before and after."""
    engine, _ = engine_of(grouped(ONE), grouped(TWO, 8), THREE)
    assert (hit(engine, 1, 1), hit(engine, 2, 2)) == (0, 0)
    engine.replace_tenants([grouped(ONE, 8), grouped(TWO), grouped(THREE)][::order])
    assert (hit(engine, 3, 1), hit(engine, 4, 3)) == (0, 0)
    assert hit(engine, 5, 2) == 32, "who joined with it shares with it"
