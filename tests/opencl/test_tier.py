"""The OpenCL tier behind the contract: memory, kernels, errors, deadlines, ways of executing."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from accel.opencl import binding as cl
from accel.opencl import runtime as runtime_module
from accel.opencl.device import Device
from accel.opencl.launcher import LaunchContext, Mode, PersistentLauncher, WorkersLost
from accel.opencl.runtime import Choices, open_runtime
from accel.opencl.tier import OpenClStep, OpenClTier
from accel.packets.ops import NUMBERS
from accel.packets.packet import PACKET
from contract.dtypes import I32
from contract.errors import DeviceLost
from contract.ir.graph import GraphBuilder
from contract.ir.inputs import STEP_BUFFER, input_layout, pack_inputs
from contract.opcodes import Opcode
from contract.records import OUTPUT_EVENT
from contract.shape_key import ShapeKey
from tests.doubling import GRAPH, KEY, LAYOUT, NBYTES, WIDTH, inputs_of, run_doubling
from tests.needs import machine_lacks
from tests.opencl_parts import SOME, holding
from tests.tiers import chained
from tests.tiers.chained import LARGEST, Lowered, step_block


def _never_done(tier: OpenClTier, status: int) -> object:
    graph = GRAPH
    buffers = {"y": tier.alloc(graph.buffers["y"], NBYTES)}
    batch = tier.lower(graph, buffers, KEY, LAYOUT)
    fence = tier.submit(batch, inputs_of(np.zeros((1, WIDTH), np.float32)))
    tier.wait(fence)
    event = SimpleNamespace(command_execution_status=status)
    return replace(fence, completion=OpenClStep(event, [], cl.COMPLETE), _collected=False)


def test_a_deadline_ends_a_wait_and_the_tier(tier):
    """A step that does not end is an error, and nothing can be submitted afterwards."""
    fence = _never_done(tier, cl.RUNNING)
    with pytest.raises(DeviceLost, match=r"did not end within 0\.01 s"):
        tier.wait(fence, timeout=0.01)
    with pytest.raises(DeviceLost, match="did not end"):
        tier.submit(fence.batch, np.zeros(LAYOUT.nbytes, np.uint8))


def test_a_failed_step_is_a_lost_device(tier):
    """A negative event status is an error of the device."""
    fence = _never_done(tier, -14)
    with pytest.raises(DeviceLost, match="error -14"):
        tier.wait(fence)


def test_every_object_is_released(device, kernel_cache, monkeypatch):
    """Contexts, queues, programs, kernels, memory and events of tiers that were closed."""
    made: Counter[str] = Counter()
    released: Counter[str] = Counter()
    begin = cl._Owned.__init__

    def counted(self: cl._Owned, handle: int) -> None:
        begin(self, handle)
        kind, give_back = type(self).__name__, self._give_back
        made[kind] += 1

        def give(handle: int) -> None:
            released[kind] += 1
            give_back(handle)

        self._give_back = give

    monkeypatch.setattr(cl._Owned, "__init__", counted)
    for _ in range(3):
        with OpenClTier(choices=Choices(cache=kernel_cache)) as tier:
            run_doubling(tier)
        del tier
    kinds = {"Context", "CommandQueue", "Program", "Kernel", "Buffer", "Event"}
    assert made == released
    assert set(made) == kinds


def _launch_context(device: Device, choices: Choices) -> LaunchContext:
    return open_runtime(device, replace(choices, mode=Mode.PERSISTENT)).launch


def test_workers_that_never_meet_give_up(device, kernel_cache):
    """More groups than the device runs at once: they stop, say so, and the next step is sound."""
    if not device.is_cpu:
        machine_lacks("device whose number of groups at once is known")
    launch = _launch_context(device, Choices(cache=kernel_cache))
    packets = np.zeros(2, PACKET)
    packets["op"] = NUMBERS["select_rows"]
    packets["wait"] = 1
    place = launch.memory.adopt("packets", packets.view(np.uint8))
    too_many = PersistentLauncher(launch, 8 * device.compute_units, spin_limit=1 << 16)
    too_many.record(packets, place.address).enqueue(0, tokens=1).wait()
    with pytest.raises(WorkersLost):
        too_many.check()
    too_many.check()
    few = PersistentLauncher(launch, 1)
    few.record(packets, place.address).enqueue(0, tokens=1).wait()
    few.check()


def test_probe_failure_falls_back_to_launches(open_opencl, monkeypatch):
    """Where workers do not run at once the tier launches packets one by one."""
    monkeypatch.setattr(runtime_module, "PROBE_SPIN_LIMIT", 1)
    monkeypatch.setattr(PersistentLauncher, "check", _lost)
    tier = open_opencl()
    assert tier.mode is Mode.LAUNCH
    with holding(SOME):
        run_doubling(tier)


def _lost(launcher: PersistentLauncher) -> None:
    raise WorkersLost


def test_lost_workers_are_a_lost_device(open_opencl, monkeypatch):
    """In the middle of a run it is an error, since the step's results are incomplete."""
    tier = open_opencl(mode=Mode.PERSISTENT)
    monkeypatch.setattr(PersistentLauncher, "check", _lost)
    with pytest.raises(DeviceLost, match="waited for one another in vain"):
        run_doubling(tier)


