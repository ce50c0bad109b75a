"""Tests every kind of packet the tiers send, one at a time, before a model depends on it.

Each test is a few packets with a known effect on memory. A queue that fails a test is not used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accel.amd import pm4
from accel.amd.device import Device
from accel.amd.launcher import ARGUMENTS, dispatch_of
from accel.amd.program import Modules
from accel.amd.queue import RING_BYTES, Queue
from accel.kernels.source import Module
from accel.packets.binding import lone_packet
from contract.arrays import Bytes, Floats
from contract.errors import DeviceLost, TierUnavailable

SECONDS = 5.0
"""Longest duration of a test."""
COUNT = 64
ARGUMENTS_AT, PACKET_AT, X, Y, OUT, WORD, BUFFER = (n << 10 for n in range(7))
NBYTES = 16 << 10
VALUE = 0x0123_4567_89AB_CDEF


@dataclass(frozen=True, slots=True)
class Bench:
    """A queue and memory to test it with: a sum of two vectors, a word, an indirect buffer."""

    queue: Queue
    address: int
    host: Bytes
    sum: pm4.Dispatch

    def array(self, at: int) -> Floats:
        """One of the vectors."""
        return self.host[at : at + 4 * COUNT].view(np.float32)

    @property
    def word(self) -> NDArray[np.uint64]:
        """The word that packets write and read."""
        return self.host[WORD : WORD + 8].view(np.uint64)

    def fill(self, first: float) -> None:
        """Write new vectors and clear the results."""
        self.array(X)[:] = np.arange(COUNT) + first
        self.array(Y)[:] = 2
        self.array(OUT)[:] = -1
        self.word[0] = 0

    def aim(self, source: int, target: int) -> None:
        """Set the first operand and the result of the sum; the second operand is Y."""
        packet = lone_packet([self.address + at for at in (source, Y, target)], (1, COUNT))
        packet["stride"][0, :3] = COUNT
        self.host[PACKET_AT : PACKET_AT + packet.nbytes] = packet.view(np.uint8)

    def run(self, *packets: Sequence[int]) -> None:
        """Submit packets and return when they have ended. Raises DeviceLost."""
        words = [word for packet in packets for word in packet]
        self.queue.wait(self.queue.submit(words), SECONDS)

    def write(self, value: int) -> pm4.Words:
        """A packet that writes the word."""
        return self.queue.release(self.address + WORD, value)

    def launch(self) -> pm4.Words:
        """The packets of the sum, with all its registers."""
        writer = pm4.Writer()
        writer.dispatch(self.sum)
        return writer.words

    def buffer(self, words: Sequence[int]) -> pm4.Words:
        """An indirect buffer with these words."""
        self.host[BUFFER : BUFFER + 4 * len(words)].view(np.uint32)[:] = words
        return self.queue.indirect_buffer(self.address + BUFFER, len(words))


def _fence(bench: Bench) -> bool:
    """RELEASE_MEM writes 64 bits once everything before it has ended."""
    bench.run(bench.write(VALUE))
    return int(bench.word[0]) == VALUE


def _buffer(bench: Bench) -> bool:
    """INDIRECT_BUFFER executes words elsewhere and then returns."""
    bench.run(bench.buffer(bench.write(1)), bench.buffer(bench.write(1)))
    return int(bench.word[0]) == 1


def _launch(bench: Bench) -> bool:
    """SET_SH_REG and DISPATCH_DIRECT run a kernel with its arguments."""
    bench.run(bench.queue.acquire(), bench.launch())
    return bool(np.array_equal(bench.array(OUT), bench.array(X) + 2))


def _registers_last(bench: Bench) -> bool:
    """Registers keep their values from one launch to the next."""
    writer = pm4.Writer()
    writer.dispatch(bench.sum)
    before = len(writer.words)
    writer.dispatch(bench.sum)
    bench.run(bench.queue.acquire(), writer.words)
    bench.array(OUT)[:] = -1
    bench.run(bench.queue.acquire(), writer.words[before:])
    return bool(np.array_equal(bench.array(OUT), bench.array(X) + 2))


def _host_writes(bench: Bench) -> bool:
    """ACQUIRE_MEM of all caches shows launches what the host wrote in between."""
    bench.run(bench.queue.acquire(), bench.launch())
    bench.array(X)[:] += 100
    bench.run(bench.queue.acquire(), bench.launch())
    return bool(np.array_equal(bench.array(OUT), bench.array(X) + 2))


def _dependent(bench: Bench) -> bool:
    """EVENT_WRITE and ACQUIRE_MEM separate launches of which one reads what the other wrote."""
    bench.array(OUT)[:] = bench.array(X)
    bench.aim(OUT, OUT)
    bench.run(bench.queue.acquire(), *[bench.launch(), bench.queue.acquire(level=True)] * 8)
    return bool(np.array_equal(bench.array(OUT), bench.array(X) + 16))


def _cond_exec_runs(bench: Bench) -> bool:
    """COND_EXEC executes packets while its word is not 0."""
    return _conditional(bench, 1) == 1


def _cond_exec_skips(bench: Bench) -> bool:
    """COND_EXEC skips packets while its word is 0."""
    return _conditional(bench, 0) == 0


def _conditional(bench: Bench, go: int) -> int:
    inner = bench.write(1)
    bench.array(X).view(np.uint32)[0] = go
    bench.run(bench.buffer([*pm4.conditional(bench.address + X, len(inner)), *inner]))
    return int(bench.word[0])


def _straddling(bench: Bench) -> bool:
    """Packets continue at the beginning of the ring when they meet its end."""
    packet = bench.write(3)
    times = RING_BYTES // 4 // 4 // len(packet)
    for _ in range(5):
        bench.word[0] = 0
        bench.run(packet * times)
        if int(bench.word[0]) != 3:
            return False
    return True


def _driver_fence(bench: Bench) -> bool:
    """PROTECTED_FENCE_SIGNAL signals the driver's fence, where the driver has one."""
    try:
        bench.queue.settle()
    except OSError:
        return False
    return True


