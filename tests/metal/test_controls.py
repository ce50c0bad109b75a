"""What the simulated Metal must not put up with: one wrong message each, and it says which.

A simulation that lets mistakes pass proves nothing of a tier that runs on it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from accel.kernels.source import Module, Traits
from accel.metal import queue
from accel.metal.objc import ObjectiveC
from accel.metal.runtime import Choices, Runtime, open_runtime
from accel.metal.sim.fake_metal import FakeMetal
from accel.metal.tier import MetalTier
from contract.errors import DeviceLost
from tests.doubling import Doubling, inputs_of, run_doubling, values_of
from tests.metal.conftest import MakeMac
from tests.patience import PATIENCE_SECONDS


@dataclass
class Bench:
    """An opened device of a Mac, and its objects by hand."""

    mac: FakeMetal
    runtime: Runtime

    @property
    def objc(self) -> ObjectiveC:
        """The runtime."""
        return self.mac.metal

    @property
    def device(self) -> Any:
        """The MTLDevice."""
        return self.runtime.queue.device.handle

    def buffer(self, nbytes: int = 4096) -> Any:
        """An MTLBuffer, the caller's."""
        return self.objc.send(self.device, "newBufferWithLength:options:", nbytes, 0)

    def commands(self) -> Any:
        """A command buffer of the innermost pool."""
        return self.objc.send(self.runtime.queue._handle, "commandBuffer")

    def commanded(self, *selectors: str) -> None:
        """Messages to a command buffer, whose pool then ends."""
        with self.objc.pool():
            commands = self.commands()
            for selector in selectors:
                self.objc.send(commands, selector)

    def encoded(self, *messages: tuple[Any, ...], kind: str = "computeCommandEncoder") -> None:
        """A command buffer with one encoder, which got the messages and was ended."""
        with self.objc.pool():
            commands = self.commands()
            encoder = self.objc.send(commands, kind)
            for message in (*messages, ("endEncoding",)):
                self.objc.send(encoder, *message)

    def released(self) -> Any:
        """An MTLBuffer that is none any more."""
        buffer = self.buffer()
        self.objc.release(buffer)
        return buffer


@pytest.fixture
def bench(make_mac) -> Iterator[Bench]:
    """Opened without questions, closed whatever is wrong."""
    mac = make_mac()
    made = Bench(mac, open_runtime(mac.metal, "", Choices(traits=Traits())))
    yield made
    made.runtime.close()


def released_in_use(bench: Bench) -> None:
    buffer = bench.buffer()
    with bench.objc.pool():
        commands = bench.commands()
        encoder = bench.objc.send(commands, "computeCommandEncoder")
        bench.objc.send(encoder, BIND, buffer, 0, 0)
        bench.objc.send(encoder, "endEncoding")
        bench.objc.send(commands, "commit")
    bench.objc.release(buffer)


def ragged_view(bench: Bench) -> None:
    data = np.zeros(9000, np.uint8)
    misaligned = bench.objc.ffi.cast("void *", data.ctypes.data | 1)
    selector = "newBufferWithBytesNoCopy:length:options:deallocator:"
    bench.objc.send(bench.device, selector, misaligned, 4096, 0, bench.objc.ffi.NULL)


def large_groups(bench: Bench) -> None:
    pipeline = bench.runtime.program.kernel(Module("add")).handle
    bench.encoded(("setComputePipelineState:", pipeline), (DISPATCH, (1, 1, 1), (256, 1, 1)))


def copied(bench: Bench, nbytes: int) -> None:
    buffer = bench.buffer()
    bench.encoded((COPY, buffer, 0, buffer, 0, nbytes), kind="blitCommandEncoder")


BIND, USE = "setBuffer:offset:atIndex:", "useResources:count:usage:"
DISPATCH = "dispatchThreadgroups:threadsPerThreadgroup:"
COPY = "copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:"
WRONG: dict[str, Callable[[Bench], Any]] = {
    "commit while an encoder is open": lambda b: b.commanded("computeCommandEncoder", "commit"),
    "an encoder was released without endEncoding": lambda b: b.commanded("computeCommandEncoder"),
    "blitCommandEncoder while an encoder is open":
        lambda b: b.commanded("computeCommandEncoder", "blitCommandEncoder"),
    "endEncoding twice": lambda b: b.encoded(("endEncoding",)),
    "something was encoded behind endEncoding":
        lambda b: b.encoded(("endEncoding",), (BIND, b.buffer(), 0, 0)),
    "commit behind commit": lambda b: b.commanded("commit", "commit"),
    "a buffer bound at index 31, offset 0": lambda b: b.encoded((BIND, b.buffer(), 0, 31)),
    "offset 4096 of a buffer of 4096 bytes": lambda b: b.encoded((BIND, b.buffer(), 4096, 0)),
    "a buffer bound at index 0, offset 12": lambda b: b.encoded((BIND, b.buffer(), 12, 0)),
    "a resource is no FakeBuffer that is alive":
        lambda b: b.encoded((USE, b.objc.ffi.new("id[]", [b.released()]), 1, 3)),
    "contents was sent to a released MTLBuffer": lambda b: b.objc.send(b.released(), "contents"),
    "a buffer was released that committed commands use": released_in_use,
    "a MTLCommandBuffer was left to a pool and there is none": lambda b: b.commands(),
    "a copy beyond a buffer's end": lambda b: copied(b, 8192),
    "a copy from 0 to 0 of 7: all multiples of 4": lambda b: copied(b, 7),
    "256 threads of a pipeline for 128": large_groups,
    "a dispatch without a pipeline": lambda b: b.encoded((DISPATCH, (1, 1, 1), (128, 1, 1))),
    "a buffer of 0 bytes, at most 2147483648": lambda b: b.buffer(0),
    "buffer options 32: the simulation has shared ones alone":
        lambda b: b.objc.send(b.device, "newBufferWithLength:options:", 64, 2 << 4),
    "a view of memory that is not whole pages": ragged_view,
    "MTLDevice does not know commit": lambda b: b.objc.send(b.device, "commit"),
}  # fmt: skip
"""What is told of each mistake, and what makes it."""


