"""The simulated GPU notices what is done wrong: each rule it knows is broken once."""

from collections.abc import Callable
from typing import Any

import pytest

from accel.intel.device import Device, chosen_device
from accel.intel.launcher import launch_packet, set_arguments
from accel.intel.memory import Memory
from accel.intel.program import Program
from accel.intel.queue import Events, Queue
from accel.intel.tier import IntelTier
from accel.kernels.source import Module
from accel.packets.arenas import ArenaKind
from accel.packets.binding import lone_packet
from tests.doubling import Doubling, inputs_of, values_of
from tests.intel.simulated import Simulated

ADD = Module("add")


class Bench:
    """An open tier, and raw calls beside it."""

    def __init__(self, gpu: Simulated, tier: IntelTier) -> None:
        runtime = tier._runtime
        self.gpu, self.tier = gpu, tier
        self.queue: Queue = runtime.queue
        self.memory: Memory = runtime.memory
        self.program: Program = runtime.program
        self.device: Device = self.queue.device
        self.null = gpu.zero.ffi.NULL
        self.events = Events(self.queue, 1)
        self.list = self.queue.new_list()

    def raw(self, name: str, *arguments: Any) -> int:
        """The result of ``ze<name>``, whatever it is."""
        return int(getattr(self.gpu.zero.library, f"ze{name}")(*arguments))

    def append(self, name: str, *arguments: Any) -> int:
        """Append a command that neither waits nor signals."""
        name = f"CommandListAppend{name}"
        return self.raw(name, self.list, *arguments, self.null, 0, self.null)

    def copy(self, target: int, source: int, nbytes: int) -> int:
        """Append a copy."""
        cast = self.gpu.zero.ffi.cast
        return self.append("MemoryCopy", cast("void *", target), cast("void *", source), nbytes)

    def close_list(self) -> None:
        """Close the list."""
        self.raw("CommandListClose", self.list)

    def launch(self, groups: int = 1) -> int:
        """Append a launch of the kernel of an addition."""
        count = self.gpu.zero.ffi.new("ze_group_count_t *", (groups, 1, 1))
        return self.append("LaunchKernel", self.program.kernel(ADD).handle, count)

    def step(self) -> Any:
        """A step that the device has not begun."""
        self.gpu.behaviour.looks = 1 << 30
        lowered = Doubling(self.tier)
        self.tier.submit(lowered.batch, inputs_of(values_of(0)), ("y",))
        return lowered.batch.launch.made[0]


def copies(bench: Bench, target: int, source: int) -> None:
    """16 bytes between places of a buffer, counted from its beginning, or from the arena's end."""
    buffer = bench.memory.allocate("buffer", 256, ArenaKind.HOST)
    start = buffer.address if source >= 0 else buffer.arena.address + buffer.arena.nbytes
    bench.copy(buffer.address + target, start + source, 16)


def executes(bench: Bench) -> None:
    handles = bench.gpu.zero.ffi.new("ze_command_list_handle_t[]", [bench.list])
    bench.raw("CommandQueueExecuteCommandLists", bench.queue.handle, 1, handles, bench.null)


def appends_to_a_closed_list(bench: Bench) -> None:
    bench.close_list()
    bench.append("Barrier")


def executes_twice(bench: Bench) -> None:
    bench.close_list()
    bench.queue.submit([bench.list])
    executes(bench)


def in_flight(name: str, handle: Callable[[Bench, Any], Any]) -> Callable[[Bench], int]:
    """A call with what a step uses that the device has not begun."""
    return lambda bench: bench.raw(name, handle(bench, bench.step()))


def frees_in_flight(bench: Bench) -> None:
    bench.step()
    address = bench.gpu.zero.ffi.cast("void *", bench.memory._arenas[0].address)
    bench.raw("MemFree", bench.queue.context, address)


def waits_for_nothing(bench: Bench) -> None:
    bench.raw("CommandListAppendWaitOnEvents", bench.list, 1, bench.events.array(0))
    bench.close_list()
    bench.queue.submit([bench.list])
    bench.queue.finish()


def signals_twice(bench: Bench) -> None:
    for _ in range(2):
        signal = bench.events.handles[0], 0, bench.null
        bench.raw("CommandListAppendBarrier", bench.queue.immediate, *signal)


def uses_a_destroyed_list(bench: Bench) -> None:
    bench.raw("CommandListDestroy", bench.list)
    bench.close_list()


def uses_another_kind(bench: Bench) -> None:
    handle = bench.gpu.zero.ffi.cast("ze_event_handle_t", bench.list)
    bench.raw("EventQueryStatus", handle)


def takes(bench: Bench, name: str, *arguments: Any) -> None:
    """A call with the kernel of an addition."""
    bench.raw(name, bench.program.kernel(ADD).handle, *arguments)


def argument(number: int) -> Callable[[Bench], None]:
    """Eight bytes as this argument."""

    def wrong(bench: Bench) -> None:
        takes(bench, "KernelSetArgumentValue", number, 8, bench.gpu.zero.ffi.new("uint64_t *"))

    return wrong


