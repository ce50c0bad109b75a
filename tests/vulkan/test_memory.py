"""Arenas and allocations in them, transfers, and memory that runs out anywhere."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from accel.kernels.source import Traits
from accel.packets.arenas import STAGING_BYTES
from accel.packets.packet import ALIGNMENT
from accel.vulkan.api import Vulkan
from accel.vulkan.device import Instance
from accel.vulkan.memory import Memory
from accel.vulkan.queue import Queue
from contract.dtypes import F32
from contract.errors import OutOfMemory
from contract.ir.graph import GraphBuilder
from contract.ir.nodes import BufferDecl, BufferKind
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from tests.run_graph import run_graph
from tests.vulkan.conftest import Library

CAPACITY = 64 << 20
STATE = BufferDecl("state", BufferKind.STATE, F32, (4, 4))
WEIGHT = BufferDecl("blk.0.weight", BufferKind.WEIGHT, F32, (64, 64), "blk.0.weight")


@pytest.fixture(params=[True, False], ids=["shared", "own"])
def memory(vulkan, request) -> Iterator[Memory]:
    with Instance(vulkan) as instance:
        queue = Queue(vulkan, instance.device())
        made = Memory(queue, CAPACITY, request.param)
        yield made
        queue.finish()
        made.close()
        queue.close(False)


def test_what_was_written_is_read(memory):
    """More than both staging buffers hold, from any byte on; other memory stays as it was."""
    data = np.random.default_rng(0).integers(0, 256, 2 * STAGING_BYTES + 1000, np.uint8)
    around = memory.allocate("around", 512)
    allocation = memory.adopt("data", data)
    assert np.array_equal(memory.read(allocation, 3, data.nbytes - 3), data[3:])
    memory.write(allocation, 77, data[:100])
    assert np.array_equal(memory.read(allocation, 77, 100), data[:100])
    assert not memory.read(around, 0, 512).any()
    assert allocation.address % ALIGNMENT == around.address % ALIGNMENT == 0


def test_mapped_memory_is_read_and_written(memory):
    """What lies there is seen; what else is written goes to the mapped bytes too."""
    allocation = memory.adopt("data", np.arange(64, dtype=np.uint8))
    mapped = memory.map(allocation)
    assert np.array_equal(mapped, np.arange(64, dtype=np.uint8))
    memory.write(allocation, 10, np.full(4, 99, np.uint8))
    assert np.array_equal(mapped[10:14], np.full(4, 99))
    assert np.array_equal(memory.read(allocation, 8, 4), [8, 9, 99, 99])


def test_everything_comes_back(memory):
    allocations = [memory.allocate(str(n), 100 << n) for n in range(12)]
    assert memory.used == sum(allocation.nbytes for allocation in allocations)
    for allocation in allocations[::2] + allocations[1::2]:
        memory.free(allocation)
    assert memory.used == memory.held == 0


def test_what_is_expected_gets_one_arena(memory):
    """So that a plan is met exactly."""
    memory.expect(30 * 1024)
    for number in range(30):
        memory.allocate(str(number), 1000)
    assert memory.held == 30 * 1024


def test_more_than_there_is_names_the_buffer(memory):
    first = memory.allocate("first", 40 << 20)
    with pytest.raises(OutOfMemory, match=r"^out of memory for second: need 41\.9 MB"):
        memory.allocate("second", 40 << 20)
    memory.free(first)
    memory.free(memory.allocate("second", 40 << 20))


def failing(library: Any, name: str, at: int, result: int) -> None:
    """Have the ``at``-th call of a function give ``result``, and the later ones too."""
    calls = 0

    def counted(real: Any, *arguments: Any) -> int:
        nonlocal calls
        calls += 1
        return result if calls > at else real(*arguments)

    library.instead[name] = counted


@pytest.mark.parametrize("function", ["vkAllocateMemory", "vkCreateBuffer", "vkMapMemory"])
@pytest.mark.parametrize("shared", [True, False])
def test_memory_the_driver_refuses_names_the_buffer(faulty, open_vulkan, function, shared):
    """Wherever it runs out; nothing is kept, and with memory again the tier goes on."""
    library = faulty.library
    assert isinstance(library, Library)
    tier = open_vulkan(faulty, shared=shared)
    before = tier._memory.used
    data = np.zeros((64, 256), np.uint8)
    exhausted = faulty.constant("ERROR_OUT_OF_DEVICE_MEMORY")
    named: list[str] = []
    for at in range(6):
        failing(library, function, at, exhausted)
        try:
            tier.free(tier.alloc(STATE, 20 << 20))
            tier.free(tier.upload(WEIGHT, data))
        except OutOfMemory as error:
            named.append(str(error))
        finally:
            library.instead.clear()
        assert tier._memory.used == before
    prefixes = "out of memory for state", "out of memory for blk.0"
    assert all(message.startswith(prefixes) for message in named)
    assert named or (function == "vkMapMemory" and not shared)
    tier.free(tier.alloc(STATE, 20 << 20))


def with_small_buffers(vulkan: Vulkan, **instead: Any) -> Vulkan:
    """A library whose device's buffers may have 1 MiB."""

    def small(real: Any, device: Any, properties: Any) -> None:
        real(device, properties)
        if properties.pNext != vulkan.ffi.NULL:
            twelve = vulkan.ffi.cast("VkPhysicalDeviceVulkan12Properties *", properties.pNext)
            if twelve.pNext != vulkan.ffi.NULL:
                four = "VkPhysicalDeviceMaintenance4Properties *"
                vulkan.ffi.cast(four, twelve.pNext).maxBufferSize = 1 << 20

    told = {"vkGetPhysicalDeviceProperties2": small, **instead}
    return Vulkan(vulkan.ffi, Library(vulkan.library, told))