@pytest.mark.parametrize("told", WRONG)
def test_wrong_messages_are_told(bench, told):
    """Each mistake of a caller has a line of its own."""
    WRONG[told](bench)
    assert told in bench.mac.problems


def spoiled(
    make_mac: MakeMac, monkeypatch: pytest.MonkeyPatch, selector: str, instead: Any
) -> FakeMetal:
    """A Mac on which the tier sends ``instead(own, receiver, *arguments)`` for one selector."""
    mac = make_mac()
    send = ObjectiveC.send

    def sent(self: ObjectiveC, receiver: Any, name: str, *arguments: Any) -> Any:
        if name != selector:
            return send(self, receiver, name, *arguments)
        return instead(lambda *given: send(self, receiver, name, *given), *arguments)

    monkeypatch.setattr(ObjectiveC, "send", sent)
    return mac


TRICKS: dict[str, tuple[str, Callable[..., Any], type[BaseException], str]] = {
    "no resources": (
        *("useResources:count:usage:", lambda own, *a: None),
        *(DeviceLost, "PageFault"),
    ),
    "resources are read alone": (
        "useResources:count:usage:",
        lambda own, resources, count, usage: own(resources, count, 1),
        *(DeviceLost, "PageFault"),
    ),
    "pipelines not dispatched": (
        "dispatchThreadgroups:threadsPerThreadgroup:",
        lambda own, groups, items: own(groups, items) if groups[0] else None,
        *(DeviceLost, "InvalidResource"),
    ),
    "pipelines not for commands": (
        *("setSupportIndirectCommandBuffers:", lambda own, on: own(False)),
        *(DeviceLost, "InvalidResource"),
    ),
    "no barrier": ("setBarrier", lambda own: None, AssertionError, ""),
    "another launch's arguments": (
        "setKernelBuffer:offset:atIndex:",
        lambda own, buffer, offset, index: own(buffer, offset // 512 * 512, index),
        *(AssertionError, ""),
    ),
    "no commit": ("commit", lambda own: None, DeviceLost, "did not end"),
    "smaller groups": (
        "concurrentDispatchThreadgroups:threadsPerThreadgroup:",
        lambda own, groups, items: own(groups, (64, 1, 1)),
        *(AssertionError, ""),
    ),
}


@pytest.mark.parametrize("trick", TRICKS)
def test_a_step_without_one_of_its_messages_fails(make_mac, monkeypatch, trick):
    """Nothing a step says is there in vain: an error, or wrong bits."""
    selector, instead, error, said = TRICKS[trick]
    seconds = 0.2 if said == "did not end" else PATIENCE_SECONDS
    monkeypatch.setattr(queue, "PATIENCE_SECONDS", seconds)
    mac = spoiled(make_mac, monkeypatch, selector, instead)
    tier = MetalTier(choices=Choices(traits=Traits()), metal=mac.metal)
    with pytest.raises(error, match=said or None):
        one_step(tier, seconds)
    monkeypatch.undo()
    monkeypatch.setattr("accel.metal.tier.GRACE_SECONDS", 0.01)
    tier.close()


def one_step(tier: MetalTier, seconds: float) -> None:
    """Lowered, run within ``seconds``, compared."""
    lowered = Doubling(tier)
    values = values_of(0)
    fence = tier.submit(lowered.batch, inputs_of(values), ("y",))
    tier.wait(fence, seconds)
    lowered.check(fence.outputs["y"], values)


def test_inputs_in_one_place_for_all_steps_fail(make_mac, monkeypatch):
    """Steps under way must not share a recording: the host writes before the device reads."""
    mac = make_mac(looks=1 << 30)
    with MetalTier(metal=mac.metal) as tier:
        lowered = Doubling(tier)
        lowered.run()
        recording = lowered.batch.launch.made[0]
        monkeypatch.setattr(tier._submissions, "_free_slots", lambda batch: [recording])
        fences = [tier.submit(lowered.batch, inputs_of(values_of(n)), ("y",)) for n in range(2)]
        tier.wait(fences[0])
        with pytest.raises(AssertionError):
            lowered.check(fences[0].outputs["y"], values_of(0))
        tier.wait(fences[1])
        tier.free(lowered.y)


def test_the_bench_is_right(bench):
    """Without a mistake nothing is told."""
    with MetalTier(metal=bench.mac.metal) as tier:
        run_doubling(tier, 2)
    assert bench.mac.problems == []
