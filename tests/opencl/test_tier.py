"""The OpenCL tier behind the contract: memory, kernels, errors, deadlines, ways of executing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from accel.opencl import binding as cl
from accel.opencl import runtime as runtime_module
from accel.opencl.device import Device
from accel.opencl.launcher import LaunchContext, Mode, PersistentLauncher, WorkersLost
from accel.opencl.runtime import Choices, open_runtime
from accel.opencl.submissions import OpenClStep
from accel.opencl.tier import OpenClTier
from accel.packets.ops import NUMBERS
from accel.packets.packet import PACKET
from accel.packets.rules import OPCODES, RULES
from contract.dtypes import F32, I32, Q8_0
from contract.errors import DeviceLost, OutOfMemory, UnsupportedOp
from contract.ir.graph import BufferDecl, BufferKind, GraphBuilder
from contract.ir.inputs import input_layout, pack_inputs
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from tests.doubling import (
    GRAPH,
    KEY,
    LAYOUT,
    NBYTES,
    STATE,
    WIDTH,
    inputs_of,
    run_doubling,
)
from tests.growth import refused_growth
from tests.needs import machine_lacks
from tests.opencl.conftest import EACH_WAY, WAYS, OpenTier
from tests.opencl_parts import SOME, holding
from tests.quant.samples import random_blocks


@pytest.mark.parametrize("way", EACH_WAY)
def test_replays_read_new_inputs(open_opencl: OpenTier, way: str) -> None:
    """One batch, many submissions: what the host writes is seen by the next one."""
    chosen = WAYS[way]
    tier = open_opencl(
        **{name: getattr(chosen, name) for name in Choices.__slots__[:3]},
        shared_addresses=chosen.shared_addresses,
        native_arithmetic=chosen.native_arithmetic,
    )
    assert chosen.mode in (Mode.AUTO, tier.mode)
    run_doubling(tier, rounds=5)


def test_info_names_device_and_opcodes(tier: OpenClTier, device: Device) -> None:
    """What a conformance package records."""
    info = tier.info
    assert (info.name, info.device) == ("opencl", device.name)
    assert device.driver in info.driver
    assert info.opcodes == OPCODES == frozenset(Opcode)
    assert info.arithmetic == "exact-2"


@pytest.mark.parametrize("shared", [True, False])
def test_memory_is_zeroed_and_state_is_kept(open_opencl: OpenTier, shared: bool) -> None:
    """Mapped state keeps what the host wrote over a submission that does not touch it."""
    tier = open_opencl(shared_addresses=shared)
    state = tier.alloc(STATE, 64)
    assert not tier.map(state).any()
    tier.map(state)[:] = 7
    run_doubling(tier)
    assert (tier.map(state) == 7).all()
    tier.free(state)


@pytest.mark.parametrize("shared", [True, False])
def test_upload_holds_the_bytes(open_opencl: OpenTier, shared: bool) -> None:
    """A weight's bytes can be read back, and where memory is shared they are the caller's."""
    tier = open_opencl(shared_addresses=shared)
    data = random_blocks(Q8_0, 64, 256, 5)
    decl = BufferDecl("w", BufferKind.WEIGHT, Q8_0, (64, 256), "w")
    buffer = tier.upload(decl, data)
    assert np.array_equal(tier.map(buffer).reshape(data.shape), data)
    assert np.shares_memory(tier.map(buffer), data)


@pytest.mark.parametrize("shared", [True, False])
def test_out_of_memory_says_need_and_have(open_opencl: OpenTier, shared: bool) -> None:
    """Nothing is allocated when it does not fit, and what was freed can be had again."""
    limit = 100 << 20
    tier = open_opencl(shared_addresses=shared, memory_bytes=limit)
    before = tier.used_bytes
    first = tier.alloc(STATE, 60 << 20)
    with pytest.raises(OutOfMemory, match=r"state: need 62,914,560 bytes") as caught:
        tier.alloc(STATE, 60 << 20)
    assert caught.value.free == limit - before - (60 << 20)
    decl = BufferDecl("w", BufferKind.CONSTANT, F32, (1, 15 << 20))
    with pytest.raises(OutOfMemory, match="w: need"):
        tier.upload(decl, np.zeros((1, 60 << 20), np.uint8))
    tier.free(first)
    assert tier.used_bytes == before
    tier.free(tier.alloc(STATE, 60 << 20))


@pytest.mark.parametrize("shared", [True, False])
def test_dropped_batches_give_their_memory_back(open_opencl: OpenTier, shared: bool) -> None:
    """A variant that is forgotten leaves nothing behind."""
    tier = open_opencl(shared_addresses=shared)
    run_doubling(tier)
    before = tier.used_bytes
    for _ in range(5):
        run_doubling(tier)
    assert tier.used_bytes == before


def test_batches_follow_a_growing_scratch(open_opencl: OpenTier) -> None:
    """A batch lowered for a small step still runs after a large one moved the scratch memory."""
    tier = open_opencl()
    graph = GRAPH
    layout = input_layout(graph, ShapeKey(2000, 0))
    buffers = {"y": tier.alloc(graph.buffers["y"], 2000 * WIDTH * 4)}
    small = tier.lower(graph, buffers, ShapeKey(2, 0), layout)
    tier.lower(graph, buffers, ShapeKey(2000, 0), layout)
    tier.wait(tier.submit(small, inputs_of(np.full((2, WIDTH), 3, np.float32), layout)))
    assert (tier.map(buffers["y"]).view(np.float32)[: 2 * WIDTH] == 18).all()


@pytest.mark.parametrize(("what", "shared"), [("scratch", True), ("inputs of a step", False)])
def test_what_steps_share_stays_when_it_cannot_grow(
    open_opencl: OpenTier, what: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches lowered before still use it."""
    tier = open_opencl(shared_addresses=shared)
    refused_growth(tier, tier._memory, what, monkeypatch)


