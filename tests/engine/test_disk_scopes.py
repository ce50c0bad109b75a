"""Who finds what on disk: tenants after a restart, processes at once, other tiers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contract.types import LOCAL_TENANT, Tenant
from harness.file_digests import file_digests
from harness.host.disk import forgetting, function_name
from reference.engine.engine import no_clock
from reference.limits import Limits
from reference.memory.disk import names as names_module
from reference.memory.disk.folder import SUBFOLDER
from reference.model.open import open_model
from reference.sched.tenants import Tenants
from tests.engine.disk_engines import CONTEXT, PROMPT, WHOLE, life
from tests.families_table import DENSE

ANN = replace(LOCAL_TENANT, id=1, name="ann")
BOB = replace(LOCAL_TENANT, id=2, name="bob")
TEAM = [replace(tenant, isolation_group=7) for tenant in (ANN, BOB)]


def found(dense: Path, folder: Path, tenants: Sequence[Tenant], tenant: int) -> int:
    """How many tokens of the prompt a tenant finds on disk after a restart."""
    with life(dense, folder, tenants=tenants) as again:
        again.ask(tenant=tenant)
        return again.from_disk


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / SUBFOLDER).glob("*/*.page")}


def test_a_tenant_finds_its_own_pages_only(dense, folder):
    """Another tenant's have other names, in another folder: they are not even looked for."""
    with life(dense, folder, tenants=[ANN, BOB]) as first:
        expected = first.ask(tenant=1)
    anns = names(folder)
    with life(dense, folder, tenants=[ANN, BOB]) as second:
        assert second.ask(tenant=2) == expected
        assert second.from_disk == 0
        assert second.counts.read == 0
        assert second.ask(tenant=1) == expected
        assert second.from_disk == WHOLE
    bobs = names(folder) - anns
    assert len(bobs) == len(anns)
    assert len(list((folder / SUBFOLDER).glob("*/"))) == 2
    assert found(dense, folder, [ANN, BOB], 2) == WHOLE


def test_without_scopes_in_names_tenants_would_share(dense, folder, monkeypatch):
    """The negative control."""
    monkeypatch.setattr(names_module, "_text", lambda value: b"all the same")
    with life(dense, folder, tenants=[ANN, BOB]) as first:
        first.ask(tenant=1)
    assert found(dense, folder, [ANN, BOB], 2) == WHOLE


def test_a_group_shares_its_pages_and_no_others(dense, folder):
    with life(dense, folder, tenants=TEAM) as first:
        first.ask(tenant=1)
    assert found(dense, folder, TEAM, 2) == WHOLE
    assert found(dense, folder, [ANN, BOB], 1) == 0, "who left the group has none of its pages"


def test_others_with_the_same_number_find_nothing(dense, folder):
    """The file of tenants was changed while no server ran: another tenant has the id, or the group
    has a member more, so perhaps it is another group."""
    carl = replace(TEAM[0], id=3, name="carl")
    with life(dense, folder, tenants=[ANN, TEAM[1]]) as first:
        first.ask(tenant=1)
        first.ask(tenant=2)
    assert found(dense, folder, [replace(ANN, name="another")], 1) == 0
    for team in ([carl], TEAM, [TEAM[1], carl], [replace(TEAM[1], name="another")]):
        assert found(dense, folder, team, team[-1].id) == 0
    assert found(dense, folder, [ANN], 1) == WHOLE
    assert found(dense, folder, [TEAM[1]], 2) == WHOLE


