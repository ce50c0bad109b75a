"""Reading a prompt's files into memory that is used again, while others load what was read."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from contract.arrays import Bytes
from reference.memory.disk.cache import DiskCache, DiskCacheOptions
from reference.memory.disk.entry import Entry, EntryKind
from reference.memory.disk.folder import CacheFolder
from reference.memory.disk.reading import Reading, Ring
from tests.memory.test_disk_entries import NBYTES, PLENTY, entry_of, payload_of
from tests.patience import PATIENCE_SECONDS

TOGETHER = 3


@dataclass
class Memory:
    """A block of pages."""

    rows: list[Bytes] = field(default_factory=lambda: [*np.zeros((TOGETHER, NBYTES), np.uint8)])


def ring(blocks: int = 2) -> Ring:
    make: Any = Memory
    return Ring(make, blocks * TOGETHER * NBYTES)


def taken(reading: Reading, give_back: Callable[[int], None]) -> Iterator[Bytes]:
    """Copies of the pages that have arrived."""
    while (arrived := reading.arrived()) is not None:
        block, count = arrived
        reading.take(count)
        yield from [row.copy() for row in block.rows[:count]]
        give_back(count)


@pytest.fixture
def folder(tmp_path) -> CacheFolder:
    return CacheFolder(tmp_path, PLENTY)


@pytest.fixture
def cache(tmp_path) -> Iterator[DiskCache]:
    opened = DiskCache(
        DiskCacheOptions(tmp_path, PLENTY, "a function", read_bytes=1), [].append, lambda: 0.0
    )
    yield opened
    opened.close()


def entries(folder: CacheFolder, count: int, *, without: int | None = None) -> list[Entry]:
    """Files of pages, of which one is missing."""
    found = [entry_of(folder, number) for number in range(count)]
    for number, entry in enumerate(found):
        if number != without:
            folder.write(entry, payload_of(number))
    return found


def read_all(cache: DiskCache, pages: list[Entry], states: list[Entry] | None = None) -> Any:
    """Pages that were read and loaded, in order, and the state."""
    make: Any = Memory
    reading = cache.read(pages, states, 0, make)
    assert reading is not None
    found: list[Bytes] = []
    while not reading.over:
        cache.wait(0.01)
        found += taken(reading, lambda count: cache.free(reading, count))
    return found[: reading.count], reading.state


@pytest.mark.parametrize("count", [1, TOGETHER, 2 * TOGETHER, 2 * TOGETHER + 1, 40])
def test_all_pages_come_in_order_through_little_memory(cache, folder, count):
    found, state = read_all(cache, entries(folder, count))
    assert state is None
    assert len(found) == count
    assert all((page == payload_of(number)).all() for number, page in enumerate(found))


@pytest.mark.parametrize("missing", range(14))
def test_it_ends_before_the_first_page_that_is_not_there(cache, folder, missing):
    found, _ = read_all(cache, entries(folder, 14, without=missing))
    assert len(found) == missing
    assert all((page == payload_of(number)).all() for number, page in enumerate(found))


@pytest.mark.parametrize("missing", [0, 5, 11])
def test_it_ends_with_a_state(cache, folder, missing):
    """Pages behind the last state that follows whole pages were loaded for nothing."""
    pages = entries(folder, 14, without=missing)
    pages[missing:] = [page._replace(tokens=bytes(64)) for page in pages[missing:]]
    states = [page._replace(kind=EntryKind.STATE) for page in pages]
    for number in (3, 9, 13):
        folder.write(states[number], payload_of(100 + number))
    found, state = read_all(cache, pages, states)
    last = max((number for number in (3, 9) if number < missing), default=None)
    assert len(found) == (0 if last is None else last + 1)
    if last is None:
        assert state is None
    else:
        assert (state == payload_of(100 + last)).all()


class ByHand:
    """A reading by calls of ``work``; page ``broken`` is not valid."""

    def __init__(self, count: int, broken: int | None = None) -> None:
        self.now, self.read, self.changes = 0.0, [], 0
        pages: Any = range(count)

        def read(index: Any, memory: Bytes | None) -> Bytes | None:
            assert memory is not None
            self.read.append(index)
            memory[:] = index
            return None if index == broken else memory

        def changed() -> None:
            self.changes += 1

        self.reading = Reading(
            pages, None, 0, ring(), lambda entry: True, read, changed, lambda: self.now
        )


def test_threads_leave_where_there_is_no_room():
    """Others' prompts are read meanwhile. It is not the disk that is waited for."""
    one = ByHand(20)
    assert not one.reading.ready
    one.reading.work()
    one.reading.work()
    assert one.read == list(range(2 * TOGETHER))
    assert one.changes == 2
    one.now = 1e9
    assert one.reading.ready
    assert not one.reading.finished
    assert not one.reading.overdue(5.0)
    assert [page[0] for page in taken(one.reading, one.reading.free)] == one.read
    assert not one.reading.ready
    assert not one.reading.overdue(5.0), "it had no chance yet"
    one.now += 6
    assert one.reading.overdue(5.0)


@pytest.mark.parametrize("loaded", range(3))
@pytest.mark.parametrize("how", ["cut", "cancel"])
def test_it_can_be_ended_at_any_point(how, loaded):
    one = ByHand(20)
    for _ in range(loaded):
        one.reading.work()
        block, count = one.reading.arrived() or pytest.fail("nothing has arrived")
        assert block.rows[0][0] == one.reading.taken
        one.reading.take(count)
        one.reading.free(count)
    one.reading.work()
    (one.reading.cut if how == "cut" else one.reading.cancel)()
    before = len(one.read)
    one.reading.work()
    assert len(one.read) == before
    left = [page[0] for page in taken(one.reading, one.reading.free)]
    assert left == (one.read[loaded * TOGETHER :] if how == "cut" else [])
    assert one.reading.over


def test_a_page_that_is_not_valid_ends_it():
    one = ByHand(20, broken=8)
    found: list[int] = []
    while not one.reading.over:
        one.reading.work()
        found += [page[0] for page in taken(one.reading, one.reading.free)]
    assert found == list(range(8))


def test_memory_is_not_written_while_it_is_loaded():
    """A thread that is late with a page of a reading that was cut, too, writes in its own place."""
    one, gate, begun = ByHand(7), threading.Event(), threading.Event()
    read = one.reading._read

    def late(index: Any, memory: Bytes | None) -> Bytes | None:
        if index == 4:
            begun.set()
            assert gate.wait(PATIENCE_SECONDS)
        return read(index, memory)

    one.reading._read = late
    thread = threading.Thread(target=one.reading.work)
    thread.start()
    assert begun.wait(PATIENCE_SECONDS)
    one.reading.cut()
    gate.set()
    thread.join()
    assert [page[0] for page in taken(one.reading, one.reading.free)] == [0, 1, 2, 3]
    assert one.reading.over