def test_unsupported_opcodes_are_named(tier: OpenClTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowering refuses what there is no rule for before anything runs."""
    rules = {opcode: rule for opcode, rule in RULES.items() if opcode is not Opcode.SCALE}
    monkeypatch.setattr("accel.packets.rules.RULES", rules)
    with pytest.raises(UnsupportedOp, match="SCALE"):
        tier.lower(GRAPH, {}, KEY, LAYOUT)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_parts_of_state_are_read_and_written(
    open_opencl: OpenTier, shared: bool, mapped: bool
) -> None:
    """Any range of bytes, before and after the host mapped the buffer, and after a submission."""
    tier = open_opencl(shared_addresses=shared)
    state = tier.alloc(STATE, 64)
    if mapped:
        tier.map(state)[:] = 1
    tier.write(state, 13, np.arange(5, dtype=np.uint8))
    expected = np.full(64, int(mapped), np.uint8)
    expected[13:18] = range(5)
    assert (tier.read(state, 0, 64) == expected).all()
    run_doubling(tier)
    assert tier.read(state, 15, 4).tolist() == [2, 3, 4, int(mapped)]
    copy = tier.read(state, 15, 1)
    copy[:] = 9
    assert (tier.map(state) == expected).all()
    assert tier.read(state, 64, 0).size == 0
    tier.write(state, 64, np.empty(0, np.uint8))


def test_bytes_outside_a_buffer_are_refused(tier: OpenClTier) -> None:
    """Neither read nor written, and the buffer is named."""
    state = tier.alloc(STATE, 64)
    for offset, nbytes in ((60, 5), (-1, 2), (65, 0)):
        with pytest.raises(ValueError, match="state: bytes"):
            tier.read(state, offset, nbytes)
        with pytest.raises(ValueError, match="state: bytes"):
            tier.write(state, offset, np.zeros(nbytes, np.uint8))


def _never_done(tier: OpenClTier, status: int) -> object:
    graph = GRAPH
    buffers = {"y": tier.alloc(graph.buffers["y"], NBYTES)}
    batch = tier.lower(graph, buffers, KEY, LAYOUT)
    fence = tier.submit(batch, inputs_of(np.zeros((1, WIDTH), np.float32)))
    tier.wait(fence)
    event = SimpleNamespace(command_execution_status=status)
    return replace(fence, completion=OpenClStep(event, [], cl.COMPLETE), _collected=False)


def test_a_deadline_ends_a_wait_and_the_tier(tier: OpenClTier) -> None:
    """A step that does not end is an error, and nothing can be submitted afterwards."""
    fence = _never_done(tier, cl.RUNNING)
    with pytest.raises(DeviceLost, match=r"did not end within 0\.01 s"):
        tier.wait(fence, timeout=0.01)
    with pytest.raises(DeviceLost, match="did not end"):
        tier.submit(fence.batch, np.zeros(LAYOUT.nbytes, np.uint8))


def test_a_failed_step_is_a_lost_device(tier: OpenClTier) -> None:
    """A negative event status is an error of the device."""
    fence = _never_done(tier, -14)
    with pytest.raises(DeviceLost, match="error -14"):
        tier.wait(fence)


def test_closing_twice_and_after_a_loss(open_opencl: OpenTier) -> None:
    """Close frees everything; a second one has nothing to do."""
    tier = open_opencl()
    tier.alloc(STATE, 64)
    tier.close()
    tier.close()
    assert tier.used_bytes == 0


def _launch_context(device: Device, choices: Choices) -> LaunchContext:
    return open_runtime(device, replace(choices, mode=Mode.PERSISTENT)).launch


def test_workers_that_never_meet_give_up(device: Device, kernel_cache) -> None:
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


def test_probe_failure_falls_back_to_launches(
    open_opencl: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where workers do not run at once the tier launches packets one by one."""
    monkeypatch.setattr(runtime_module, "PROBE_SPIN_LIMIT", 1)
    monkeypatch.setattr(PersistentLauncher, "check", _lost)
    tier = open_opencl()
    assert tier.mode is Mode.LAUNCH
    with holding(SOME):
        run_doubling(tier)


def _lost(launcher: PersistentLauncher) -> None:
    raise WorkersLost


def test_lost_workers_are_a_lost_device(
    open_opencl: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a run it is an error, since the step's results are incomplete."""
    tier = open_opencl(mode=Mode.PERSISTENT)
    monkeypatch.setattr(PersistentLauncher, "check", _lost)
    with pytest.raises(DeviceLost, match="waited for one another in vain"):
        run_doubling(tier)


def test_int_operands_only(tier: OpenClTier) -> None:
    """A graph without any activation lowers and runs."""
    builder = GraphBuilder("verify")
    draft = builder.buffer("draft", BufferKind.REQUEST, I32, ("rows", 4))
    out = builder.output("accepted", "rows", dtype=I32)
    builder.emit(Opcode.VERIFY_K, draft=draft, target=draft, accepted=out)
    graph, step = builder.build(), ShapeKey(0, 2)
    buffers = {"accepted": tier.alloc(graph.buffers["accepted"], 64)}
    layout = input_layout(graph, step)
    inputs = pack_inputs(layout, step, {"draft": np.arange(8, dtype=np.int32)})
    tier.wait(tier.submit(tier.lower(graph, buffers, step, layout), inputs))
    assert tier.map(buffers["accepted"]).view(np.int32)[:2].tolist() == [4, 4]


def test_own_memory_grows_where_it_lies(tier: OpenClTier, monkeypatch: pytest.MonkeyPatch) -> None:
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
