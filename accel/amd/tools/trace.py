"""Records what goes through a queue, to be replayed elsewhere.

A trace has the words of every submission, the memory that the host changed before it, and a digest
of all memory after it. It can be recorded on any GPU and is replayed by the simulated command
processor: where a digest differs, the GPU and its simulation disagree. While a queue is traced,
every submission is awaited and all memory compared, so traces are for small programs."""

from __future__ import annotations

import hashlib
import mmap
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from accel.amd import pm4
from accel.amd.device import Allocation, Device
from accel.amd.generation import BY_ARCHITECTURE, GFX12
from accel.amd.kernel import MAP_NORESERVE
from accel.amd.queue import Queue
from accel.amd.topology import PAGE
from contract.arrays import Bytes
from contract.cached_files import writing
from contract.errors import CodecError

if TYPE_CHECKING:
    from accel.amd.sim.memory_view import MemoryView

FORMAT = 1
MAX_SPAN = 1 << 40
"""Most bytes between a trace's first address and its last."""
SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Submission:
    """``words`` of the ring; ``ranges`` uint64[n, 2] are addresses and bytes of all allocations,
    ``pages`` the addresses of changed pages and ``contents`` uint8[pages, 4096] their bytes;
    ``digests`` uint8[n, 32] those of the allocations afterwards."""

    words: NDArray[np.uint32]
    ranges: NDArray[np.uint64]
    pages: NDArray[np.uint64]
    contents: Bytes
    digests: Bytes


@dataclass(slots=True)
class Trace:
    """A recorded queue; ``flags`` are those of its INDIRECT_BUFFER packets, ``architecture`` is
    that of the code."""

    tier: str
    device: str
    flags: int
    submissions: list[Submission] = field(default_factory=list)
    architecture: str = GFX12.cpu

    def save(self, path: Path) -> None:
        """Write the trace to one file."""
        arrays: dict[str, NDArray[np.generic]] = {
            "format": np.array([FORMAT, self.flags]),
            "names": np.array([self.tier, self.device, self.architecture]),
        }
        for n, submission in enumerate(self.submissions):
            for name in Submission.__slots__:
                arrays[f"{n:05}.{name}"] = getattr(submission, name)
        with writing(path) as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)


