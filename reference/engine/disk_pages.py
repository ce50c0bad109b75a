"""Reads pages for sequences from the disk cache.

A waiting request is admitted once its pages on disk have been read, or as many of them as the host
buffer holds. In the latter case it computes nothing until the rest was read into its pages. The
pages belong to it like those it computes; other sequences find them once all are there."""

from __future__ import annotations

from collections import deque
from dataclasses import field

from contract.arithmetic import PAGE_TOKENS
from contract.lazy_dataclass import dataclass
from contract.tier import Fence
from reference.engine.disk_writes import DiskWrites
from reference.engine.sequence import Sequence
from reference.memory.disk.cache import DiskCache
from reference.memory.disk.entry import Entry
from reference.memory.disk.reading import Reading
from reference.memory.kv import KvMemory
from reference.memory.page_copies import PageCopies
from reference.memory.prefix import KEY_BYTES, PrefixHit
from reference.memory.recurrent import RecurrentMemory
from reference.memory.row_copies import HostBytes
from reference.sched.tenants import Tenants


@dataclass(frozen=True, slots=True)
class _Loading:
    """The pages being read for an admitted sequence: its ``pages``, the first of which ``hit``
    covers; the ``reading``; and the loads in flight, each with its number of pages."""

    sequence: Sequence
    hit: PrefixHit
    pages: list[int]
    reading: Reading
    loads: deque[tuple[Fence, int]] = field(default_factory=deque)


