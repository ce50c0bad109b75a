"""The simulated GPU notices what is done wrong: each rule it knows is broken once."""

from __future__ import annotations

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
from tests.intel.conftest import MakeGpu, OpenTier
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


def copies_outside(bench: Bench) -> None:
    buffer = bench.memory.allocate("buffer", 256, ArenaKind.HOST)
    bench.copy(buffer.address, buffer.arena.address + buffer.arena.nbytes - 8, 16)


def copies_over_itself(bench: Bench) -> None:
    buffer = bench.memory.allocate("buffer", 256, ArenaKind.HOST)
    bench.copy(buffer.address, buffer.address + 8, 16)


def executes_an_open_list(bench: Bench) -> None:
    handles = bench.gpu.zero.ffi.new("ze_command_list_handle_t[]", [bench.list])
    bench.raw("CommandQueueExecuteCommandLists", bench.queue.handle, 1, handles, bench.null)


def appends_to_a_closed_list(bench: Bench) -> None:
    bench.close_list()
    bench.append("Barrier")


def executes_twice(bench: Bench) -> None:
    bench.close_list()
    bench.queue.submit([bench.list])
    handles = bench.gpu.zero.ffi.new("ze_command_list_handle_t[]", [bench.list])
    bench.raw("CommandQueueExecuteCommandLists", bench.queue.handle, 1, handles, bench.null)


def resets_in_flight(bench: Bench) -> None:
    bench.raw("CommandListReset", bench.step()._lists[0])


def resets_an_event_in_flight(bench: Bench) -> None:
    bench.raw("EventHostReset", bench.step().events.handles[1])


def destroys_in_flight(bench: Bench) -> None:
    bench.step()
    bench.raw("KernelDestroy", bench.program.kernel(ADD).handle)


def frees_in_flight(bench: Bench) -> None:
    bench.step()
    address = bench.memory._arenas[0].address
    cast = bench.gpu.zero.ffi.cast
    bench.raw("MemFree", bench.queue.context, cast("void *", address))


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


def takes_another_group_size(bench: Bench) -> None:
    bench.raw("KernelSetGroupSize", bench.program.kernel(ADD).handle, 64, 1, 1)


def takes_a_long_argument(bench: Bench) -> None:
    data = bench.gpu.zero.ffi.new("uint64_t *")
    bench.raw("KernelSetArgumentValue", bench.program.kernel(ADD).handle, 3, 8, data)


def takes_a_fifth_argument(bench: Bench) -> None:
    data = bench.gpu.zero.ffi.new("uint64_t *")
    bench.raw("KernelSetArgumentValue", bench.program.kernel(ADD).handle, 4, 8, data)


def launches_without_arguments(bench: Bench) -> None:
    bench.launch()


def launches_no_groups(bench: Bench) -> None:
    set_arguments(bench.queue, bench.program.kernel(ADD), (0, 0, 0, 0))
    bench.launch(0)


def launches_without_access(bench: Bench) -> None:
    set_arguments(bench.queue, bench.program.kernel(ADD), (0, 0, 0, 0))
    bench.raw("KernelSetIndirectAccess", bench.program.kernel(ADD).handle, 2)
    bench.launch()


def reads_elsewhere(bench: Bench) -> None:
    kernel = bench.program.kernel(Module("self_test"))
    launch_packet(bench.memory, kernel, lone_packet([4096] * 4, (1,)), 1)


def reads_between_words(bench: Bench) -> None:
    kernel = bench.program.kernel(Module("self_test"))
    buffer = bench.memory.allocate("buffer", 1024)
    launch_packet(bench.memory, kernel, lone_packet([buffer.address + 2] * 4, (1,)), 1)


def asks_too_much(bench: Bench) -> None:
    description = bench.gpu.zero.structure("host_mem_alloc_desc")
    pointer = bench.gpu.zero.ffi.new("void **")
    bench.raw("MemAllocHost", bench.queue.context, description, 0, 64, pointer)


def aligns_by_three(bench: Bench) -> None:
    description = bench.gpu.zero.structure("host_mem_alloc_desc")
    pointer = bench.gpu.zero.ffi.new("void **")
    bench.raw("MemAllocHost", bench.queue.context, description, 64, 3, pointer)


def describes_another_thing(bench: Bench) -> None:
    description = bench.gpu.zero.structure("context_desc")
    bench.raw(
        "CommandListCreate",
        *(bench.queue.context, bench.device.handle),
        bench.gpu.zero.ffi.cast("ze_command_list_desc_t *", description),
        bench.gpu.zero.ffi.new("ze_command_list_handle_t *"),
    )


WRONG: dict[Callable[[Bench], None], str] = {
    copies_outside: "a copy leaves an allocation",
    copies_over_itself: "the two ranges overlap",
    executes_an_open_list: "executed before it is closed",
    appends_to_a_closed_list: "appended to a closed command list",
    executes_twice: "executed while the device uses it",
    resets_in_flight: "reset while the device uses it",
    resets_an_event_in_flight: "an event is reset while the device uses it",
    destroys_in_flight: "it is in use by the device",
    frees_in_flight: "kernels that may access it are in use",
    waits_for_nothing: "waits for an event that nothing signals",
    signals_twice: "is signaled again without a reset",
    uses_a_destroyed_list: "a handle was destroyed",
    uses_another_kind: "a handle is of another kind",
    takes_another_group_size: "the module demands another group size",
    takes_a_long_argument: "the argument has another size",
    takes_a_fifth_argument: "there is no such argument",
    launches_without_arguments: "an argument of the kernel is not set",
    launches_no_groups: "takes no such number of groups",
    launches_without_access: "may not follow addresses",
    reads_elsewhere: "a kernel accesses memory that is not allocated",
    reads_between_words: "an address that is not aligned",
    asks_too_much: "the size is 0",
    aligns_by_three: "the alignment is no power of two",
    describes_another_thing: "a description has the type of another",
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_what_is_wrong_is_noticed(
    make_gpu: MakeGpu, open_intel: OpenTier, wrong: Callable[[Bench], None]
) -> None:
    """By the rule that it breaks, and by no other before."""
    gpu = make_gpu()
    bench = Bench(gpu, open_intel(gpu))
    assert gpu.problems == []
    wrong(bench)
    assert gpu.problems
    assert WRONG[wrong] in gpu.problems[0]


def test_what_is_left_over_is_counted(make_gpu: MakeGpu, open_intel: OpenTier) -> None:
    """Objects of an open tier, and a context that is destroyed before them."""
    gpu = make_gpu()
    tier = open_intel(gpu)
    assert gpu.leaked > 4
    gpu.zero.call("ContextDestroy", tier._runtime.queue.context)
    assert "what was made from it still exists" in gpu.problems[0]


def test_a_missing_barrier_changes_the_result(make_gpu: MakeGpu, open_intel: OpenTier) -> None:
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


def test_no_call_comes_before_init(make_gpu: MakeGpu) -> None:
    """Not even a question."""
    gpu = make_gpu()
    count = gpu.zero.ffi.new("uint32_t *")
    assert gpu.zero.library.zeDriverGet(count, gpu.zero.ffi.NULL) != 0
    assert gpu.problems == ["zeDriverGet: is called before zeInit"]
    assert chosen_device(gpu.zero).name == "Intel GPU (simulated)"
