"""KvMemory in any order of events: nobody's pages change under it, nothing is lost, nothing leaks.

Pages have contents here: whose scope and which tokens. So a page given away too early, brought back
wrongly or found by the wrong tenant shows in what a sequence reads.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
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

from contract.types import Tenant
from reference.limits import pages_for
from reference.memory.kv import KvMemory
from reference.memory.prefix import Node, PathEnd, PrefixHit, scope_of

PAGE = 16
PAGES = 10
TENANTS = {
    tenant.id: tenant
    for tenant in (
        Tenant(1, "alone"),
        Tenant(2, "also alone"),
        Tenant(3, "in a team", isolation_group=1),
        Tenant(4, "of the team", isolation_group=1),
    )
}
Content = tuple[Hashable, bytes]


class Contents:
    """What is in each page, and the copies a device would make."""

    def __init__(self) -> None:
        self.pages: dict[int, Content] = {}

    def copy(self, source: int, target: int) -> None:
        self.pages[target] = self.pages[source]

    def save(self, page: int) -> Content:
        return self.pages[page]

    def load(self, saved: Content, page: int) -> None:
        self.pages[page] = saved


@dataclass(eq=False)
class Running:
    tenant: int
    slot: int
    tokens: NDArray[np.int32]
    pages: list[int]
    computed: int
    end: PathEnd | None = None

    @property
    def scope(self) -> Hashable:
        return scope_of(TENANTS[self.tenant])

    def content(self, page: int) -> Content:
        """What the sequence's page must hold: its scope and all tokens up to there."""
        return self.scope, self.tokens[: min(self.computed, (page + 1) * PAGE)].tobytes()


def sequence_of(kinds: Iterable[int], rest: int) -> NDArray[np.int32]:
    """Pages of equal tokens, so that sequences often share some, and a part of a page."""
    whole = np.repeat(np.fromiter(kinds, np.int32), PAGE)
    return np.concatenate([whole, np.full(rest, 7, np.int32)])


SEQUENCES = st.builds(
    sequence_of,
    st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=4),
    st.sampled_from([0, 0, 1, 15]),
)


class MemoryMachine(RuleBasedStateMachine):
    """Sequences come, compute, publish and go; every page they hold has what they wrote."""

    memory_type: type[KvMemory] = KvMemory

    @initialize(
        host_pages=st.sampled_from([0, 0, 1, 3, 20]),
        states=st.sampled_from([None, None, 0, 2]),
        cached_pages=st.sampled_from([None, None, 0, 3]),
        copies=st.booleans(),
    )
    def build(
        self, host_pages: int, states: int | None, cached_pages: int | None, copies: bool
    ) -> None:
        self.contents = Contents()
        self.memory = self.memory_type(
            PAGES,
            states=states,
            cached_pages=cached_pages,
            copies=self.contents if copies or host_pages else None,
            host_pages=host_pages,
        )
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

    def _admit(self, tenant: int, tokens: NDArray[np.int32], short: int) -> Running:
        """A hit has the sequence's own tokens, and is what was promised while there is room."""
        scope = scope_of(TENANTS[tenant])
        most = max(0, len(tokens) - short)
        before = self.memory.statistics, self.memory.free, self.memory.cached
        promised = self.memory.match(scope, tokens, most)
        assert before == (self.memory.statistics, self.memory.free, self.memory.cached)
        available = self.memory.available(tenant)
        hit = self.memory.adopt(scope, tokens, most, tenant, self.slots)
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
        most, pages = max(0, len(tokens) - 1), pages_for(len(tokens))
        fits = self.memory.fits(scope_of(TENANTS[tenant]), tokens, most, pages, tenant)
        run = self._admit(tenant, tokens, 1)
        computed = self._compute(run, len(tokens))
        assert computed == fits
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
        elif (place := self.memory.save_place()) is not None:
            self.memory.drop_place(place)

    def _save_state(self, run: Running) -> None:
        """A state is kept for whole pages, those the place belonged to before are without."""
        place = self.memory.save_place()
        assert (place is None) == (self.states == 0)
        if place is None:
            return
        whole = run.computed // PAGE
        if not whole:
            self.memory.drop_place(place)
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
                self.memory.reserve(tenant, pages)
        else:
            self.memory.reserve(tenant, pages)
            self.reserved[tenant] = pages

    @rule()
    def fault(self) -> None:
        """Everything is forgotten."""
        self.memory.clear()
        self.running.clear()
        self.published.clear()
        assert (self.memory.free, self.memory.cached, self.memory.spilled) == (PAGES, 0, 0)

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

    def publish(self, scope: Hashable, *rest: Any) -> PathEnd | None:
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
        kept = dict(self._kept)
        hit = super().adopt(*rest)
        for node in kept:
            self._kept.setdefault(node)
        return hit


