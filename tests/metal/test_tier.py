"""The Metal tier behind the contract: memory, steps, messages of a step, errors, a lost device."""

import mmap

import numpy as np
import pytest

from accel.metal import memory
from accel.metal.sim.fake_machine import APPLE_M1
from accel.metal.tier import MetalTier
from contract.dtypes import F32
from contract.errors import DeviceLost, OutOfMemory
from contract.ir.graph import BufferDecl, BufferKind
from tests.doubling import STATE, Doubling, inputs_of, run_doubling, values_of

STEP = (
    "MTLCommandQueue commandBuffer", "MTLCommandBuffer computeCommandEncoder",
    "MTLComputeCommandEncoder useResources:count:usage:",
    "MTLComputeCommandEncoder executeCommandsInBuffer:withRange:",
    "MTLComputeCommandEncoder endEncoding", "MTLCommandBuffer blitCommandEncoder",
    "MTLBlitCommandEncoder copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:",
    "MTLBlitCommandEncoder endEncoding", "MTLCommandBuffer encodeSignalEvent:value:",
    "MTLCommandBuffer commit",
)  # fmt: skip
"""All that a step says on a device of the family Apple9 when one output is wanted."""
EMPTY_DISPATCH = (
    "MTLComputeCommandEncoder setComputePipelineState:",
    "MTLComputeCommandEncoder dispatchThreadgroups:threadsPerThreadgroup:",
)


@pytest.mark.parametrize("newer", [True, False], ids=["Apple9", "Apple7"])
def test_messages_of_a_step(make_mac, newer):
    """One list, whatever the step holds; older devices have each pipeline dispatched once more."""
    mac = make_mac(families=APPLE_M1 | {1009} if newer else APPLE_M1)
    expected = list(STEP)
    if not newer:
        expected[3:3] = EMPTY_DISPATCH * 2
    with MetalTier(metal=mac.metal) as tier:
        lowered = Doubling(tier)
        lowered.run(1)
        for number in range(3):
            tier.wait(tier.submit(lowered.batch, inputs_of(values_of(number))))
            mac.calls = []
            tier.submit(lowered.batch, inputs_of(values_of(number)), ("y",))
            said = [call for call in mac.calls if not call.endswith(" status")]
            mac.calls = None
            assert said == expected
        tier.free(lowered.y)
    assert (mac.problems, mac.leaked) == ([], [])


def test_a_queue_that_is_full_waits(tier):
    """More steps than Metal has command buffers for."""
    lowered = Doubling(tier)
    values = values_of(0)
    fences = [tier.submit(lowered.batch, inputs_of(values)) for _ in range(80)]
    tier.wait(fences[-1])
    assert all(fence.done for fence in fences)
    tier.free(lowered.y)


def test_large_weights_are_views_of_the_file(tier, mac, tmp_path, monkeypatch):
    """No copy, from any byte of the file on; freed with the weight."""
    monkeypatch.setattr(memory, "VIEW_BYTES", 4096)
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 100)
    decl = BufferDecl("w", BufferKind.WEIGHT, F32, (20, 256), "w")
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    data = np.frombuffer(mapped, np.uint8)[96 : 96 + 20 * 1024].reshape(20, 1024)
    before = tier.allocated_bytes
    mac.calls = []
    buffer = tier.upload(decl, data)
    assert "MTLDevice newBufferWithBytesNoCopy:length:options:deallocator:" in mac.calls
    assert tier.allocated_bytes == before
    assert buffer.allocation is not None
    assert np.array_equal(buffer.allocation.host, data.reshape(-1))
    run_doubling(tier)
    tier.free(buffer)
    del buffer, data


def test_a_tensor_above_the_longest_buffer(make_mac):
    """Refused with that number, before Metal is asked."""
    mac = make_mac(max_buffer_bytes=32 << 20)
    with MetalTier(metal=mac.metal) as tier:
        with pytest.raises(OutOfMemory, match=r"33\.6 MB free"):
            tier.alloc(STATE, 33 << 20)
        run_doubling(tier)
    assert (mac.problems, mac.leaked) == ([], [])


def test_a_kernel_that_leaves_its_memory_loses_the_device(mac):
    """What Metal says of it is in the error; steps committed behind it fail, too."""
    tier = MetalTier(metal=mac.metal)
    lowered = Doubling(tier)
    lowered.run(2)
    lowered.batch.launch.made[0].allocation.host.view(np.uint64)[0] = 1 << 40
    first = tier.submit(lowered.batch, inputs_of(values_of(0)))
    second = tier.submit(lowered.batch, inputs_of(values_of(1)))
    with pytest.raises(DeviceLost, match=r"Apple M1 \(simulated\): .*PageFault"):
        tier.wait(first)
    with pytest.raises(DeviceLost, match="SubmissionsIgnored"):
        _ = second.done
    lowered.assert_lost()
    with MetalTier(metal=mac.metal) as other:
        run_doubling(other)
