"""Who finds what on disk: tenants after a restart, processes at once, other tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

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
from tests.conftest import SyntheticModel
from tests.engine.disk_engines import CONTEXT, PROMPT, WHOLE, Life, life, request
from tests.families_table import DENSE

ANN = replace(LOCAL_TENANT, id=1, name="ann")
BOB = replace(LOCAL_TENANT, id=2, name="bob")
TEAM = [replace(tenant, isolation_group=7) for tenant in (ANN, BOB)]


@pytest.fixture
def model(synthetic_model: SyntheticModel) -> Path:
    return synthetic_model(**dict(DENSE["qwen3"]) | {"quant": "q8_0"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def found(model: Path, folder: Path, tenants: Sequence[Tenant], tenant: int) -> int:
    """How many tokens of the prompt a tenant finds on disk after a restart."""
    with life(model, folder, tenants=tenants) as again:
        again.ask(tenant=tenant)
        return again.from_disk


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / SUBFOLDER).glob("*/*.page")}


def test_a_tenant_finds_its_own_pages_only(model: Path, folder: Path) -> None:
    """Another tenant's have other names, in another folder: they are not even looked for."""
    with life(model, folder, tenants=[ANN, BOB]) as first:
        expected = first.ask(tenant=1)
    anns = names(folder)
    with life(model, folder, tenants=[ANN, BOB]) as second:
        assert second.ask(tenant=2) == expected
        assert second.from_disk == 0
        assert second.counts.read == 0
        assert second.ask(tenant=1) == expected
        assert second.from_disk == WHOLE
    bobs = names(folder) - anns
    assert len(bobs) == len(anns)
    assert len(list((folder / SUBFOLDER).glob("*/"))) == 2
    assert found(model, folder, [ANN, BOB], 2) == WHOLE


