"""What the simulated queue refuses; each packet as the tier sends it, one thing changed."""

import mmap

import numpy as np
import pytest

from accel.amd import pm4
from accel.amd.launcher import ARGUMENTS
from accel.amd.program import CODE_END
from accel.amd.sim.coherence import Coherence
from accel.amd.sim.command_processor import CommandProcessor
from accel.amd.sim.memory_view import GpuFault, MemoryView
from accel.packets.packet import ABSENT, PACKET
from tests.amd.code import shipped, wait_memory

NBYTES = 1 << 20
CODE, ARGUMENTS_AT, PACKET_AT, FENCE, X, Y, OUT = (0x1000 * n for n in (16, 32, 33, 34, 48, 49, 50))
COUNT = 64


class Machine:
    """Memory with the kernel of ADD, its arguments and operands, and a queue."""

    def __init__(self, coherence: Coherence | None = None) -> None:
        data = np.frombuffer(mmap.mmap(-1, NBYTES), np.uint8)
        self.base = int(data.ctypes.data)
        self.memory = MemoryView(data, self.base)
        self.memory.map(self.base, NBYTES, True)
        self.queue = CommandProcessor(self.memory, coherence)
        kernel = shipped("add")
        self.write(CODE, np.frombuffer(kernel.code, np.uint8))
        self.write(CODE + len(kernel.code), np.full(64, CODE_END, np.uint32))
        packet = np.zeros(1, PACKET)
        packet["operand"] = ABSENT
        packet["operand"][0, :3] = [self.base + at for at in (X, Y, OUT)]
        packet["stride"][0, :3] = COUNT
        packet["size"][0, :2] = 1, COUNT
        self.write(PACKET_AT, packet)
        arguments = np.zeros(1, ARGUMENTS)
        arguments["packets"], arguments["groups"] = self.base + PACKET_AT, 1
        self.write(ARGUMENTS_AT, arguments)
        self.x = np.arange(COUNT, dtype=np.float32)
        self.write(X, self.x)
        self.write(Y, self.x * 2)
        rsrc = kernel.rsrc1, kernel.rsrc2, kernel.rsrc3
        self.launch = pm4.Dispatch(self.base + CODE, self.base + ARGUMENTS_AT, rsrc, 128, 1)

    def write(self, at: int, values: np.ndarray) -> None:
        self.memory.data[at : at + values.nbytes] = values.view(np.uint8).reshape(-1)

    @property
    def result(self) -> np.ndarray:
        return self.memory.data[OUT : OUT + 4 * COUNT].view(np.float32)

    def packets(self) -> pm4.Words:
        writer = pm4.Writer()
        writer.put(pm4.acquire_memory())
        writer.dispatch(self.launch)
        writer.put(pm4.release_memory(self.base + FENCE, 5))
        return writer.words


def test_a_launch_and_its_fence():
    machine = Machine()
    words = [pm4.PADDING, *machine.packets()]
    assert machine.queue.run(words) == len(words)
    assert np.array_equal(machine.result, 3 * machine.x)
    assert int(machine.memory.data[FENCE : FENCE + 8].view(np.uint64)[0]) == 5
    assert machine.queue.launches == 1


def test_a_queue_waits_until_memory_says_so():
    machine = Machine()
    words = [*wait_memory(machine.base + FENCE, 1), *machine.packets()]
    assert machine.queue.run(words) == 0
    machine.memory.data[FENCE] = 1
    assert machine.queue.run(words) == len(words)


def changed(words: pm4.Words, old: int, new: int) -> pm4.Words:
    """The first word that is ``old`` replaced."""
    index = words.index(old)
    return [*words[:index], new, *words[index + 1 :]]


