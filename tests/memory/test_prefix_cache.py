"""What the prefix cache keeps, gives away first, copies and brings back: one case each."""

import numpy as np
import pytest
from numpy.typing import NDArray

from reference.limits import pages_for
from reference.memory.kv import KvMemory
from reference.memory.prefix import PrefixHit, scope_of
from tests.memory.contents import PAGE, TENANTS, Contents, sequence_of


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


def test_the_prefix_least_recently_used_goes_first_and_from_its_end():
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


def test_pages_come_back_from_host_memory_as_they_were():
    contents = Contents()
    memory = KvMemory(4, copies=contents, host_pages=3)
    tokens = tokens_of(1, 2, 3, rest=1)
    serve(memory, contents, tokens)
    other = memory.take(4, 2, 1)
    assert other is not None
    assert (len(memory._cached.in_host), memory.free, memory.cached) == (3, 0, 0)
    for page in other:
        contents.pages[page] = "somebody else", b""
    scope = scope_of(TENANTS[1])
    assert memory.match(scope, tokens, 48) == 48
    assert memory.adopt(scope, tokens, 48, 1, 0) == PrefixHit((), 0, matched=48)
    memory.release(other, 2)
    hit = memory.adopt(scope, tokens, 48, 1, 0)
    assert hit.tokens == 48
    assert [contents.pages[page] for page in hit.pages] == [
        (scope, tokens[: 16 * (number + 1)].tobytes()) for number in range(3)
    ]
    assert (memory.statistics.spilled, memory.statistics.restored) == (3, 3)


def test_host_memory_keeps_what_was_used_last():
    contents = Contents()
    memory = KvMemory(3, copies=contents, host_pages=2)
    for kind in (1, 2, 3):
        serve(memory, contents, tokens_of(kind, kind, rest=1))
    scope = scope_of(TENANTS[1])
    assert len(memory._cached.in_host) == 2
    assert memory.match(scope, tokens_of(3, 3), 32) == 32
    assert memory.match(scope, tokens_of(2, 2), 32) == 32
    assert memory.match(scope, tokens_of(1, 1), 32) == 0


def test_host_memory_forgets_what_was_used_least_recently():
    """Of prefixes that have nothing in common; one that is used again is the last to go."""
    contents = Contents()
    memory = KvMemory(2, copies=contents, host_pages=2)
    scope = scope_of(TENANTS[1])

    def known() -> list[int]:
        return [kind for kind in range(1, 7) if memory.match(scope, tokens_of(kind), 16)]

    for kind in (1, 2, 3, 4):
        serve(memory, contents, tokens_of(kind, rest=1))
    assert known() == [2, 3, 4]
    assert serve(memory, contents, tokens_of(2, rest=1)) == 16
    serve(memory, contents, tokens_of(5, rest=1))
    assert known() == [2, 4, 5]


def test_a_sequence_whose_path_was_evicted_is_published_again():
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


def test_a_page_that_would_be_written_is_copied():
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


def test_without_copies_a_hit_is_whole_pages():
    memory = KvMemory(8)
    serve(memory, Contents(), tokens_of(1, 2))
    assert memory.match(scope_of(TENANTS[1]), tokens_of(1, 2), 31) == 16


def test_a_hit_of_a_recurrent_model_ends_at_a_state():
    memory = KvMemory(8, states=1)
    scope, tokens = scope_of(TENANTS[1]), tokens_of(1, 2, 3, rest=1)
    pages = memory.take(4, 1, 0)
    assert pages is not None
    memory.publish(scope, tokens, pages)
    assert memory.match(scope, tokens, 48) == 0
    place = memory.save_state_slot()
    assert place is not None
    # The only one is taken: not even a state that is kept could make room.
    assert memory.save_state_slot() is None
    memory.attach_state(scope, tokens[:32], place)
    assert memory.adopt(scope, tokens, 48, 1, 1) == PrefixHit(tuple(pages[:2]), 32, place, 48)
    assert memory.match(scope, tokens, 31) == 0
    # The place is wanted for another state: the older one is forgotten.
    again = memory.save_state_slot()
    assert again == place
    assert memory.match(scope, tokens, 48) == 0
    memory.attach_state(scope, tokens_of(4), place)
    assert memory.save_state_slot() == place


def test_a_team_shares_and_others_do_not():
    memory, contents, tokens = KvMemory(8), Contents(), tokens_of(1, 2, rest=1)
    assert [serve(memory, contents, tokens, tenant) for tenant in (3, 4, 1, 2)] == [0, 32, 0, 0]
    assert memory.statistics.tokens_asked == 4 * 33
    assert memory.statistics.tokens_hit == 32


def test_a_reservation_is_out_of_reach_of_others():
    memory = KvMemory(8)
    memory.reservations.set_all({1: 3})
    assert (memory.available(1), memory.available(2)) == (8, 5)
    assert memory.take(6, 2, 0) is None
    taken = memory.take(5, 2, 0)
    assert taken is not None
    assert memory.take(1, 2, 0) is None
    assert memory.take(4, 1, 0) is None
    assert memory.take(3, 1, 0) is not None
    memory.release(taken, 2)
    memory.reservations.set_all({})
    assert memory.available(2) == 5


def test_no_cache_keeps_nothing():
    memory, contents = KvMemory(4, cache=False, states=2), Contents()
    assert [serve(memory, contents, tokens_of(1, rest=1)) for _ in range(2)] == [0, 0]
    assert memory.free == 4
    assert memory.save_state_slot() is None


def test_check_tells_a_leak_a_stranger_and_a_held_page_that_is_free():
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


def test_host_memory_needs_copies():
    with pytest.raises(ValueError, match="only with copies"):
        KvMemory(4, host_pages=1)
