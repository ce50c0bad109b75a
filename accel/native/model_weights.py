"""The weights of one model: checked and arranged together, or mapped from the cache folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from accel.native import weight_cache
from accel.native.arrange import (
    Arranger,
    arrange_packets,
    arranged,
    finite_packets,
    stack_bytes,
    stack_of,
)
from accel.native.mapped_files import MappedFiles
from accel.native.names import sources_digest
from accel.native.weight_cache import Entry, entry_of, open_entry, write_entry
from accel.packets.buffers import DeviceBuffer
from accel.packets.build import Progress
from accel.packets.host_memory import AddressRange
from accel.packets.layouts import LANES, group_bytes, matrices_of
from accel.packets.packet import aligned
from accel.packets.stacks import Stack
from contract.arrays import Bytes
from contract.file_reads import FileRange
from contract.lazy_dataclass import dataclass
from contract.tier import FiniteWords

MAX_JOB_BYTES = 1 << 21
"""Most stored bytes of one job: their pages leave the page table when it ends."""


@dataclass(slots=True, eq=False)
class Weight:
    """An upload that waits. ``stack`` are its matrices to arrange, None if it stays as stored;
    ``source`` says which bytes of the model file it is, None where they are a copy. ``reported``
    says whether ``on_bytes`` was called."""

    buffer: DeviceBuffer[AddressRange]
    data: Bytes
    finite: FiniteWords
    stack: Stack | None
    source: FileRange | None
    on_bytes: Callable[[int], None]
    reported: bool = False

    def report(self) -> None:
        """Count its bytes as read, once: a weight is mapped or arranged after it was written."""
        if not self.reported:
            self.reported = True
            self.on_bytes(self.data.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes it takes once arranged, aligned; 0 if it stays as stored."""
        return aligned(stack_bytes(self.stack)) if self.stack is not None else 0

    @property
    def form(self) -> str:
        """Its arrangement, as text."""
        matrices = self.stack.matrices if self.stack is not None else 0
        return f"{self.buffer.decl.dtype.name} {self.data.shape} {matrices}"

    def parts(self) -> Iterator[tuple[Weight, int]]:
        """The weight in parts of whole groups of rows and at most MAX_JOB_BYTES, and where each
        begins in the arranged bytes."""
        stack = self.stack
        if stack is None or (stack.matrices > 1 and stack.rows % LANES):
            yield self, 0
            return
        for groups in stack.parts(MAX_JOB_BYTES):
            data, source = stack.stored(groups), self.source
            if source is not None:
                before = stack.stored_bytes(range(groups.start))
                source = replace(source, offset=source.offset + before, nbytes=data.nbytes)
            part = replace(
                self, data=data, stack=Stack(stack.dtype, data, len(data)), source=source
            )
            yield part, groups.start * group_bytes(stack.dtype, stack.columns)

    def forget_source(self) -> None:
        """Remove the stored bytes from the page table, since the products do not read them."""
        if self.stack is not None and self.source is not None:
            self.source.forget_pages()