class DiskPages(DiskWrites):
    """Writes the pages that ``KvMemory`` publishes to ``cache``, and reads those that sequences
    need. In a model with recurrent layers a hit ends where a state is."""

    def __init__(
        self, cache: DiskCache, copies: PageCopies, recurrent: RecurrentMemory, tenants: Tenants
    ) -> None:
        super().__init__(cache, copies, recurrent, tenants)
        self._readings: dict[int, Reading] = {}
        self._loading: dict[int, _Loading] = {}
        self._ended: set[int] = set()

    def clear(self) -> None:
        super().clear()
        for reading in self._readings.values():
            reading.cancel()
        self._readings.clear()
        self._loading.clear()

    def is_reading(self, sequence: Sequence, memory: KvMemory, limit: int) -> bool:
        """Whether the pages of a waiting sequence are being read. The first call starts reading. At
        most ``limit`` waiting sequences have pages that were read for them."""
        reading = self._readings.get(sequence.order)
        if reading is None:
            if sequence.looked_up or len(self._readings) - len(self._loading) >= limit:
                return False
            sequence.looked_up = True
            reading = self._begin(sequence, memory)
            if reading is None:
                return False
            self._readings[sequence.order] = reading
            self._ended.discard(sequence.order)
        return not self.cache.due(reading)

    def arrived(self) -> bool:
        """Whether another waiting sequence became ready for admission since the last call."""
        waiting = self._readings.keys() - self._loading.keys()
        ended = {order for order in waiting if self.cache.due(self._readings[order])}
        new = ended - self._ended
        self._ended = ended
        return bool(new)

    @property
    def reading(self) -> bool:
        """Whether pages are being read."""
        return any(not reading.ready for reading in self._readings.values())

    def drop(self, sequence: Sequence) -> None:
        """Forget what was read for a sequence that ended, lost its slot or has another scope now.
        It is looked up again when it waits again."""
        sequence.looked_up = False
        self._loading.pop(sequence.order, None)
        reading = self._readings.pop(sequence.order, None)
        if reading is not None:
            reading.cancel()

    def load(
        self, sequence: Sequence, memory: KvMemory, hit: PrefixHit, pages: list[int]
    ) -> PrefixHit:
        """Load what was read for a sequence into its ``pages``, the first of which ``hit`` covers,
        and publish it. Returns what is covered then. If more is still being read, ``is_loading``
        becomes true."""
        reading = self._readings.get(sequence.order)
        first = len(hit.pages)
        if reading is None or hit.tokens != first * PAGE_TOKENS or first < reading.first:
            self.drop(sequence)
            return hit
        sequence.looked_up = False
        loading = self._loading[sequence.order] = _Loading(sequence, hit, pages, reading)
        return self._load_arrived(loading, memory, whole=True) or hit

    def is_loading(self, sequence: Sequence) -> bool:
        """Whether pages of an admitted sequence are still being read."""
        return sequence.order in self._loading

    def load_more(self, memory: KvMemory, *, whole: bool) -> list[tuple[Sequence, PrefixHit]]:
        """Load arrived pages of admitted sequences: at most a block for each, or with ``whole`` all
        of them. Returns the sequences that are complete now, and what is covered of each."""
        loaded = []
        for loading in tuple(self._loading.values()):
            self.cache.due(loading.reading)
            hit = self._load_arrived(loading, memory, whole=whole)
            if hit is not None:
                loaded.append((loading.sequence, hit))
        return loaded

    def _load_arrived(
        self, loading: _Loading, memory: KvMemory, *, whole: bool
    ) -> PrefixHit | None:
        """Load arrived pages; returns what is covered once all are there, else None."""
        reading, first = loading.reading, len(loading.hit.pages)
        self._free(loading)
        while (arrived := reading.arrived()) is not None:
            block, count = arrived
            begin = reading.first + reading.taken
            pairs = [(n - begin, loading.pages[n]) for n in range(max(begin, first), begin + count)]
            reading.take(count)
            if pairs:
                loading.loads.append((self._copies.load_block(block, pairs), count))
                self._free(loading)
            else:
                self.cache.free(reading, count)
            if not whole:
                break
        if reading.over:
            del self._loading[loading.sequence.order], self._readings[loading.sequence.order]
            return self._covered(loading, memory)
        if whole and reading.ready and loading.loads:
            self._copies.wait(loading.loads[0][0])
            self._free(loading)
        return None

    def _free(self, loading: _Loading) -> None:
        """Give back the blocks that the device has read."""
        while loading.loads and loading.loads[0][0].done:
            self.cache.free(loading.reading, loading.loads.popleft()[1])

    def _covered(self, loading: _Loading, memory: KvMemory) -> PrefixHit:
        """Publish what was loaded, and return what is covered then."""
        hit, reading, pages = loading.hit, loading.reading, loading.pages
        stop = reading.first + reading.count
        if stop <= len(hit.pages):
            return hit
        slot = None
        if self._stateful:
            slot = None if reading.state is None else memory.save_state_slot()
            if slot is None or reading.state is None:
                return hit
            self._recurrent.write(slot, HostBytes(reading.state), stop * PAGE_TOKENS)
        self._publish(loading.sequence, memory, stop, pages, slot)
        covered = stop * PAGE_TOKENS
        self.cache.count(tokens=covered - hit.tokens)
        return PrefixHit(
            tuple(pages[:stop]),
            covered,
            slot,
            max(hit.matched, covered),
            hit.difference,
            covered - hit.tokens,
        )

    def _publish(
        self, sequence: Sequence, memory: KvMemory, stop: int, pages: list[int], slot: int | None
    ) -> None:
        """Let other sequences find loaded pages, which are not written to disk again."""
        tokens = sequence.tokens[: stop * PAGE_TOKENS]
        self._publishing = True
        try:
            memory.publish(sequence.scope, tokens, pages, None, sequence.tenant)
            if slot is not None:
                memory.attach_state(sequence.scope, tokens, slot)
        finally:
            self._publishing = False

    def _begin(self, sequence: Sequence, memory: KvMemory) -> Reading | None:
        limit = sequence.cacheable
        known = memory.match(sequence.scope, sequence.tokens[: sequence.known], limit)
        first, stop = known // PAGE_TOKENS, limit // PAGE_TOKENS
        if first >= stop:
            return None
        pages = self._entries(sequence, first, stop)
        states = None
        if self._stateful:
            states = [self._state(sequence.scope, one.name, one.tokens) for one in pages]
        return self.cache.read(pages, states, first, self._copies.block)

    def _entries(self, sequence: Sequence, first: int, stop: int) -> list[Entry]:
        """The files of pages ``first`` to ``stop`` - 1 of a sequence."""
        names, entries = self.cache.names, []
        data = sequence.tokens[: stop * PAGE_TOKENS].tobytes()
        name = self._root(sequence.scope)
        for number in range(stop):
            tokens = data[number * KEY_BYTES : (number + 1) * KEY_BYTES]
            name = names.page(name, tokens)
            if number >= first:
                entries.append(self._page(sequence.scope, name, tokens))
        return entries
