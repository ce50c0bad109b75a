"""A prompt with more pages on disk than are read at once has its slot while they are loaded.

Here two pages are in host memory at once, and the engine reads one itself when it looks for them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contract.types import LOCAL_TENANT, QosClass, Request, Tenant
from reference.engine.disk_pages import DiskPages
from reference.memory import row_copies
from reference.memory.disk.cache import DiskCache
from reference.memory.disk.reading import Reading
from tests.engine.agent_sessions import GREEDY
from tests.engine.disk_engines import PROMPT, WHOLE, Life, files, life, lived, request
from tests.engine.test_disk_faults import flip
from tests.families_table import DENSE, HYBRIDS

PAGES = WHOLE // 16
MODELS = {"dense": DENSE["qwen3"], "hybrid": HYBRIDS["qwen35"]}
POINTS = 8
"""Steps of the engine, from its first one on, between which something happens. In fewer of them a
prompt is loaded and its first token computed."""
ANN = replace(LOCAL_TENANT, id=1, name="ann")


@pytest.fixture(params=MODELS)
def model(synthetic_model, request) -> Path:
    return synthetic_model(**dict(MODELS[request.param]) | {"quant": "q8_0"})


@pytest.fixture(autouse=True)
def one_page_at_a_time(monkeypatch) -> None:
    """Without threads: what is between two steps does not depend on their speed."""
    due, take, left = DiskCache.due, Reading._take, [0]

    def read_one(cache: DiskCache, reading: Reading) -> bool:
        left[0] = 1
        reading.work()
        return due(cache, reading)

    def take_one(reading: Reading) -> Any:
        left[0] -= 1
        return take(reading) if left[0] >= 0 else None

    monkeypatch.setattr(row_copies, "BLOCK_ROWS", 1)
    monkeypatch.setattr(DiskCache, "_queue_reading", lambda *parts: None)
    monkeypatch.setattr(DiskCache, "due", read_one)
    monkeypatch.setattr(Reading, "_take", take_one)


@contextmanager
def restarted(model: Path, folder: Path, **options: Any) -> Iterator[Life]:
    """A server that reads two pages at once. Its device is late with everything, and reads pages
    where the disk's readers wrote them."""
    with life(model, folder, read_bytes=1, tier="late", **options) as server:
        yield server
        while not server.engine.idle:
            server.engine.step()
        server.engine.memory.check([])
        assert not server.engine._disk._readings  # type: ignore[union-attr]
        assert not server.engine._disk._loading  # type: ignore[union-attr]


def loading(server: Life) -> bool:
    """Whether a prompt that has a slot is being loaded."""
    return True in server.engine._slot_manager.table.loading


def until_loading(server: Life) -> None:
    """Step until a prompt has its slot and not its pages."""
    for _ in range(1000):
        if loading(server):
            return
        server.engine.step()
    pytest.fail("the prompt is not loaded in its slot")


def test_it_has_the_bits_of_a_cold_run(model, folder):
    with life(model, None) as cold:
        expected = cold.ask()
    assert lived(model, folder) == expected
    with restarted(model, folder) as second:
        second.engine.submit(request(7))
        until_loading(second)
        assert second.engine.progress(7) == 0
        list(second.engine.run())
        assert second.loads.from_disk[7] == WHOLE
        assert second.loads.reused[7] == 0, "the rest came behind its admission"
        assert second.counts.tokens == WHOLE
        assert second.engine.usage.entry(0).hit == WHOLE
        written = second.counts.written
        assert second.ask() == expected
        assert second.from_disk == 0, "it is in memory now"
        second.flush()
        assert len(files(folder)) == PAGES
        assert second.counts.written <= written + 1, "what came from disk is not written again"


def cancel(server: Life) -> None:
    server.engine.cancel(7)


def fail(server: Life) -> None:
    """A step or a call that fails: everything in memory is lost."""
    server.engine._recover(fault=False)


def leave(server: Life) -> None:
    """Its tenant gets another scope."""
    server.engine.put_tenant(replace(ANN, isolation_group=3))


def come_back(server: Life) -> None:
    leave(server)
    server.engine.put_tenant(ANN)


def remove(server: Life) -> None:
    server.engine.remove_tenant(1)