class SharingWritten(KvMemory):
    """Hands out the page itself where a copy is needed."""

    def _private_copy(self, node: Node, tenant: int, slot: int) -> int | None:
        if node.page is None:
            return None
        self._pool.hold([node.page], slot, tenant)
        self._kept.pop(node, None)
        return node.page


BROKEN = [Leaking, OneScope, EvictingHeld, ForgettingToProtect, SharingWritten]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda kind: kind.__name__)
def test_a_broken_memory_is_found_out(broken: type[KvMemory]) -> None:
    """The negative control of the machine: each of these mistakes fails it."""

    class Broken(MemoryMachine):
        memory_type = broken

    with pytest.raises((AssertionError, KeyError, ExceptionGroup)):
        run_state_machine_as_test(
            Broken,
            settings=settings(
                max_examples=300,
                stateful_step_count=30,
                deadline=None,
                derandomize=True,
                database=None,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
                phases=settings.default.phases[:3],
            ),
        )


def tokens_of(*kinds: int, rest: int = 0) -> NDArray[np.int32]:
    """Pages of equal tokens, and ``rest`` tokens more."""
    return sequence_of(kinds, rest)


def serve(memory: KvMemory, contents: Contents, tokens: NDArray[np.int32], tenant: int = 1) -> int:
    """A sequence from its beginning to its end; how many of its tokens were known."""
    scope = scope_of(TENANTS[tenant])
    hit = memory.adopt(scope, tokens, len(tokens) - 1, tenant, 0)
    taken = memory.take(pages_for(len(tokens)) - len(hit.pages), tenant, 0)
    assert taken is not None
    pages = [*hit.pages, *taken]
    for number, page in enumerate(pages):
        contents.pages[page] = scope, tokens[: (number + 1) * PAGE].tobytes()
    memory.publish(scope, tokens, pages)
    memory.release(pages, tenant)
    memory.check([])
    return hit.tokens


def test_the_prefix_least_recently_used_goes_first_and_from_its_end() -> None:
    """Of A and B, A was used again: the two pages needed are the last ones of B."""
    memory, contents = KvMemory(7), Contents()
    first, second = tokens_of(1, 1, 1, rest=1), tokens_of(2, 2, 2, rest=1)
    for tokens in (first, second, first):
        serve(memory, contents, tokens)
    assert (memory.cached, memory.free) == (6, 1)
    assert memory.take(3, 2, 1) is not None
    scope = scope_of(TENANTS[1])
    assert memory.match(scope, first, 99) == 3 * PAGE
    assert memory.match(scope, second, 99) == PAGE
    assert memory.statistics.evicted == 2


def test_pages_come_back_from_host_memory_as_they_were() -> None:
    contents = Contents()
    memory = KvMemory(4, copies=contents, host_pages=3)
    tokens = tokens_of(1, 2, 3, rest=1)
    serve(memory, contents, tokens)
    other = memory.take(4, 2, 1)
    assert other is not None
    assert (memory.spilled, memory.free, memory.cached) == (3, 0, 0)
    for page in other:
        contents.pages[page] = "somebody else", b""
    scope = scope_of(TENANTS[1])
    assert memory.match(scope, tokens, 48) == 48
    assert memory.adopt(scope, tokens, 48, 1, 0) == PrefixHit((), 0)
    memory.release(other, 2)
    hit = memory.adopt(scope, tokens, 48, 1, 0)
    assert hit.tokens == 48
    assert [contents.pages[page] for page in hit.pages] == [
        (scope, tokens[: 16 * (number + 1)].tobytes()) for number in range(3)
    ]
    assert (memory.statistics.spilled, memory.statistics.restored) == (3, 3)


def test_host_memory_keeps_what_was_used_last() -> None:
    contents = Contents()
    memory = KvMemory(3, copies=contents, host_pages=2)
    for kind in (1, 2, 3):
        serve(memory, contents, tokens_of(kind, kind, rest=1))
    scope = scope_of(TENANTS[1])
    assert memory.spilled == 2
    assert memory.match(scope, tokens_of(3, 3), 32) == 32
    assert memory.match(scope, tokens_of(2, 2), 32) == 32
    assert memory.match(scope, tokens_of(1, 1), 32) == 0


def test_a_sequence_whose_path_was_evicted_is_published_again() -> None:
    """Another one's pages, on which its own were found, are gone; its own are all held."""
    memory = KvMemory(5)
    scope, tokens = scope_of(TENANTS[1]), tokens_of(1, 2)
    first, second = memory.take(1, 1, 0), memory.take(2, 1, 1)
    assert first is not None
    assert second is not None
    memory.publish(scope, tokens[:16], first)
    end = memory.publish(scope, tokens, second)
    memory.release(first, 1)
    assert memory.cached == 1
    other = memory.take(3, 2, 2)
    assert memory.match(scope, tokens, 32) == 0
    assert memory.publish(scope, tokens, second, end) != end
    assert memory.adopt(scope, tokens, 32, 1, 3).pages == tuple(second)
    memory.check([(1, second), (1, second), (2, other or [])])