TESTS: Sequence[Callable[[Bench], bool]] = (
    *(
        _fence,
        _buffer,
        _launch,
        _registers_last,
        _host_writes,
        _dependent,
        _cond_exec_runs,
        _cond_exec_skips,
        _straddling,
    ),
    _driver_fence,
)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one test: what it proves, and the problem, empty if there is none."""

    proves: str
    problem: str


def packet_tests(device: Device, queue: Queue, modules: Modules) -> Iterator[Result]:
    """The results of all tests in order, up to one after which the queue cannot be used. Raises
    OutOfMemory."""
    kernel = modules.kernel(Module("add"))
    memory = device.allocate("packet tests", NBYTES, device=False)
    with ExitStack() as undo:
        undo.callback(device.free, memory)
        arguments = np.zeros(1, ARGUMENTS)
        arguments["packets"], arguments["groups"] = memory.address + PACKET_AT, 1
        memory.host[: arguments.nbytes] = arguments.view(np.uint8)
        dispatch = dispatch_of(kernel, memory.address + ARGUMENTS_AT, 1)
        bench = Bench(queue, memory.address, memory.host, dispatch)
        for number, test in enumerate(TESTS):
            assert test.__doc__ is not None
            proves = " ".join(test.__doc__.split())
            bench.fill(number)
            bench.aim(X, OUT)
            try:
                yield Result(proves, "" if test(bench) else "memory is not as it should be")
            except DeviceLost as error:
                yield Result(proves, str(error))
                return


def check_packets(device: Device, queue: Queue, modules: Modules) -> None:
    """Raises TierUnavailable naming the first failed test."""
    for result in packet_tests(device, queue, modules):
        if result.problem:
            reason = f"{device.name}: {result.problem} where {result.proves[:-1]}"
            raise TierUnavailable(device.tier, reason, "see zinc-rt pm4-test")