def test_int_operands_only(tier):
    """A graph without any activation lowers and runs."""
    builder = GraphBuilder("verify")
    operands = {
        "token": builder.request("token", "rows"),
        "output_rows": builder.request("output_rows", "rows"),
        "query": builder.request("query", "tokens", 4),
        "step": builder.request(STEP_BUFFER, 1, 4),
        "ring": builder.output("ring", 8, 8, dtype=I32),
    }
    builder.emit(Opcode.VERIFY_K, **operands, draft_tokens=3)
    graph, step = builder.build(), ShapeKey(3, 3)
    buffers = {"ring": tier.alloc(graph.buffers["ring"], 256)}
    layout = input_layout(graph, step)
    query = np.array([(9, 0, 0, 0), (5, 0, 1, 0), (6, 0, 2, 0)], np.int32)
    given = {"token": np.array([5, 6, 7], np.int32), "output_rows": np.arange(3, dtype=np.int32)}
    inputs = pack_inputs(layout, step, {**given, "query": query})
    tier.wait(tier.submit(tier.lower(graph, buffers, step, layout), inputs))
    events = tier.map(buffers["ring"]).reshape(-1).view(OUTPUT_EVENT)
    assert events["flags"][:3].tolist() == [2, 1, 0]


def test_own_memory_grows_where_it_lies(tier, monkeypatch):
    """A larger share per worker is told to the kernels even if the memory kept its address."""
    place = tier._runtime.launch.scratch
    tier._reserve(256, 256, 0)
    address, version = tier._own.address, place.version
    grown = tier._grown

    def at_the_same_address(what, current, nbytes):
        allocation = grown(what, current, nbytes)
        if what != "scratch":
            allocation.address = address
        return allocation

    monkeypatch.setattr(tier, "_grown", at_the_same_address)
    tier._reserve(256, 4096, 0)
    assert place.own_bytes >= 4096
    assert place.version > version


def test_snapshots_are_used_again(open_opencl):
    """Memory for inputs is as much as steps were under way at once, however many follow."""
    lowered = Lowered(open_opencl())
    tier = lowered.tier
    before = tier.allocated_bytes
    for _ in range(5):
        tier.wait(lowered.submit(step_block(2, seed=1)))
    assert tier.allocated_bytes == before + chained.LAYOUT.nbytes * tier.shares_memory


def test_waiting_again_teaches_nothing_of_a_steps_time(open_opencl):
    """Else the host would think steps take no time, and ask all the while whether one is done."""
    lowered = Lowered(open_opencl())
    fence = lowered.submit(step_block(LARGEST.tokens, seed=1))
    lowered.tier.wait(fence)
    fence.batch.pace.seconds = 1.0
    lowered.tier.wait(fence)
    assert fence.batch.pace.seconds == 1.0
