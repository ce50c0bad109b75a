"""The CUDA tier's own logic on a double of the driver: memory, order, errors, lost devices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from accel.cuda import launcher, plan, upload
from accel.cuda.buffers import TransientMemory
from accel.cuda.device import Device
from accel.cuda.program import Compiler
from accel.cuda.runtime import Choices
from accel.cuda.tier import CudaTier
from accel.cuda.tuned import KernelLaunch, Replacement
from accel.packets.packet import PACKET
from accel.packets.step import Op
from contract.draft_shift import WORD_BYTES, DraftShift, SequenceShift
from contract.dtypes import F32, I32, Q8_0
from contract.errors import DeviceLost, OutOfMemory, TierUnavailable
from contract.ir.graph import BufferDecl, BufferKind
from contract.ir.inputs import input_layout
from contract.records import OUTPUT_EVENT
from contract.shape_key import ShapeKey
from contract.tier import Fence
from tests.cuda.conftest import OpenTier
from tests.cuda.fake_context import floats, words
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.fake_kernels import FAULT, HANG, TUNED
from tests.cuda.fake_nvrtc import FakeNvrtc
from tests.doubling import GRAPH, STATE, WIDTH, doubled, inputs_of

LARGEST = ShapeKey(64, 0)
LAYOUT = input_layout(GRAPH, LARGEST)


def values_of(tokens: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, WIDTH), np.float32)


def block_of(values: np.ndarray) -> np.ndarray:
    return inputs_of(values, LAYOUT)


class Lowered:
    """The graph on one tier, for the largest step."""

    def __init__(self, tier: CudaTier, bucket: ShapeKey = LARGEST) -> None:
        self.tier = tier
        nbytes = LARGEST.tokens * WIDTH * 4
        self.y = tier.alloc(GRAPH.buffers["y"], nbytes)
        self.batch = tier.lower(GRAPH, {"y": self.y}, bucket, LAYOUT)

    def submit(self, block: np.ndarray) -> Fence:
        return self.tier.submit(self.batch, block, ["y"])

    def run(self, tokens: int = 3, seed: int = 0) -> None:
        values = values_of(tokens, seed)
        fence = self.submit(block_of(values))
        self.tier.wait(fence)
        assert np.array_equal(output(fence), doubled(values))


def until_done(fence: Fence) -> None:
    while not fence.done:
        pass


def output(fence: Fence) -> np.ndarray:
    return fence.outputs["y"].view(np.float32).reshape(-1, WIDTH)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("max_brief", [0, 16])
def test_queued_steps_keep_their_inputs_and_outputs(
    driver: FakeDriver,
    open_cuda: OpenTier,
    graphs: bool,
    late: bool,
    max_brief: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inputs are overwritten as soon as they were submitted; nothing is waited for in between, and
    copies beside the steps are made at once or as late as can be."""
    monkeypatch.setattr(launcher, "MAX_BRIEF_LAUNCHES", max_brief)
    lowered = Lowered(open_cuda(graphs=graphs))
    driver.current.late = late
    for first in range(3):
        in_flight = []
        for number, tokens in enumerate((LARGEST.tokens, 5, 0, 17)):
            values = values_of(tokens, 4 * first + number)
            block = block_of(values)
            in_flight.append((lowered.submit(block), doubled(values)))
            block[:] = 0xFF
        for fence, expected in reversed(in_flight):
            lowered.tier.wait(fence)
            assert np.array_equal(output(fence), expected)


@pytest.mark.parametrize("written", [False, True])
def test_lent_inputs_are_read_where_they_are(
    driver: FakeDriver, tier: CudaTier, written: bool
) -> None:
    """Once, by the device: what is ``written`` there before the step has ended is read."""
    lowered = Lowered(tier)
    block = tier.lend_inputs(LAYOUT.nbytes)
    values = values_of(3, 1)
    block[:] = block_of(values)
    driver.current.late = True
    fence = lowered.submit(block)
    if written:
        block[LAYOUT.offsets["x"] :] = 0
    tier.wait(fence)
    assert np.array_equal(output(fence), doubled(values)) != written