@pytest.mark.parametrize("shared", [True, False])
def test_a_tensor_larger_than_a_buffer_may_be_lies_in_several(vulkan, open_vulkan, shared):
    """None of which is larger; bytes on both sides of a border are written, read and zeroed."""
    sizes: dict[Any, int] = {}
    inside: list[bool] = []

    def created(real: Any, device: Any, information: Any, allocator: Any, buffer: Any) -> int:
        result = int(real(device, information, allocator, buffer))
        sizes[buffer[0]] = int(information.size)
        return result

    def copied(real: Any, commands: Any, read: Any, written: Any, count: int, region: Any) -> None:
        inside.append(region.srcOffset + region.size <= sizes[read])
        inside.append(region.dstOffset + region.size <= sizes[written])
        real(commands, read, written, count, region)

    def filled(real: Any, commands: Any, buffer: Any, start: int, size: int, word: int) -> None:
        inside.append(start + size <= sizes[buffer])
        real(commands, buffer, start, size, word)

    watched = {"vkCreateBuffer": created, "vkCmdCopyBuffer": copied, "vkCmdFillBuffer": filled}
    tier = open_vulkan(with_small_buffers(vulkan, **watched), shared=shared)
    nbytes = (5 << 19) + 300
    state = tier.alloc(STATE, nbytes)
    assert not tier.read(state, 0, nbytes).any()
    data = np.random.default_rng(2).integers(0, 256, nbytes, np.uint8)
    tier.write(state, 0, data)
    assert (tier.read(state, 0, nbytes) == data).all()
    border = (1 << 20) - 100
    tier.write(state, border, data[:200])
    assert (tier.read(state, border, 200) == data[:200]).all()
    assert (tier.read(state, border - 9, 9) == data[border - 9 : border]).all()
    assert max(sizes.values()) == 1 << 20
    assert all(inside)
    assert bool(inside) != shared
    assert state.allocation is not None
    assert len(state.allocation.arena.handle.buffers) == 3
    tier.free(state)


def test_a_matrix_in_several_buffers_is_multiplied(vulkan, open_vulkan):
    """By kernels that know addresses alone."""
    tier = open_vulkan(with_small_buffers(vulkan), shared=False)
    rows, columns = 1500, 512
    builder = GraphBuilder("large")
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", columns))
    weight = builder.buffer("w", BufferKind.WEIGHT, F32, (rows, columns), "w")
    builder.emit(Opcode.MATMUL, y=builder.output("y", "tokens", rows), x=x, weight=weight)
    rng = np.random.default_rng(4)
    given = {"x": rng.integers(-9, 9, (1, columns)), "w": rng.integers(-9, 9, (rows, columns))}
    contents = {name: array.astype(np.float32) for name, array in given.items()}
    found = run_graph(tier, builder.build(), ShapeKey(1, 0), contents)
    expected = contents["x"] @ contents["w"].T
    assert (found["y"].view(np.float32).reshape(1, rows) == expected).all()


def test_buffers_that_lie_apart_are_refused(vulkan, open_vulkan):
    """The device's limit, not what is free, is named as what there is."""

    def apart(real: Any, device: Any, information: Any) -> int:
        return int(real(device, information)) + (1 << 40) * int(information.buffer in seen)

    seen: set[Any] = set()

    def bound(real: Any, device: Any, buffer: Any, memory: Any, offset: int) -> int:
        if offset:
            seen.add(buffer)
        return int(real(device, buffer, memory, offset))

    instead = {"vkGetBufferDeviceAddress": apart, "vkBindBufferMemory": bound}
    tier = open_vulkan(with_small_buffers(vulkan, **instead), shared=False, traits=Traits())
    with pytest.raises(OutOfMemory, match="state: need") as caught:
        tier.alloc(STATE, 2 << 20)
    assert caught.value.free == 1 << 20
    tier.free(tier.alloc(STATE, 1 << 20))


def test_other_programs_memory_is_seen(vulkan, open_vulkan):
    """Where the driver says what is left, that is what is available."""

    def told(real: Any, device: Any, properties: Any) -> None:
        real(device, properties)
        if properties.pNext != vulkan.ffi.NULL:
            kind = "VkPhysicalDeviceMemoryBudgetPropertiesEXT *"
            budget = vulkan.ffi.cast(kind, properties.pNext)
            for heap in range(16):
                budget.heapBudget[heap], budget.heapUsage[heap] = 5 << 20, 2 << 20

    def listed(real: Any, device: Any, layer: Any, count: Any, found: Any) -> int:
        if found == vulkan.ffi.NULL:
            result = real(device, layer, count, found)
            count[0] += 1
            return int(result)
        count[0] -= 1
        result = real(device, layer, count, found)
        vulkan.ffi.memmove(found[count[0]].extensionName, b"VK_EXT_memory_budget\0", 21)
        count[0] += 1
        return int(result)

    def opened(real: Any, device: Any, information: Any, *rest: Any) -> int:
        information.enabledExtensionCount -= 1
        return int(real(device, information, *rest))

    instead = {
        "vkGetPhysicalDeviceMemoryProperties2": told,
        "vkEnumerateDeviceExtensionProperties": listed,
        "vkCreateDevice": opened,
    }
    tier = open_vulkan(Vulkan(vulkan.ffi, Library(vulkan.library, instead)))
    assert "memory budget" in tier.device.features
    assert tier.available_bytes == 3 << 20