Change = Callable[[Tenants], None]
ENDS: dict[str, tuple[list[Tenant], Change]] = {
    "the last one leaves": (TEAM, lambda registry: (registry.put(ANN), registry.put(BOB))[0]),
    "all leave at once": (TEAM, lambda registry: registry.put(ANN, BOB)),
    "a tenant is removed": ([ANN], lambda registry: registry.remove(1)),
    "a tenant joins a group": ([ANN], lambda registry: registry.put(TEAM[0])),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("restarted", [False, True])
def test_a_scope_that_ends_while_no_model_is_loaded_leaves_nothing(dense, folder, end, restarted):
    """Also for those whom it had before."""
    tenants, change = ENDS[end]
    registry = Tenants([*tenants, replace(BOB, id=9)], clock=no_clock, forget=forgetting(folder))
    with life(dense, folder, tenants=registry) as first:
        first.ask(tenant=1)
        first.ask(tenant=9)
    change(registry)
    registry.put(*tenants)
    with life(dense, folder, tenants=list(registry) if restarted else registry) as second:
        second.ask(tenant=1)
        assert second.from_disk == 0
        second.ask(tenant=9)
        assert second.from_disk == WHOLE


def test_a_scope_that_nobody_forgets_is_found(dense, folder):
    """The negative control."""
    registry = Tenants([ANN], clock=no_clock)
    with life(dense, folder, tenants=registry) as first:
        first.ask(tenant=1)
    registry.remove(1)
    assert found(dense, folder, [ANN], 1) == WHOLE


def test_of_a_removed_tenant_nothing_is_left(dense, folder):
    """Also not for one of the same name and id."""
    with life(dense, folder, tenants=[ANN, BOB]) as first:
        first.ask(tenant=2)
        first.flush()
        bobs = names(folder)
        first.ask(tenant=1)
        first.engine.remove_tenant(1)
        first.engine.put_tenant(ANN)
        expected = first.ask(tenant=1)
        assert first.from_disk == first.loads.reused[first.asked] == 0
        first.flush()
        first.engine.remove_tenant(1)
        first.flush()
        assert names(folder) == bobs
    with life(dense, folder, tenants=[ANN, BOB]) as second:
        assert second.ask(tenant=1) == expected
        assert second.from_disk == 0
        second.ask(tenant=2)
        assert second.from_disk == WHOLE


@pytest.mark.parametrize(
    ("tenants", "changes"), [(TEAM, [ANN]), ([ANN], [TEAM[0], ANN])], ids=["leaves", "comes back"]
)
def test_whose_scope_ends_while_its_pages_are_read_gets_none_of_them(
    dense, folder, tenants, changes
):
    """Once they were read, before it is admitted; also where it comes back into one like it."""
    with life(dense, folder, tenants=tenants) as first:
        first.ask(tenant=1)
    with life(dense, folder, tenants=tenants) as second:
        disk = second.engine._slot_manager.disk
        assert disk is not None
        reads, left = disk.is_reading, [*changes]

        def move(*parts: Any) -> bool:
            waits = reads(*parts)
            while left and not waits:
                second.engine._changes.put(left.pop(0))
            return waits

        disk.is_reading = move  # type: ignore[method-assign]
        second.ask(tenant=1)
        assert not left
        assert second.from_disk == second.loads.reused[1] == 0
        second.engine.memory.check([])


def test_two_servers_use_one_folder_at_once(dense, folder):
    with life(dense, folder) as one, life(dense, folder) as two:
        expected = one.ask()
        one.flush()
        assert two.ask() == expected
        assert two.from_disk == WHOLE
        other = two.ask(PROMPT[3:])
        assert one.ask(PROMPT[3:]) == other
    assert not [*one.lines, *two.lines]


def test_pages_of_one_tier_are_pages_of_every_tier(dense, folder):
    """They are stored as the definition has them."""
    with life(dense, folder, tier="cpu") as first:
        expected = first.ask()
    for tier in ("native", "opencl", "vulkan"):
        with life(dense, folder, tier=tier) as second:
            assert second.ask() == expected
            assert second.from_disk == WHOLE


def test_a_small_folder_stays_small_and_answers_stay_right(dense, folder):
    with life(dense, None) as cold:
        expected = [cold.ask(PROMPT[turn:]) for turn in range(4)]
        page = cold.engine.runner.page_copies()
        assert page is not None
        most = 10 * (page.page_bytes + 200)
    for _ in range(2):
        with life(dense, folder, max_bytes=most) as small:
            for turn in range(4):
                assert small.ask(PROMPT[turn:]) == expected[turn]
                # A writer with much to do does not note what was used.
                small.flush()
            sizes = [path.stat().st_size for path in (folder / SUBFOLDER).glob("*/*.page")]
            assert 0 < sum(sizes) <= most
            assert small.counts.used_bytes == sum(sizes)
    with life(dense, folder, max_bytes=most) as small:
        assert small.ask(PROMPT[3:]) == expected[3]
        assert small.from_disk, "what was used last is there, from its first page on"


def test_pages_depend_on_the_context_only_where_frequencies_do(synthetic_model, tmp_path):
    """A long context has another table of frequencies in models with two of them."""

    def name(kind: str, context: int, slots: int = 1) -> str:
        model = open_model(synthetic_model(**DENSE[kind]))
        limits = Limits(slots, context, slots * context // 16, step_tokens=24, step_rows=8)
        with model.file:
            return function_name(model, limits, file_digests(model, tmp_path / "digests.json"))

    assert name("qwen3", CONTEXT) == name("qwen3", 2 * CONTEXT, slots=3)
    model = open_model(synthetic_model(**DENSE["phi3-long-rope"]))
    with model.file:
        original = model.config.ropes[0].scaling.original_context
    assert name("phi3-long-rope", 16) == name("phi3-long-rope", original)
    assert name("phi3-long-rope", 16) != name("phi3-long-rope", 2 * original)