def preempt(server: Life) -> None:
    for sequence in tuple(server.engine._slot_manager.running.values()):
        server.engine._scheduler.preempt(sequence)


def stall(server: Life) -> None:
    server.engine.stall(7)
    server.engine.step()
    server.engine.unstall(7)


EVENTS: list[Callable[[Life], None]] = [cancel, fail, leave, come_back, remove, preempt, stall]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_whatever_happens_meanwhile_loses_nothing(event, model, folder):
    """Before every step of the engine. Its pages are free or cached at the end, as ``restarted``
    checks, and the next one has the bits of a cold run."""
    tenants = [ANN, LOCAL_TENANT]
    with life(model, folder, tenants=tenants) as first:
        expected = first.ask(tenant=1)
    seen = set()
    ends = event in (leave, come_back, remove)
    for point in range(POINTS):
        if ends:
            lived_as(model, folder, tenants)
        with restarted(model, folder, tenants=tenants) as second:
            second.engine.submit(request(7, tenant=1))
            for _ in range(point):
                second.engine.step()
            seen.add(loading(second))
            event(second)
            second.engine.memory.check()
            if event is remove:
                second.engine.put_tenant(ANN)
            assert second.ask(tenant=1) == expected, point
            list(second.engine.run())
            if event in (preempt, stall, fail):
                assert 7 in second.loads.reused
    assert seen == {False, True}


def lived_as(model: Path, folder: Path, tenants: list[Tenant]) -> None:
    with life(model, folder, tenants=tenants) as first:
        first.ask(tenant=1)


@pytest.mark.parametrize("page", range(PAGES))
def test_a_damaged_page_ends_what_is_loaded(model, folder, page):
    """Those before it are used, up to a state where the model has any."""
    expected = lived(model, folder)
    flip(files(folder)[page], -1)
    with restarted(model, folder) as second:
        assert second.ask() == expected
        found = second.from_disk
        assert found <= 16 * page
        assert second.counts.ignored == 1
        assert found == 16 * page or files(folder, ".state")
    with life(model, folder) as third:
        assert third.ask() == expected


def test_others_are_answered_meanwhile(model, folder, monkeypatch):
    """A step takes one page of those that arrived. The disk gives the next one only when the other
    request has its answer."""
    expected = lived(model, folder)
    with restarted(model, folder) as second:
        with monkeypatch.context() as patch:
            patch.setattr(Reading, "arrived", lambda reading: None)
            second.engine.submit(request(7))
            until_loading(second)
            second.engine.submit(Request(8, PROMPT[50:90], 8, GREEDY, ignore_end=True))
            ended = False
            while not ended:
                ended = any(
                    event.request_id == 8 and event.finish_reason is not None
                    for event in second.engine.step()
                )
            assert loading(second)
        list(second.engine.run())
        assert second.loads.from_disk[7] == WHOLE
        assert second.ask() == expected


def test_its_pages_count_and_another_class_gets_them(model, folder):
    """They are its tenant's from its admission on; who is preempted looks it up again."""
    low, high = (
        replace(LOCAL_TENANT, id=number, name=qos.name, qos=qos)
        for number, qos in ((1, QosClass.BATCH), (2, QosClass.INTERACTIVE))
    )
    with life(model, folder, tenants=[low, high]) as first:
        expected = first.ask(tenant=1)
    with restarted(model, folder, tenants=[low, high], pages=12) as second:
        second.engine.submit(request(7, tenant=1))
        until_loading(second)
        assert second.engine.memory.held(1) >= PAGES
        other = Request(8, PROMPT[::-1], 8, GREEDY, tenant=2, ignore_end=True)
        second.engine.submit(other)
        ended = [e.request_id for e in second.engine.run() if e.finish_reason is not None]
        assert ended == [8, 7]
        assert second.engine.statistics.preempted >= 1
        assert second.loads.from_disk[7] > 0
        assert second.ask(tenant=1) == expected


def test_memory_that_is_given_back_early_is_noticed(model, folder, monkeypatch):
    """The negative control: before the device has read it."""
    expected = lived(model, folder)

    def free(pages: DiskPages, loading: Any) -> None:
        while loading.loads:
            pages.cache.free(loading.reading, loading.loads.popleft()[1])

    monkeypatch.setattr(DiskPages, "_free", free)
    with restarted(model, folder) as second:
        assert second.ask() != expected