def test_a_page_that_would_be_written_is_copied() -> None:
    """A prompt that is known but for its last token: its last page is the sequence's own."""
    contents = Contents()
    memory = KvMemory(8, copies=contents)
    tokens = tokens_of(1, 2)
    serve(memory, contents, tokens)
    scope = scope_of(TENANTS[1])
    first, second = (memory.adopt(scope, tokens, 31, 1, slot) for slot in (0, 1))
    assert first.tokens == second.tokens == 31
    assert first.pages[0] == second.pages[0]
    assert first.pages[1] != second.pages[1]
    assert (memory.meta["ref_count"][list(first.pages)] == [2, 1]).all()
    assert contents.pages[first.pages[1]] == (scope, tokens.tobytes())
    assert memory.statistics.copied == 2
    # Seven tokens of a page are computed again.
    assert memory.adopt(scope, tokens, 16 + 7, 1, 2).tokens == 16


def test_without_copies_a_hit_is_whole_pages() -> None:
    memory = KvMemory(8)
    serve(memory, Contents(), tokens_of(1, 2))
    assert memory.match(scope_of(TENANTS[1]), tokens_of(1, 2), 31) == 16


def test_a_hit_of_a_recurrent_model_ends_at_a_state() -> None:
    memory = KvMemory(8, states=1)
    scope, tokens = scope_of(TENANTS[1]), tokens_of(1, 2, 3, rest=1)
    pages = memory.take(4, 1, 0)
    assert pages is not None
    memory.publish(scope, tokens, pages)
    assert memory.match(scope, tokens, 48) == 0
    place = memory.save_place()
    assert place is not None
    # The only one is taken: not even a state that is kept could make room.
    assert memory.save_place() is None
    memory.attach_state(scope, tokens[:32], place)
    assert memory.adopt(scope, tokens, 48, 1, 1) == PrefixHit(tuple(pages[:2]), 32, place)
    assert memory.match(scope, tokens, 31) == 0
    # The place is wanted for another state: the older one is forgotten.
    again = memory.save_place()
    assert again == place
    assert memory.match(scope, tokens, 48) == 0
    memory.attach_state(scope, tokens_of(4), place)
    assert memory.save_place() == place


def test_a_team_shares_and_others_do_not() -> None:
    memory, contents, tokens = KvMemory(8), Contents(), tokens_of(1, 2, rest=1)
    assert [serve(memory, contents, tokens, tenant) for tenant in (3, 4, 1, 2)] == [0, 32, 0, 0]
    assert memory.statistics.tokens_asked == 4 * 33
    assert memory.statistics.tokens_hit == 32


def test_a_reservation_is_out_of_reach_of_others() -> None:
    memory = KvMemory(8)
    memory.reserve(1, 3)
    assert (memory.available(1), memory.available(2)) == (8, 5)
    assert memory.take(6, 2, 0) is None
    taken = memory.take(5, 2, 0)
    assert taken is not None
    assert memory.take(1, 2, 0) is None
    assert memory.take(4, 1, 0) is None
    assert memory.take(3, 1, 0) is not None
    memory.release(taken, 2)
    memory.reserve(1, 0)
    assert memory.available(2) == 5


def test_no_cache_keeps_nothing() -> None:
    memory, contents = KvMemory(4, cache=False, states=2), Contents()
    assert [serve(memory, contents, tokens_of(1, rest=1)) for _ in range(2)] == [0, 0]
    assert memory.free == 4
    assert memory.save_place() is None


def test_check_tells_a_leak_a_stranger_and_a_held_page_that_is_free() -> None:
    """The negative controls of ``check``."""
    memory = KvMemory(4)
    scope, tokens = scope_of(TENANTS[1]), tokens_of(1, rest=1)
    pages = memory.take(2, 1, 0)
    assert pages is not None
    memory.publish(scope, tokens, pages)
    memory.check([(1, pages)], lambda tenant: scope_of(TENANTS[tenant]))
    with pytest.raises(AssertionError, match="counts the holders"):
        memory.check([])
    hit = memory.adopt(scope, tokens, 16, 2, 1)
    with pytest.raises(AssertionError, match="tenants \\[2\\] hold a page of"):
        memory.check([(1, pages), (2, hit.pages)], lambda tenant: scope_of(TENANTS[tenant]))
    memory._pool._free.append(pages[1])
    with pytest.raises(AssertionError, match="free and held"):
        memory.check()


def test_host_memory_needs_copies() -> None:
    with pytest.raises(ValueError, match="only with copies"):
        KvMemory(4, host_pages=1)