def launches_no_groups(bench: Bench) -> None:
    set_arguments(bench.queue, bench.program.kernel(ADD), (0, 0, 0, 0))
    bench.launch(0)


def launches_without_access(bench: Bench) -> None:
    set_arguments(bench.queue, bench.program.kernel(ADD), (0, 0, 0, 0))
    takes(bench, "KernelSetIndirectAccess", 2)
    bench.launch()


def reads(bench: Bench, address: int) -> None:
    """The self-test's kernel, with operands there."""
    kernel = bench.program.kernel(Module("self_test"))
    launch_packet(bench.memory, kernel, lone_packet([address] * 4, (1,)), 1)


def reads_between_words(bench: Bench) -> None:
    reads(bench, bench.memory.allocate("buffer", 1024).address + 2)


def asks(bench: Bench, nbytes: int, alignment: int) -> None:
    """Memory of the host."""
    description = bench.gpu.zero.structure("host_mem_alloc_desc")
    pointer = bench.gpu.zero.ffi.new("void **")
    bench.raw("MemAllocHost", bench.queue.context, description, nbytes, alignment, pointer)


def describes_another_thing(bench: Bench) -> None:
    description = bench.gpu.zero.structure("context_desc")
    bench.raw(
        "CommandListCreate",
        *(bench.queue.context, bench.device.handle),
        bench.gpu.zero.ffi.cast("ze_command_list_desc_t *", description),
        bench.gpu.zero.ffi.new("ze_command_list_handle_t *"),
    )


WRONG: dict[str, Callable[[Bench], Any]] = {
    "a copy leaves an allocation": lambda b: copies(b, 0, -8),
    "the two ranges overlap": lambda b: copies(b, 0, 8),
    "executed before it is closed": executes,
    "appended to a closed command list": appends_to_a_closed_list,
    "executed while the device uses it": executes_twice,
    "reset while the device uses it": in_flight("CommandListReset", lambda _, made: made._lists[0]),
    "an event is reset while the device uses it":
        in_flight("EventHostReset", lambda _, made: made.events.handles[1]),
    "it is in use by the device":
        in_flight("KernelDestroy", lambda bench, _: bench.program.kernel(ADD).handle),
    "kernels that may access it are in use": frees_in_flight,
    "waits for an event that nothing signals": waits_for_nothing,
    "is signaled again without a reset": signals_twice,
    "a handle was destroyed": uses_a_destroyed_list,
    "a handle is of another kind": uses_another_kind,
    "the module demands another group size": lambda b: takes(b, "KernelSetGroupSize", 64, 1, 1),
    "the argument has another size": argument(3),
    "there is no such argument": argument(4),
    "an argument of the kernel is not set": lambda b: b.launch(),
    "takes no such number of groups": launches_no_groups,
    "may not follow addresses": launches_without_access,
    "a kernel accesses memory that is not allocated": lambda b: reads(b, 4096),
    "an address that is not aligned": reads_between_words,
    "the size is 0": lambda b: asks(b, 0, 64),
    "the alignment is no power of two": lambda b: asks(b, 64, 3),
    "a description has the type of another": describes_another_thing,
}  # fmt: skip
"""What is noticed of each mistake, and what makes it."""


@pytest.mark.parametrize("noticed", WRONG)
def test_what_is_wrong_is_noticed(make_gpu, open_intel, noticed):
    """By the rule that it breaks, and by no other before."""
    gpu = make_gpu()
    bench = Bench(gpu, open_intel(gpu))
    assert gpu.problems == []
    WRONG[noticed](bench)
    assert gpu.problems
    assert noticed in gpu.problems[0]


def test_what_is_left_over_is_counted(make_gpu, open_intel):
    """Objects of an open tier, and a context that is destroyed before them."""
    gpu = make_gpu()
    tier = open_intel(gpu)
    assert gpu.leaked > 4
    gpu.zero.call("ContextDestroy", tier._runtime.queue.context)
    assert "what was made from it still exists" in gpu.problems[0]


def test_a_missing_barrier_changes_the_result(make_gpu, open_intel):
    """Commands that nothing orders run in another order than that of the list."""
    gpu = make_gpu()
    tier = open_intel(gpu)
    lowered = Doubling(tier)
    lowered.run(1)
    for launch in lowered.batch.launch.made[0]._launches:
        object.__setattr__(launch, "wait", False)
    tier._runtime.addresses.version += 1
    with pytest.raises(AssertionError):
        lowered.run(2)
    assert gpu.problems == []
    tier.close()


def test_no_call_comes_before_init(make_gpu):
    """Not even a question."""
    gpu = make_gpu()
    count = gpu.zero.ffi.new("uint32_t *")
    assert gpu.zero.library.zeDriverGet(count, gpu.zero.ffi.NULL) != 0
    assert gpu.problems == ["zeDriverGet: is called before zeInit"]
    assert chosen_device(gpu.zero).name == "Intel GPU (simulated)"