@dataclass(slots=True)
class ModelWeights:
    """Collects the weights of a model and brings them to the form in which the products read them.

    ``folder`` is that of the cache, None to write no entry; ``progress`` is called with a line when
    an entry cannot be written."""

    arranger: Arranger
    files: MappedFiles
    folder: Path | None
    progress: Progress | None = None
    _weights: list[Weight] = field(default_factory=list)

    def add(
        self,
        buffer: DeviceBuffer[AddressRange],
        finite: FiniteWords,
        on_bytes: Callable[[int], None],
    ) -> None:
        """Collect a weight, whose data is the buffer's ``source``."""
        data = buffer.source
        assert data is not None
        matrices = matrices_of(buffer.decl)
        stack = stack_of(buffer.decl.dtype, data, matrices) if matrices else None
        source = self.files.guard(data)
        self._weights.append(Weight(buffer, data, finite, stack, source, on_bytes))

    def on_disk(self, nbytes: int) -> int:
        """Of ``nbytes`` arranged bytes those that are mapped from an entry of the cache: all or
        none."""
        stored = self.folder is not None and weight_cache.CAN_ALLOCATE
        return nbytes if stored and nbytes >= weight_cache.MIN_BYTES else 0

    def forget(self, buffer: DeviceBuffer[AddressRange]) -> None:
        """The buffer is freed: its weight is needed no more."""
        self._weights = [weight for weight in self._weights if weight.buffer is not buffer]

    def finish(self) -> bool:
        """Map or arrange what was collected; False when a scale is not finite. Raises OutOfMemory
        naming a buffer, and ModelFileError for a file that was cut."""
        weights, self._weights = self._weights, []
        of_file = [weight for weight in weights if weight.source is not None]
        entry = self._entry(of_file)
        if entry is None or self.folder is None:
            return self._arrange(weights)
        try:
            mapped = open_entry(self.folder, entry)
            if mapped is None:
                mapped = write_entry(self.folder, entry, partial(self._fill, of_file))
        except OSError as error:
            if self.progress is not None:
                reason = f"{self.folder}: {error.strerror}"
                self.progress(f"arranged weights cannot be stored for the next start: {reason}")
            return self._arrange(weights)
        if mapped is None:
            return False
        self._hold(of_file, mapped)
        return self._arrange([weight for weight in weights if weight.source is None])

    def _entry(self, weights: Sequence[Weight]) -> Entry | None:
        """The cache entry of weights; None if there is nothing to write."""
        nbytes = sum(weight.nbytes for weight in weights)
        if not self.on_disk(nbytes):
            return None
        described = [(w.source, w.form) for w in weights if w.source is not None]
        try:
            return entry_of(sources_digest(), described, nbytes)
        except OSError:
            return None

    def _hold(self, weights: Sequence[Weight], mapped: Bytes) -> None:
        """Give each weight its part of a mapped entry."""
        self.files.guard(mapped)
        start = 0
        for weight in weights:
            weight.report()
            if weight.stack is not None:
                data = mapped[start : start + stack_bytes(weight.stack)]
                memory = self.arranger.memory.adopt(weight.buffer.name, data)
                weight.buffer.hold(arranged(weight.stack, memory))
            start += weight.nbytes
        for source in {w.source.mapping: w.source for w in weights if w.source}.values():
            source.whole.forget_pages()

    def _fill(self, weights: Sequence[Weight], target: Bytes) -> bool:
        """Arrange into the bytes of a new entry; False when a scale is not finite."""
        sizes = [weight.nbytes for weight in weights]
        starts = np.cumsum([0, *sizes]).tolist()
        return self._run(weights, [target.ctypes.data + start for start in starts[:-1]], target)

    def _arrange(self, weights: Sequence[Weight]) -> bool:
        """Arrange in memory of this process; False when a scale is not finite."""
        addresses = []
        for weight in weights:
            address = 0
            if weight.stack is not None:
                name, nbytes = weight.buffer.name, stack_bytes(weight.stack)
                memory = self.arranger.memory.allocate(name, nbytes, zeroed=False)
                weight.buffer.hold(arranged(weight.stack, memory))
                address = memory.address
            addresses.append(address)
        return self._run(weights, addresses, [weight.buffer for weight in weights])

    def _run(self, weights: Sequence[Weight], addresses: Sequence[int], used: Any) -> bool:
        """Check the weights and arrange each at its address, in memory that ``used`` owns."""
        flags = np.zeros(len(weights), np.uint32)
        try:
            for number, (weight, address) in enumerate(zip(weights, addresses, strict=True)):
                flag = flags[number:].ctypes.data
                for part, start in weight.parts():
                    packets = finite_packets(part.data, part.finite, flag)
                    if part.stack is not None:
                        more = arrange_packets(part.stack, address + start)
                        packets = np.concatenate((packets, more))
                    self.arranger.run(
                        packets, part.data.nbytes, (part, used, flags), part.forget_source
                    )
                weight.report()
        finally:
            self.arranger.finish()
        self.files.check()
        return not flags.any()
