"""The packet tests, and traces of what they send: golden, replayed, spoiled."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from accel.amd import pm4
from accel.amd.device import Device
from accel.amd.launcher import PlannedLaunch, Recording, StepAddresses
from accel.amd.packet_check import TESTS, packet_tests
from accel.amd.pm4 import Opcode
from accel.amd.program import LoadedKernel, Modules
from accel.amd.queue import Queue
from accel.amd.runtime import DRIVERS
from accel.amd.sim.command_processor import CommandProcessor
from accel.amd.sim.fake_kernel import FakeKernel
from accel.amd.sim.memory_view import GpuFault, MemoryView
from accel.amd.tier import AmdTier
from accel.amd.tools import trace
from accel.amd.tools.trace import Trace, Tracer, load_trace, packets_of, replay, shown
from accel.packets.ops import TABLE
from contract.errors import CodecError, TierUnavailable
from contract.kernel import GpuTarget, KernelHeader
from tests.amd.code import wait_memory


def traced(tier: str, most: int = len(TESTS)) -> Trace:
    """What the first of the packet tests send."""
    kernel = FakeKernel()
    device = Device(kernel, DRIVERS[tier](kernel, ""))
    queue = Queue(device)
    tracer = Tracer(device, queue)
    tracer.attach()
    for _, result in zip(range(most), packet_tests(device, queue, Modules(device)), strict=False):
        assert not result.problem
    queue.close()
    device.close()
    assert kernel.leaked == []
    return tracer.trace


def emitted(found: Trace) -> set[str]:
    """Names of packets in rings and buffers."""
    return {line.split()[0] for line in trace.listing(found) if not line.endswith(":")}


def test_every_packet_the_tiers_send_is_tried(name):
    """All opcodes but those of the other tier, and those that only tests send."""
    elsewhere = {"NOP", "WAIT_REG_MEM", "PROTECTED_FENCE_SIGNAL"}
    assert emitted(traced(name)) == {opcode.name for opcode in Opcode} - elsewhere


BROKEN = {
    "RELEASE_MEM": "RELEASE_MEM writes 64 bits",
    "INDIRECT_BUFFER": "INDIRECT_BUFFER executes words",
    "SET_SH_REG": "SET_SH_REG and DISPATCH_DIRECT",
    "DISPATCH_DIRECT": "SET_SH_REG and DISPATCH_DIRECT",
    "COND_EXEC": "COND_EXEC skips packets",
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_packet_that_is_not_understood(broken, name, monkeypatch):
    """Negative control: firmware that passes over one; the tier does not start, names the test,
    and leaves nothing."""
    packet = CommandProcessor._packet

    def ignoring(self: CommandProcessor, opcode: Opcode, body: list[int], nested: bool) -> int:
        fence = opcode is Opcode.RELEASE_MEM and body[4:6] == [1, 0]
        if opcode.name == broken and not fence:
            return 0
        return packet(self, opcode, body, nested)

    monkeypatch.setattr(CommandProcessor, "_packet", ignoring)
    monkeypatch.setattr("accel.amd.packet_check.SECONDS", 0.05)
    kernel = FakeKernel()
    with pytest.raises(TierUnavailable, match=f"{BROKEN[broken]}.*see zinc-rt pm4-test"):
        AmdTier(kernel=kernel, tier=name)
    assert kernel.leaked == []


def test_a_fence_of_the_driver_that_does_not_come(monkeypatch):
    monkeypatch.setattr("accel.amd.sim.fake_gpu.FakeQueue.signal", lambda self: None)
    with pytest.raises(TierUnavailable, match="PROTECTED_FENCE_SIGNAL"):
        AmdTier(kernel=FakeKernel(), tier="t2")


def test_a_trace_is_replayed_byte_for_byte(name, tmp_path):
    """From its file, in memory that is its own; and made again it is the same."""
    found = traced(name)
    path = tmp_path / "packets.trace"
    found.save(path)
    loaded = load_trace(path)
    assert replay(loaded) is None
    again = traced(name)
    for one, other in zip(loaded.submissions, again.submissions, strict=True):
        assert all(np.array_equal(getattr(one, f), getattr(other, f)) for f in one.__slots__)


def changed(found: Trace, number: int, **fields: np.ndarray) -> Trace:
    """The trace with other fields of submission ``number``."""
    kept = list(found.submissions)
    kept[number] = replace(kept[number], **fields)
    return Trace(found.tier, found.device, found.flags, kept)


def test_a_trace_that_differs(name):
    """Negative controls: a word, a byte of memory, a digest, a cut packet, a wait."""
    found = traced(name, 4)
    assert replay(found) is None
    first = found.submissions[0]
    words = first.words.copy()
    words[5] ^= 1
    contents = first.contents.copy()
    contents[-1, -1] ^= 1
    wait = wait_memory(int(first.ranges[0, 0]), 0xFFFFFFFF)
    for other, problem in (
        (changed(found, 0, words=words), "are not those of the trace"),
        (changed(found, 0, contents=contents), "are not those of the trace"),
        (changed(found, 3, digests=found.submissions[3].digests ^ 1), "are not those"),
        (changed(found, 0, words=first.words[:-1]), "past the end"),
        (changed(found, 0, words=np.array(wait, np.uint32)), "waits for memory at word 0"),
    ):
        difference = replay(other)
        assert difference is not None
        assert problem in difference.problem


def test_what_is_no_trace(tmp_path):
    path = tmp_path / "other"
    for data in (b"", b"PK\3\4", b"x" * 100):
        path.write_bytes(data)
        with pytest.raises(CodecError, match="is no trace of packets"):
            load_trace(path)
    np.savez(path.with_suffix(".npz"), format=np.array([9, 0]), names=np.array(["a", "b"]))
    with pytest.raises(CodecError, match="format 9, not 1"):
        load_trace(path.with_suffix(".npz"))


def made_up(name: str, at: int) -> LoadedKernel:
    """A kernel of no code; ``at`` chooses its address and registers."""
    header = KernelHeader(
        name,
        GpuTarget.GFX1201,
        b"\0" * 4,
        push_constant_bytes=32,
        subgroup_size=32,
        workgroup_size=(128, 1, 1),
        rsrc1=0x600F0000 + at,
        rsrc2=0x84,
        user_sgpr_count=2,
    )

    class Code:
        address = 0x7F00_8000_0000 + 0x1000 * at

    return LoadedKernel(header, Code())  # type: ignore[arg-type]


def step_stream(tier: str) -> list[str]:
    """What one step of three launches sends, of which the last needs the others."""
    kernel = FakeKernel()
    device = Device(kernel, DRIVERS[tier](kernel, ""))
    queue = Queue(device)
    one, other, op = made_up("one", 1), made_up("other", 2), TABLE["add"]
    launches = [
        PlannedLaunch(one, op, 4, wait=False, work=1),
        PlannedLaunch(one, op, 2, wait=False, work=1),
        PlannedLaunch(other, op, 1, wait=True, work=1),
    ]
    recording = Recording(device, "step", launches, 0x7F00_9000_0000, 64, queue.go_address)
    recording.bind(StepAddresses(0x7F00_A000_0000))
    ring = [
        *queue.indirect_buffer(recording.buffer, recording.length),
        *pm4.release_memory(queue.fence_address, 1),
    ]
    offset = recording.buffer - recording.allocation.address
    inner = recording.allocation.host[offset:].view(np.uint32).tolist()
    lines = [*named("ring", ring), *named("buffer", inner)]
    arguments = recording.allocation.host[: 3 * 32].view(np.uint32).tolist()
    lines.append(shown("arguments", arguments))
    device.free(recording.allocation)
    queue.close()
    device.close()
    return lines


def named(where: str, words: Sequence[int]) -> list[str]:
    """Its packets, a line each."""
    return [f"{where}: {shown(*packet)}" for packet in packets_of(words)]


def test_a_step_word_for_word(name, snapshot):
    """The stream of both tiers; with pytest --snapshot-update it is written anew."""
    assert step_stream(name) == snapshot


def test_a_buffer_begun_is_ended_first():
    """A queue that does a packet at a time goes on inside the buffer."""
    found = traced("t1", 2)
    memory = trace._memory(found)
    first = found.submissions[1]
    processor = CommandProcessor(memory)
    for address, nbytes in first.ranges.tolist():
        memory.map(address, nbytes, True)
    for submission in found.submissions[:2]:
        for address, page in zip(submission.pages.tolist(), submission.contents, strict=True):
            memory.bytes_at(address, 4096, "page")[:] = page
    words = first.words.tolist()
    assert processor.run(words, 1) == 4
    assert processor.inside
    assert processor.run(words[4:], 1) == 0
    assert not processor.inside


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([*pm4.conditional(0x2000, 1), pm4.PADDING, pm4.PADDING], ""),
        (pm4.conditional(0x2000, 3) + pm4.wait_for_launches(), "midst of a packet"),
        (pm4.conditional(0x2000, 1) + pm4.wait_for_launches(), "midst of a packet"),
        (pm4.conditional(0x2002, 1), "COND_EXEC 0x2002"),
        (pm4.conditional(1 << 40, 1), "COND_EXEC: 4 bytes"),
        (pm4.signal_driver(), "belongs to user queues"),
    ],
)
def test_conditions_that_are_refused(words, problem):
    memory = MemoryView(np.zeros(1 << 14, np.uint8), 0)
    memory.map(0, 1 << 14, True)
    processor = CommandProcessor(memory)
    if not problem:
        assert processor.run(words) == len(words)
        return
    with pytest.raises(GpuFault, match=problem):
        processor.run(words)