@pytest.mark.parametrize("late", [True, False])
def test_steps_that_nobody_waits_for_are_computed(
    driver: FakeDriver, open_cuda: OpenTier, late: bool
) -> None:
    """In their turn, with their own inputs, and in few calls; the page-locked memory of those in
    front of steps that have ended is used again."""
    lowered = Lowered(open_cuda())
    tier, device = lowered.tier, driver.current
    y = lowered.y.allocations[0].address
    device.late = late
    slots = set()
    for first in range(0, 18, 6):
        fences = []
        for number, unread in enumerate((True, True, False, False, True, True), first):
            values = values_of(3, number)
            block = block_of(values)
            driver.calls.clear()
            if unread:
                fence = tier.submit_unread(lowered.batch, block)
                # Earlier steps make their memory; marks of fences that are dropped follow.
                calls = [call for call in driver.calls if call != "cuEventQuery"]
                step = ["cuCtxSetCurrent", "cuMemcpyHtoDAsync", "cuGraphLaunch"]
                assert first < 12 or calls[:3] == step
                slots.add(id(tier._submissions._unread[-1][1]))
            else:
                fence = lowered.submit(block)
            fences.append((fence, doubled(values)))
            block[:] = 0xFF
        for number in (3, 2):
            tier.wait(fences[number][0])
            assert np.array_equal(output(fences[number][0]), fences[number][1])
        tier.wait(fences[-1][0])
        assert np.array_equal(floats(y, 3 * WIDTH).reshape(3, WIDTH), fences[-1][1])
        for fence, _ in fences:
            tier.wait(fence)
    assert len(slots) <= 8


def test_inputs_change_by_what_a_step_in_front_accepted(driver: FakeDriver, tier: CudaTier) -> None:
    """On the device, once that step has ended; the host's own inputs do not."""
    lowered = Lowered(tier)
    ring = tier.alloc(BufferDecl("ring", BufferKind.OUTPUT, I32, (4, 8)), 4 * OUTPUT_EVENT.itemsize)
    tier.prepare_shifts()
    lowered.run()
    values, x = values_of(3, 1), LAYOUT.offsets["x"] // WORD_BYTES
    block = block_of(values)
    driver.current.late = True
    lowered.submit(block_of(values_of(3, 2)))
    fence = tier.submit_shifted(
        lowered.batch, block, None, DraftShift(ring, (SequenceShift(7, 3, x, x + 2, None),))
    )
    # What the step in front writes: neither has run so far.
    events = words(ring.allocation.address, 32).view(OUTPUT_EVENT)
    events["flags"] = [9, 9, 9, 1]
    tier.wait(fence)
    changed = values.copy()
    changed.reshape(-1).view(np.int32)[[0, 2]] -= 2
    y = floats(lowered.y.allocations[0].address, 3 * WIDTH)
    assert np.array_equal(y.reshape(3, WIDTH), doubled(changed))
    assert np.array_equal(block, block_of(values))


def test_submitting_waits_for_nothing(driver: FakeDriver, tier: CudaTier) -> None:
    """A step is a number of calls that does not grow with its launches, none of which waits."""
    lowered = Lowered(tier)
    lowered.run()
    driver.calls.clear()
    fence = lowered.submit(block_of(values_of(3, 1)))
    mark, wait = "cuEventRecord", "cuStreamWaitEvent"
    inputs = ["cuCtxSetCurrent", wait, "cuMemcpyHtoDAsync", mark, wait]
    step = ["cuGraphLaunch", mark]
    assert driver.calls == [*inputs, *step, "cuMemcpyDtoHAsync", mark, wait, mark]
    assert not fence.done
    tier.wait(fence)


def test_kernels_start_early_only_where_one_is_in_front(
    driver: FakeDriver, open_cuda: OpenTier
) -> None:
    """The first launch follows a copy; and a device before sm_90 knows no such launches."""
    Lowered(open_cuda()).run()
    assert driver.launched[-2:] == [("launch_add", []), ("launch_scale", ["programmatic"])]
    driver.attributes["COMPUTE_CAPABILITY_MAJOR"] = 8
    Lowered(open_cuda()).run()
    assert driver.launched[-2:] == [("launch_add", []), ("launch_scale", [])]


