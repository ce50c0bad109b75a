"""KvMemory over the pools of a device: what a sequence finds is what was written for its tokens.

Nothing is waited for until the end. So pages are found, evicted, saved, given away and brought back
while the steps that write them are still queued."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract.dtypes import I12
from contract.tier import Tier
from reference.memory.kv import KvMemory
from reference.memory.row_copies import SavedPage
from tests.memory.test_page_copies import PAGES, Pools
from tests.memory.test_recurrent import WAYS, open_way

SCOPE = ("tenant", 0)
SHARED = PAGES - 1
"""The last page is the test's own: reading writes there."""


@pytest.fixture(scope="module", params=WAYS)
def tier(request: pytest.FixtureRequest) -> Iterator[Tier]:
    with open_way(request.param) as opened:
        yield opened


class Sequences:
    """Sequences of whole pages that end at once; ``kinds`` are the tokens of each page."""

    def __init__(self, pools: Pools, host_pages: int) -> None:
        self.pools = pools
        self.memory = KvMemory(SHARED, copies=pools.copies, host_pages=host_pages)
        self.found: list[tuple[SavedPage, int]] = []

    def serve(self, kinds: list[int]) -> None:
        """Find what there is, write the rest, leave. What was found is looked at later."""
        tokens = np.repeat(np.array(kinds, np.int32), 16)
        hit = self.memory.adopt(SCOPE, tokens, len(tokens) - 1, 0, 0)
        for number, page in enumerate(hit.pages):
            self.found.append((self.pools.copies.save(page), seed_of(kinds[: number + 1])))
        taken = self.memory.take(len(kinds) - len(hit.pages), 0, 0)
        assert taken is not None
        pages = [*hit.pages, *taken]
        for number in range(hit.tokens // 16, len(kinds)):
            self.pools.write(pages[number], seed_of(kinds[: number + 1]))
        self.memory.publish(SCOPE, tokens, pages)
        self.memory.release(pages, 0)
        self.memory.check([])


def seed_of(kinds: list[int]) -> int:
    """What a page holds depends on all tokens up to its last."""
    return int("1" + "".join(map(str, kinds)))


def bytes_of(pools: Pools, seed: int) -> bytes:
    """A page with what ``seed`` says."""
    pools.write(SHARED, seed)
    saved = pools.copies.save(SHARED)
    return saved.bytes().tobytes()


def wrong(tier: Tier, served: list[list[int]], host_pages: int, lost: int = 0) -> tuple[int, int]:
    """How many pages were found, and how many of them did not hold what they should.

    ``lost``: writes to the device that go missing, a negative control."""
    pools = Pools(tier, I12)
    try:
        sequences = Sequences(pools, host_pages)
        for index, kinds in enumerate(served):
            sequences.serve(kinds)
            if index < lost:
                for page in range(SHARED):
                    pools.write(page, 0)
        pages = [
            (saved.bytes().tobytes(), bytes_of(pools, seed)) for saved, seed in sequences.found
        ]
        return len(pages), sum(got != expected for got, expected in pages)
    finally:
        pools.close()


SERVED = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=2, max_size=12)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(served=SERVED, host_pages=st.sampled_from([0, 2, 8]))
def test_pages_found_hold_what_was_written(
    tier: Tier, served: list[list[int]], host_pages: int
) -> None:
    """Whatever was evicted, spilled, restored and copied in between."""
    assert wrong(tier, served, host_pages)[1] == 0


CHAT = [[0, 1], [0, 1, 0], [1, 1, 1], [0, 1, 0], [1, 0, 1], [0, 1, 0], [1, 1, 1], [0, 1]]


@pytest.mark.parametrize("host_pages", [0, 8])
def test_a_chat_among_others_finds_its_pages(tier: Tier, host_pages: int) -> None:
    """The property is about something: pages are found, more of them with host memory."""
    found, bad = wrong(tier, CHAT, host_pages)
    assert bad == 0
    assert found >= (10 if host_pages else 3)


def test_pages_that_somebody_overwrote_are_noticed(tier: Tier) -> None:
    """The negative control: a write into a page that the cache keeps."""
    assert wrong(tier, CHAT, 0, lost=1)[1] > 0