REFUSED = {
    "opcode": (0xC0031500, 0xC0031600, "opcode 0x16 is unknown"),
    "type": (0xC0031500, 0x80000000, "not of type 3"),
    "count": (0xC0064900, 0xC0054900, "RELEASE_MEM has a count of 5"),
    "wave64": (pm4.WAVE32, 0x0005, "waves of 32"), "scratch": (None, 1, "RSRC2"),
    "space": (0x21B, 0x3FE, "leaves its space"), "registers": (0x20C, 0x300, "0x20c was never set"),
    "items": (128, 2048, "work-groups of"), "uneven": (128, 100, "work-groups of"),
    "whole": (0xFF, 0, "less than the whole memory"),
    "interrupt": (pm4.DATA_64, pm4.DATA_64 | 2 << 24, "RELEASE_MEM"),
    "fence": (pm4.FENCE_EVENT | pm4.RELEASE_CACHES, 0x2F, "RELEASE_MEM"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    machine = Machine()
    old, new, problem = REFUSED[name]
    words = machine.packets()
    if old is None:
        rsrc2 = machine.launch.rsrc[1]
        old, new = rsrc2, rsrc2 | 1
    with pytest.raises(GpuFault, match=problem):
        machine.queue.run(changed(words, old, new))


def test_a_cut_packet_is_refused():
    machine = Machine()
    with pytest.raises(GpuFault, match="past the end"):
        machine.queue.run(machine.packets()[:-1])


def test_memory_that_is_not_mapped_is_named():
    """Code, arguments, fence, and what a lane loads."""
    for at, problem in (
        (CODE, "code"),
        (ARGUMENTS_AT, "kernel arguments"),
        (FENCE, "RELEASE_MEM"),
        (X, r"launch 1 \(code at \w+\): address \w+ is not mapped"),
    ):
        machine = Machine()
        machine.memory.map(machine.base + at, 1, False)
        with pytest.raises(GpuFault, match=problem):
            machine.queue.run(machine.packets())


def test_an_indirect_buffer_is_not_one_inside_another():
    machine = Machine()
    inner = pm4.indirect_buffer(machine.base + FENCE, 4)
    machine.write(FENCE, np.array(inner, np.uint32))
    with pytest.raises(GpuFault, match="inside an indirect buffer"):
        machine.queue.run(pm4.indirect_buffer(machine.base + FENCE, 4))


@pytest.mark.parametrize(
    ("between", "problem"),
    [
        ([], "without CS_PARTIAL_FLUSH"),
        (pm4.acquire_memory(), "without CS_PARTIAL_FLUSH"),
        (pm4.wait_for_launches(), "without ACQUIRE_MEM"),
        ([*pm4.acquire_memory(), *pm4.wait_for_launches()], "without ACQUIRE_MEM"),
        ([*pm4.wait_for_launches(), *pm4.acquire_memory(pm4.ACQUIRE_LEVEL)], ""),
    ],
    ids=["nothing", "acquire", "flush", "wrong order", "both"],
)
def test_a_launch_that_reads_too_early_is_noticed(between, problem):
    """The second launch reads what the first one wrote: x is where the sum is."""
    machine = Machine(Coherence(NBYTES // 4))
    writer = pm4.Writer()
    writer.dispatch(machine.launch)
    machine.queue.run([*pm4.acquire_memory(), *writer.words])
    assert PACKET.fields is not None
    operand = PACKET_AT + PACKET.fields["operand"][1]
    machine.write(operand, np.array([machine.base + OUT], np.uint64))
    words = [*between, *writer.words]
    if problem:
        with pytest.raises(GpuFault, match=problem):
            machine.queue.run(words)
    else:
        machine.queue.run(words)
        assert np.array_equal(machine.result, 5 * machine.x)


def test_results_that_were_not_written_back_are_not_signalled():
    machine = Machine(Coherence(NBYTES // 4))
    event = pm4.FENCE_EVENT | pm4.RELEASE_CACHES
    with pytest.raises(GpuFault, match="written back"):
        machine.queue.run(changed(machine.packets(), event, event & ~pm4.RELEASE_GL2_WB))
