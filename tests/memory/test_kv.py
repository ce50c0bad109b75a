"""KvMemory in any order of events: nobody's pages change under it, nothing is lost, nothing leaks.

Pages have contents here: whose scope and which tokens. So a page given away too early, brought back
wrongly or found by the wrong tenant shows in what a sequence reads."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from reference.limits import pages_for
from reference.memory.kv import KvMemory
from reference.memory.prefix import Node, PrefixHit, PublishedPrefix, scope_of
from tests.memory.contents import PAGE, TENANTS, Content, Contents, sequence_of

PAGES = 10


@dataclass(eq=False)
class Running:
    tenant: int
    slot: int
    tokens: NDArray[np.int32]
    pages: list[int]
    computed: int
    end: PublishedPrefix | None = None

    @property
    def scope(self) -> Hashable:
        return scope_of(TENANTS[self.tenant])

    def content(self, page: int) -> Content:
        """What the sequence's page must hold: its scope and all tokens up to there."""
        return self.scope, self.tokens[: min(self.computed, (page + 1) * PAGE)].tobytes()


SEQUENCES = st.builds(
    sequence_of,
    st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=4),
    st.sampled_from([0, 0, 1, 15]),
)


class MemoryMachine(RuleBasedStateMachine):
    """Sequences come, compute, publish and go; every page they hold has what they wrote."""

    memory_type: type[KvMemory] = KvMemory

    @initialize(
        host_pages=st.sampled_from([0, 0, 1, 3, 20]), states=st.sampled_from([None, None, 0, 2]),
        cached_pages=st.sampled_from([None, None, 0, 3]), copies=st.booleans(),
    )  # fmt: skip
    def build(
        self, host_pages: int, states: int | None, cached_pages: int | None, copies: bool
    ) -> None:
        self.contents = Contents()
        self.memory = self.memory_type(
            PAGES, states=states, cached_pages=cached_pages,
            copies=self.contents if copies or host_pages else None, host_pages=host_pages,
        )  # fmt: skip
        self.states = states
        self.running: list[Running] = []
        self.published: set[Content] = set()
        self.places: dict[int, Content] = {}
        self.reserved: dict[int, int] = {}
        self.slots = 0

    @rule(
        tenant=st.sampled_from(sorted(TENANTS)),
        tokens=SEQUENCES,
        short=st.sampled_from([1, 1, 8, 9, 20]),
    )
    def admit(self, tenant: int, tokens: NDArray[np.int32], short: int) -> None:
        """One begins, and may use all but its last tokens."""
        self._admit(tenant, tokens, short)

    def _admit(
        self, tenant: int, tokens: NDArray[np.int32], short: int, needed: int = 0
    ) -> Running | None:
        """A hit has the sequence's own tokens, and is what was promised while there is room."""
        scope = scope_of(TENANTS[tenant])
        most = max(0, len(tokens) - short)
        before = self.memory.statistics, self.memory.free, self.memory.cached
        promised = self.memory.match(scope, tokens, most)
        assert before == (self.memory.statistics, self.memory.free, self.memory.cached)
        available = self.memory.available(tenant)
        hit = self.memory.adopt(scope, tokens, most, tenant, self.slots, needed)
        if hit is None:
            assert before == (self.memory.statistics, self.memory.free, self.memory.cached)
            assert needed > available
            return None
        run = Running(tenant, self.slots, tokens, list(hit.pages), hit.tokens)
        self.slots += 1
        self.running.append(run)
        assert hit.tokens <= promised <= most
        if available >= pages_for(promised) + 1:
            assert hit.tokens == promised
        for number in range(hit.tokens // PAGE):
            assert run.content(number) in self.published
        assert len(hit.pages) == pages_for(hit.tokens)
        if hit.tokens % PAGE:
            scope, known = run.content(len(hit.pages) - 1)
            copied = self.contents.pages[hit.pages[-1]]
            assert copied[0] == scope
            assert copied[1].startswith(known)
            # The rest of the copy is of no use and will be overwritten.
            self.contents.pages[hit.pages[-1]] = scope, known
        self._check_state(run, hit)
        return run

    @rule(tenant=st.sampled_from(sorted(TENANTS)), tokens=SEQUENCES, stays=st.booleans())
    def serve(self, tenant: int, tokens: NDArray[np.int32], stays: bool) -> None:
        """All of a sequence's life, where it fits; else as much as there is room for."""
        fitting = self._admit(tenant, tokens, 1, pages_for(len(tokens)))
        run = fitting or self._admit(tenant, tokens, 1)
        assert run is not None
        computed = self._compute(run, len(tokens))
        assert computed == (fitting is not None)
        if computed:
            self._publish(run, incremental=True)
            if self.states:
                self._save_state(run)
        if not stays:
            self._leave(run)

    def _check_state(self, run: Running, hit: PrefixHit) -> None:
        if self.states is None:
            assert hit.state is None
        elif hit.tokens:
            assert hit.state is not None
            assert self.places[hit.state] == run.content(len(hit.pages) - 1)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), extra=st.integers(1, 40))
    def grow(self, data: st.DataObject, extra: int) -> None:
        """Some tokens more."""
        run = data.draw(st.sampled_from(self.running))
        self._compute(run, min(len(run.tokens), run.computed + extra))

    def _compute(self, run: Running, computed: int) -> bool:
        """Pages are given exactly when they are available, and are nobody else's."""
        needed = pages_for(computed) - len(run.pages)
        available = self.memory.available(run.tenant)
        pages = self.memory.take(needed, run.tenant, run.slot)
        assert (pages is None) == (needed > available)
        if pages is None:
            return False
        assert len(pages) == needed
        run.pages += pages
        first = run.computed // PAGE
        run.computed = computed
        for number in range(first, len(run.pages)):
            assert self.memory.meta["ref_count"][run.pages[number]] == 1, "a shared page is written"
            self.contents.pages[run.pages[number]] = run.content(number)
        return True

    @precondition(lambda self: self.running)
    @rule(data=st.data(), incremental=st.booleans())
    def publish(self, data: st.DataObject, incremental: bool) -> None:
        """What was computed by now."""
        self._publish(data.draw(st.sampled_from(self.running)), incremental)

    def _publish(self, run: Running, incremental: bool) -> None:
        """Afterwards the whole pages are found, and publishing again changes nothing."""
        known = run.tokens[: run.computed]
        run.end = self.memory.publish(run.scope, known, run.pages, run.end if incremental else None)
        whole = run.computed // PAGE * PAGE
        self.published |= {run.content(number) for number in range(run.computed // PAGE)}
        if self.states is None:
            assert self.memory.match(run.scope, known, whole) == whole
        # From the beginning, it may take the place of pages that nobody holds any more.
        run.end = self.memory.publish(run.scope, known, run.pages)
        before = self.memory.free, self.memory.cached
        run.end = self.memory.publish(run.scope, known, run.pages, run.end)
        self.memory.publish(run.scope, known, run.pages)
        assert before == (self.memory.free, self.memory.cached)

    @precondition(lambda self: self.states is not None and self.running)
    @rule(data=st.data())
    def save_state(self, data: st.DataObject) -> None:
        """A state of a sequence, or a change of mind."""
        run = data.draw(st.sampled_from(self.running))
        if data.draw(st.booleans()):
            self._save_state(run)
        elif (place := self.memory.save_state_slot()) is not None:
            self.memory.drop_state_slot(place)

    def _save_state(self, run: Running) -> None:
        """A state is kept for whole pages, those the place belonged to before are without."""
        place = self.memory.save_state_slot()
        assert (place is None) == (self.states == 0)
        if place is None:
            return
        whole = run.computed // PAGE
        if not whole:
            self.memory.drop_state_slot(place)
            return
        self.places[place] = run.content(whole - 1)
        self.memory.attach_state(run.scope, run.tokens[: whole * PAGE], place)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """Some go, and what that makes available was known before."""
        some = st.lists(st.sampled_from(self.running), min_size=1, max_size=3, unique_by=id)
        leaving = data.draw(some)
        left = [(run.tenant, run.pages) for run in leaving]
        expected = [self.memory.available(tenant, left) for tenant in TENANTS]
        for run in leaving:
            self._leave(run)
        assert [self.memory.available(tenant) for tenant in TENANTS] == expected

    def _leave(self, run: Running) -> None:
        self.running.remove(run)
        self.memory.release(run.pages, run.tenant)

    @rule(tenant=st.sampled_from(sorted(TENANTS)), pages=st.integers(0, 5))
    def reserve(self, tenant: int, pages: int) -> None:
        others = sum(count for other, count in self.reserved.items() if other != tenant)
        if others + pages > PAGES:
            with pytest.raises(ValueError, match="reserved"):
                self.memory.reservations.set_all(self.reserved | {tenant: pages})
        else:
            self.memory.reservations.set_all(self.reserved | {tenant: pages})
            self.reserved[tenant] = pages

    @rule()
    def fault(self) -> None:
        """Everything is forgotten."""
        self.memory.clear()
        self.running.clear()
        self.published.clear()
        assert (self.memory.free, self.memory.cached, len(self.memory._cached.in_host)) == (
            PAGES,
            0,
            0,
        )

    @invariant()
    def every_sequence_reads_what_it_wrote(self) -> None:
        for run in self.running:
            for number, page in enumerate(run.pages):
                assert self.contents.pages[page] == run.content(number)

    @invariant()
    def the_books_agree(self) -> None:
        self.memory.check(
            [(run.tenant, run.pages) for run in self.running],
            lambda tenant: scope_of(TENANTS[tenant]),
        )
        held = {page for run in self.running for page in run.pages}
        assert sum(self.memory.held(tenant) for tenant in TENANTS) == len(held)
        for tenant in TENANTS:
            unused = sum(
                max(0, pages - self.memory.held(other))
                for other, pages in self.reserved.items()
                if other != tenant
            )
            assert self.memory.available(tenant) == max(0, PAGES - len(held) - unused)


MemoryMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestMemory = MemoryMachine.TestCase


class Leaking(KvMemory):
    """Forgets the last page of whoever leaves."""

    def release(self, pages: Sequence[int], tenant: int) -> None:
        super().release(pages[:-1], tenant)


class OneScope(KvMemory):
    """Everybody finds everything."""

    def adopt(self, scope: Hashable, *rest: Any) -> PrefixHit:
        return super().adopt("all", *rest)

    def publish(self, scope: Hashable, *rest: Any) -> PublishedPrefix | None:
        return super().publish("all", *rest)

    def match(self, scope: Hashable, *rest: Any) -> int:
        return super().match("all", *rest)


class EvictingHeld(KvMemory):
    """Gives a page away that somebody holds."""

    def release(self, pages: Sequence[int], tenant: int) -> None:
        super().release(pages, tenant)
        held = [page for page in range(self.total) if self._pool.references(page) > 1]
        for page in held[:1]:
            self._pool._free.append(page)


class ForgettingToProtect(KvMemory):
    """Leaves pages that are found where eviction finds them."""

    def adopt(self, *rest: Any) -> PrefixHit:
        kept = dict(self._cached.on_device)
        hit = super().adopt(*rest)
        for node in kept:
            self._cached.on_device.setdefault(node)
        return hit


class SharingWritten(KvMemory):
    """Hands out the page itself where a copy is needed."""

    def _copy_for_slot(self, node: Node, tenant: int, slot: int) -> int | None:
        if node.page is None:
            return None
        self._pool.hold([node.page], slot, tenant)
        self._cached.remove(node)
        return node.page


BROKEN = [Leaking, OneScope, EvictingHeld, ForgettingToProtect, SharingWritten]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda kind: kind.__name__)
def test_a_broken_memory_is_found_out(broken):
    """The negative control of the machine: each of these mistakes fails it."""

    class Broken(MemoryMachine):
        memory_type = broken

    with pytest.raises((AssertionError, KeyError, ExceptionGroup)):
        run_state_machine_as_test(
            Broken,
            settings=settings(
                max_examples=300, stateful_step_count=30, deadline=None, derandomize=True,
                database=None, report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
                phases=settings.default.phases[:3],
            ),
        )  # fmt: skip