def test_all_buckets_pass_results_on_in_the_same_memory(tier: CudaTier) -> None:
    """A larger one takes the place of none that launches were recorded with."""
    transient = TransientMemory(tier._memory)
    held = tier.allocated_bytes
    assert transient.address(0) == 0
    assert tier.allocated_bytes == held
    first = transient.address(1 << 12)
    assert transient.address(1 << 10) == transient.address(1 << 12) == first
    larger = transient.address(1 << 20)
    assert larger != first
    assert transient.address(1 << 12) == larger
    assert tier.allocated_bytes == held + (1 << 12) + (1 << 20)


def test_outputs_outlive_the_tier(tier: CudaTier) -> None:
    """What a fence holds can be read when the device's memory is gone."""
    lowered, values = Lowered(tier), values_of(3, 1)
    fence = lowered.submit(block_of(values))
    tier.wait(fence)
    tier.close()
    assert np.array_equal(output(fence), doubled(values))


@pytest.mark.parametrize("rows", [1, 3, 1000])
@pytest.mark.parametrize("slot_bytes", [64, 1 << 20])
def test_upload_holds_the_bytes(
    tier: CudaTier, monkeypatch: pytest.MonkeyPatch, rows: int, slot_bytes: int
) -> None:
    """In one part or in many more than there are slots, from rows that are not contiguous too."""
    monkeypatch.setattr(upload, "SLOT_BYTES", slot_bytes)
    wide = np.random.default_rng(rows).integers(0, 256, (rows, 96), np.uint8)
    for data in (wide[:, :48], np.ascontiguousarray(wide)):
        decl = BufferDecl("table", BufferKind.CONSTANT, F32, (rows, data.shape[1] // 4))
        buffer = tier.upload(decl, data)
        expected = data.copy()
        tier._runtime.uploader.finish()
        data[:] = 0
        got = tier._memory.read(buffer.allocation, 0, expected.nbytes)
        assert np.array_equal(got.reshape(expected.shape), expected)
        data[:] = expected


def test_slots_are_given_back_when_memory_is_short(open_cuda: OpenTier) -> None:
    """What weights went through on the device is free for the pages that follow them."""
    tier = open_cuda(memory_bytes=20 << 20)
    decl = BufferDecl("w", BufferKind.WEIGHT, Q8_0, (64, 1024), "w")
    weight = tier.upload(decl, np.zeros((64, Q8_0.row_bytes(1024)), np.uint8))
    assert tier.allocated_bytes > upload.SLOT_BYTES
    pages = tier.alloc(STATE, 18 << 20)
    assert tier.allocated_bytes < 19 << 20
    tier.free(pages)
    tier.free(weight)


def test_out_of_memory_says_need_and_have(driver: FakeDriver, open_cuda: OpenTier) -> None:
    """By the caller's limit and by the device's; what was freed can be had again."""
    driver.memory_bytes = 200 << 20
    for limit, match in ((100 << 20, r"state: need 62\.9 MB"), (None, "state: need 126 MB")):
        tier = open_cuda(memory_bytes=limit)
        nbytes = (limit or driver.memory_bytes) * 3 // 5
        first = tier.alloc(STATE, nbytes)
        with pytest.raises(OutOfMemory, match=match):
            tier.alloc(STATE, nbytes)
        tier.free(first)
        tier.free(tier.alloc(STATE, nbytes))
        decl = BufferDecl("w", BufferKind.WEIGHT, Q8_0, (1, 4 << 25), "w")
        with pytest.raises(OutOfMemory, match="w: need"):
            tier.upload(decl, np.broadcast_to(np.uint8(0), (1, Q8_0.row_bytes(4 << 26))))
        tier.close()


def test_a_faulting_kernel_is_a_lost_device(driver: FakeDriver, open_cuda: OpenTier) -> None:
    """Everything after it says so, nothing crashes, and what was kept can still be read. The driver
    refuses the process from then on, which is said when the tier is opened again."""
    tier = open_cuda()
    lowered = Lowered(tier)
    lowered.run()
    kept = lowered.submit(block_of(values_of(3, 1)))
    tier.wait(kept)
    before = output(kept).copy()
    driver.kernels["launch_scale"] = FAULT
    failing = Lowered(tier).submit(block_of(values_of(3, 1)))
    with pytest.raises(DeviceLost, match="ILLEGAL_ADDRESS"):
        until_done(failing)
    with pytest.raises(DeviceLost, match="ILLEGAL_ADDRESS"):
        tier.wait(failing)
    for attempt in (lambda: lowered.run(), lambda: tier.alloc(STATE, 64)):
        with pytest.raises(DeviceLost, match="ILLEGAL_ADDRESS"):
            attempt()
    assert np.array_equal(output(kept), before)
    tier.free(lowered.y)
    tier.close()
    with pytest.raises(TierUnavailable, match=r"a kernel of it faulted.*; start a new process"):
        open_cuda()


def test_a_hanging_kernel_is_a_lost_device(driver: FakeDriver, open_cuda: OpenTier) -> None:
    """Its context is left alone: destroying it would wait for the kernel. Another can be opened."""
    tier = open_cuda()
    driver.kernels["launch_add"] = HANG
    lowered = Lowered(tier)
    fence = lowered.submit(block_of(values_of(3, 1)))
    with pytest.raises(DeviceLost, match=r"did not end within 0\.05 s"):
        tier.wait(fence, timeout=0.05)
    with pytest.raises(DeviceLost, match="did not end"):
        lowered.submit(block_of(values_of(3, 1)))
    tier.close()
    driver.kernels = FakeDriver().kernels
    Lowered(open_cuda()).run()


def open_on(driver: FakeDriver, device: str = "") -> None:
    CudaTier(device, Choices(), binding=driver, compiler=Compiler(FakeNvrtc()))


def test_what_is_missing_is_said() -> None:
    """No device, one too old, an old driver, one of another name."""
    without = FakeDriver()
    without.devices = 0
    for driver, device, match in (
        (without, "", "there is no CUDA device"),
        (FakeDriver(COMPUTE_CAPABILITY_MAJOR=7, COMPUTE_CAPABILITY_MINOR=5), "", "7.5, needs 8.0"),
        (FakeDriver(version=12040), "", "driver is for CUDA 12.4, needs 13.0"),
        (FakeDriver(), "radeon", "no CUDA device matches 'radeon'; there is Fake device \\(0"),
    ):
        with pytest.raises(TierUnavailable, match=match):
            open_on(driver, device)


@pytest.mark.parametrize(
    ("column", "match"),
    [
        (0, "divides"),
        (2, "multiplies and adds"),
        (5, "widens binary16"),
        (8, "bytes of both kinds"),
    ],
)
def test_a_device_that_rounds_otherwise_is_refused(column: int, match: str) -> None:
    """The negative control of the self-test: one result of many is another."""
    driver = FakeDriver()
    sizes, exact = driver.kernels["launch_self_test"]

    def inexact(driver: FakeDriver, scratch: int, inputs: int, argument: int) -> None:
        exact(driver, scratch, inputs, argument)
        packet = np.frombuffer(argument.to_bytes(PACKET.itemsize, "little"), PACKET)[0]
        words(int(packet["operand"][3]), 1000)[77 * 9 + column] += 1

    driver.kernels["launch_self_test"] = sizes, inexact
    with pytest.raises(TierUnavailable, match=f"{match} inexactly"):
        open_on(driver)
    assert driver.current.destroyed


def test_a_device_that_fails_at_once_says_to_start_anew() -> None:
    """The self-test faults."""
    driver = FakeDriver()
    driver.kernels["launch_self_test"] = FAULT
    with pytest.raises(TierUnavailable, match="start a new process"):
        open_on(driver)


def test_launches_of_one_kernel_differ_in_shared_memory(
    driver: FakeDriver, open_cuda: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A smaller launch bound later does not lower the limit of a larger one."""

    def rule(ops: Sequence[Op], device: Device) -> Replacement:
        nbytes = {"add": 100 << 10, "scale": 60 << 10}[ops[0].name]
        launch = KernelLaunch("head_rows", (1, 1, 1), (32, 1, 1), nbytes)
        return Replacement(1, (launch,))

    monkeypatch.setattr(plan, "RULES", (rule,))
    driver.kernels["head_rows"] = (TUNED, lambda *arguments: None)
    Lowered(open_cuda()).submit(block_of(values_of(3, 1)))
    assert [name for name, _ in driver.launched].count("head_rows") == 4  # for two places of inputs