def load_trace(path: Path) -> Trace:
    """Read a trace. Raises CodecError for a file that is no trace, and OSError."""
    data = path.read_bytes()
    try:
        with np.load(BytesIO(data), allow_pickle=False) as arrays:
            version, flags = (int(value) for value in arrays["format"])
            if version != FORMAT:
                raise CodecError(f"{path}: format {version}, not {FORMAT}")
            tier, device, *architecture = (str(name) for name in arrays["names"])
            if not set(architecture) <= set(BY_ARCHITECTURE):
                raise CodecError(f"{path}: code of {architecture[0]}, which is not known")
            count = len({name.split(".")[0] for name in arrays.files} - {"format", "names"})
            submissions = [
                Submission(*(arrays[f"{n:05}.{name}"] for name in Submission.__slots__))
                for n in range(count)
            ]
    except (KeyError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise CodecError(f"{path} is no trace of packets: {error}") from None
    return Trace(tier, device, flags, submissions, *architecture)


class Tracer:
    """Records what goes through a queue from ``attach`` on."""

    def __init__(self, device: Device, queue: Queue) -> None:
        self._device = device
        self._queue = queue
        self._known: dict[int, Bytes] = {}
        flags = queue.indirect_buffer(0, 1)[3] & ~1
        self.trace = Trace(device.tier, device.name, flags, architecture=device.driver.architecture)
        self._before: tuple[list[Allocation], NDArray[np.uint64], Bytes]

    def attach(self) -> None:
        """Observe every submission of the queue."""
        self._queue.observer = self

    def before(self) -> None:
        """Record the pages that the host changed; nothing runs."""
        seen = [a for a in self._device.allocations if a.address not in self._queue.own_memory]
        pages: list[int] = []
        contents: list[Bytes] = []
        for allocation in seen:
            now = self._device.kernel.view(allocation.address, allocation.reserved)
            then = self._known.get(allocation.address)
            if then is None or then.nbytes != now.nbytes:
                then = np.zeros(now.nbytes, np.uint8)
            rows = now.reshape(-1, PAGE)
            changed = np.flatnonzero((rows != then.reshape(-1, PAGE)).any(axis=1))
            pages += (allocation.address + changed * PAGE).tolist()
            contents += list(rows[changed])
        gathered = np.array(contents, np.uint8).reshape(-1, PAGE)
        self._before = seen, np.array(pages, np.uint64), gathered

    def after(self, words: Sequence[int]) -> None:
        """Record a submission. Raises DeviceLost."""
        self._queue.wait(self._queue.number, SECONDS)
        seen, pages, contents = self._before
        ranges = np.array([(a.address, a.reserved) for a in seen], np.uint64).reshape(-1, 2)
        self._known = {
            a.address: self._device.kernel.view(a.address, a.reserved).copy() for a in seen
        }
        digests = _digests(self._known.values())
        recorded = Submission(np.array(words, np.uint32), ranges, pages, contents, digests)
        self.trace.submissions.append(recorded)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first submission after which memory differs, or that cannot be processed."""

    submission: int
    problem: str


def replay(trace: Trace) -> Difference | None:
    """Replay a trace on a simulated GPU, which no wheel has; None if every byte is the same."""
    from accel.amd.sim.command_processor import CommandProcessor
    from accel.amd.sim.memory_view import GpuFault

    memory: MemoryView | None = None
    for n, submission in enumerate(trace.submissions):
        if memory is None:
            memory = _memory(trace)
            processor = CommandProcessor(
                memory, buffer_flags=trace.flags, generation=BY_ARCHITECTURE[trace.architecture]
            )
            processor.signal = lambda: None
        memory.pages[1:] = False
        for address, nbytes in submission.ranges.tolist():
            memory.map(address, nbytes, True)
        for address, page in zip(submission.pages.tolist(), submission.contents, strict=True):
            memory.bytes_at(address, PAGE, "trace")[:] = page
        try:
            done = processor.run(submission.words.tolist())
        except GpuFault as fault:
            return Difference(n, str(fault))
        if done != len(submission.words):
            return Difference(n, f"waits for memory at word {done}")
        held = [
            memory.bytes_at(address, nbytes, "trace")
            for address, nbytes in submission.ranges.tolist()
        ]
        wrong = np.flatnonzero((_digests(held) != submission.digests).any(axis=1))
        if len(wrong):
            address, nbytes = submission.ranges[wrong[0]].tolist()
            return Difference(n, f"{nbytes} bytes at {address:#x} are not those of the trace")
    return None


def listing(trace: Trace) -> Iterator[str]:
    """The packets of every submission, one per line, and below INDIRECT_BUFFER the packets it
    contains."""
    pages: dict[int, Bytes] = {}
    for n, submission in enumerate(trace.submissions):
        pages |= zip(submission.pages.tolist(), submission.contents, strict=True)
        yield f"{n}:"
        for name, body in packets_of(submission.words.tolist()):
            yield f"    {shown(name, body)}"
            if name == pm4.Opcode.INDIRECT_BUFFER.name:
                inner = _words_at(pages, body[0] | body[1] << 32, body[2] & pm4.MAX_IB_WORDS)
                yield from (f"        {shown(*packet)}" for packet in packets_of(inner))


def packets_of(words: Sequence[int]) -> Iterator[tuple[str, list[int]]]:
    """Name and body of each packet; a number for an unknown one."""
    index = 0
    while index < len(words):
        header = words[index]
        count = 0 if header == pm4.PADDING else (header >> 16 & 0x3FFF) + 1
        opcode = header >> 8 & 0xFF
        known = opcode in pm4.Opcode.__members__.values()
        yield (
            pm4.Opcode(opcode).name if known else f"{opcode:#x}",
            list(words[index + 1 : index + 1 + count]),
        )
        index += 1 + count


def shown(name: str, body: Sequence[int]) -> str:
    """A packet as a line of text."""
    return " ".join((name, *(f"{word:x}" for word in body)))


def _words_at(pages: Mapping[int, Bytes], address: int, count: int) -> list[int]:
    """Words from the known pages, 0 elsewhere."""
    first = address // PAGE * PAGE
    empty = np.zeros(PAGE, np.uint8)
    end = address + 4 * count
    found = [pages.get(page, empty) for page in range(first, end, PAGE)]
    data = np.concatenate(found) if found else empty
    words: list[int] = data[address - first : end - first].view(np.uint32).tolist()
    return words


def _memory(trace: Trace) -> MemoryView:
    """Memory from the page before a trace's first address to its last."""
    from accel.amd.sim.memory_view import MemoryView

    ranges = np.concatenate([submission.ranges for submission in trace.submissions])
    first = int(ranges[:, 0].min()) - PAGE if len(ranges) else PAGE
    span = int(ranges.sum(axis=1).max()) - first if len(ranges) else PAGE
    if span > MAX_SPAN or first % PAGE or span % PAGE:
        raise CodecError(f"trace: addresses over {span} bytes from {first:#x}")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return MemoryView(np.frombuffer(mmap.mmap(-1, span, flags=flags), np.uint8), first)


def _digests(parts: Iterable[Bytes]) -> Bytes:
    found = [hashlib.sha256(part.tobytes()).digest() for part in parts]
    return np.frombuffer(b"".join(found), np.uint8).reshape(-1, 32)