def test_without_scopes_in_names_tenants_would_share(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    monkeypatch.setattr(names_module, "_text", lambda value: b"all the same")
    with life(model, folder, tenants=[ANN, BOB]) as first:
        first.ask(tenant=1)
    assert found(model, folder, [ANN, BOB], 2) == WHOLE


def test_a_group_shares_its_pages_and_no_others(model: Path, folder: Path) -> None:
    with life(model, folder, tenants=TEAM) as first:
        first.ask(tenant=1)
    assert found(model, folder, TEAM, 2) == WHOLE
    assert found(model, folder, [ANN, BOB], 1) == 0, "who left the group has none of its pages"


def test_others_with_the_same_number_find_nothing(model: Path, folder: Path) -> None:
    """The file of tenants was changed while no server ran: another tenant has the id, or the group
    has a member more, so perhaps it is another group."""
    carl = replace(TEAM[0], id=3, name="carl")
    with life(model, folder, tenants=[ANN, TEAM[1]]) as first:
        first.ask(tenant=1)
        first.ask(tenant=2)
    assert found(model, folder, [replace(ANN, name="another")], 1) == 0
    for team in ([carl], TEAM, [TEAM[1], carl], [replace(TEAM[1], name="another")]):
        assert found(model, folder, team, team[-1].id) == 0
    assert found(model, folder, [ANN], 1) == WHOLE
    assert found(model, folder, [TEAM[1]], 2) == WHOLE


Change = Callable[[Tenants], None]
ENDS: dict[str, tuple[list[Tenant], Change]] = {
    "the last one leaves": (TEAM, lambda registry: (registry.put(ANN), registry.put(BOB))[0]),
    "all leave at once": (TEAM, lambda registry: registry.put(ANN, BOB)),
    "a tenant is removed": ([ANN], lambda registry: registry.remove(1)),
    "a tenant joins a group": ([ANN], lambda registry: registry.put(TEAM[0])),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("restarted", [False, True])
def test_a_scope_that_ends_while_no_model_is_loaded_leaves_nothing(
    model: Path, folder: Path, end: str, restarted: bool
) -> None:
    """Also for those whom it had before."""
    tenants, change = ENDS[end]
    registry = Tenants([*tenants, replace(BOB, id=9)], clock=no_clock, forget=forgetting(folder))
    with life(model, folder, tenants=registry) as first:
        first.ask(tenant=1)
        first.ask(tenant=9)
    change(registry)
    registry.put(*tenants)
    with life(model, folder, tenants=list(registry) if restarted else registry) as second:
        second.ask(tenant=1)
        assert second.from_disk == 0
        second.ask(tenant=9)
        assert second.from_disk == WHOLE


def test_a_scope_that_nobody_forgets_is_found(model: Path, folder: Path) -> None:
    """The negative control."""
    registry = Tenants([ANN], clock=no_clock)
    with life(model, folder, tenants=registry) as first:
        first.ask(tenant=1)
    registry.remove(1)
    assert found(model, folder, [ANN], 1) == WHOLE


def test_of_a_removed_tenant_nothing_is_left(model: Path, folder: Path) -> None:
    """Also not for one of the same name and id."""
    with life(model, folder, tenants=[ANN, BOB]) as first:
        assert first.engine.disk is not None
        first.ask(tenant=2)
        first.engine.disk.flush()
        bobs = names(folder)
        first.ask(tenant=1)
        first.engine.remove_tenant(1)
        first.engine.put_tenant(ANN)
        expected = first.ask(tenant=1)
        assert first.from_disk == first.loads.reused[first.asked] == 0
        first.engine.disk.flush()
        first.engine.remove_tenant(1)
        first.engine.disk.flush()
        assert names(folder) == bobs
    with life(model, folder, tenants=[ANN, BOB]) as second:
        assert second.ask(tenant=1) == expected
        assert second.from_disk == 0
        second.ask(tenant=2)
        assert second.from_disk == WHOLE


def test_one_who_moves_while_its_pages_are_read_gets_none_of_the_old_group(
    model: Path, folder: Path
) -> None:
    with life(model, folder, tenants=TEAM) as first:
        first.ask(tenant=1)
    with life(model, folder, tenants=TEAM) as second:
        move = Moves(second, ANN)
        second.engine._slot_manager.disk.is_reading = move  # type: ignore[union-attr,method-assign]
        second.ask(tenant=1)
        assert move.moved
        assert second.from_disk == second.loads.reused[1] == 0
        second.engine.memory.check([])
    with life(model, folder, tenants=[ANN, BOB]) as third:
        third.ask(tenant=1)
        assert third.from_disk == WHOLE, "it was computed and written in the new scope"


def test_one_whose_scope_ends_while_its_pages_are_read_gets_none_of_them(
    model: Path, folder: Path
) -> None:
    """Also where it comes back into one like it."""
    with life(model, folder, tenants=[ANN]) as first:
        first.ask(tenant=1)
    with life(model, folder, tenants=[ANN]) as second:
        move = Moves(second, TEAM[0], ANN)
        second.engine._slot_manager.disk.is_reading = move  # type: ignore[union-attr,method-assign]
        second.ask(tenant=1)
        assert move.moved
        assert second.from_disk == second.loads.reused[1] == 0


class Moves:
    """Changes the tenant once its pages were read, before it is admitted."""

    def __init__(self, server: Life, *changes: Tenant) -> None:
        self._changes = changes
        self._engine = server.engine
        self._reads = server.engine._slot_manager.disk.is_reading  # type: ignore[union-attr]
        self.moved = False

    def __call__(self, *parts: object) -> bool:
        waits = self._reads(*parts)  # type: ignore[arg-type]
        if not waits and not self.moved:
            self.moved = True
            for tenant in self._changes:
                self._engine._changes.put(tenant)
        return waits


def test_two_servers_use_one_folder_at_once(model: Path, folder: Path) -> None:
    with life(model, folder) as one, life(model, folder) as two:
        expected = one.ask()
        assert one.engine.disk is not None
        one.engine.disk.flush()
        assert two.ask() == expected
        assert two.from_disk == WHOLE
        other = two.ask(PROMPT[3:])
        assert one.ask(PROMPT[3:]) == other
    assert not [*one.lines, *two.lines]


def test_pages_of_one_tier_are_pages_of_every_tier(model: Path, folder: Path) -> None:
    """They are stored as the definition has them."""
    with life(model, folder, tier="cpu") as first:
        expected = first.ask()
    for tier in ("native", "opencl", "vulkan"):
        with life(model, folder, tier=tier) as second:
            assert second.ask() == expected
            assert second.from_disk == WHOLE


def test_a_small_folder_stays_small_and_answers_stay_right(model: Path, folder: Path) -> None:
    with life(model, None) as cold:
        expected = [cold.ask(PROMPT[turn:]) for turn in range(4)]
        page = cold.engine.runner.page_copies()
        assert page is not None
        most = 10 * (page.page_bytes + 200)
    for _ in range(2):
        with life(model, folder, max_bytes=most) as small:
            assert small.engine.disk is not None
            for turn in range(4):
                assert small.ask(PROMPT[turn:]) == expected[turn]
                # A writer with much to do does not note what was used.
                small.engine.disk.flush()
            sizes = [path.stat().st_size for path in (folder / SUBFOLDER).glob("*/*.page")]
            assert 0 < sum(sizes) <= most
            assert small.counts.used_bytes == sum(sizes)
    with life(model, folder, max_bytes=most) as small:
        assert small.ask(PROMPT[3:]) == expected[3]
        assert small.from_disk, "what was used last is there, from its first page on"


def test_a_preempted_or_cancelled_request_loses_what_was_read_for_it(
    model: Path, folder: Path
) -> None:
    with life(model, folder) as first:
        expected = first.ask()
    with life(model, folder) as second:
        second.engine.submit(request(7))
        second.engine.step()
        second.engine.cancel(7)
        second.engine.memory.check([])
        assert second.ask() == expected
        assert second.from_disk == WHOLE


def test_pages_depend_on_the_context_only_where_frequencies_do(
    synthetic_model: SyntheticModel, tmp_path: Path
) -> None:
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
