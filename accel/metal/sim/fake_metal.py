"""A simulated Mac: an Objective-C runtime, and a Metal whose kernels are compiled as C++.

It does what the real ones do with right calls and records wrong ones, see ``problems``; it has
never been compared with an Apple GPU."""

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accel.metal.objc import TIER, ObjectiveC
from accel.metal.sim import fake_commands, fake_device, fake_encoders
from accel.metal.sim.fake_compiler import FakeCompiler
from accel.metal.sim.fake_machine import Behaviour, FakeBuffer, Machine
from accel.metal.sim.fake_objc import FakeObjc, Method, method, methods_of
from accel.user_folders import user_folder
from contract.errors import TierUnavailable

PROCESSOR = "x86_64"
WRONG_PROCESSOR = f"the simulated Metal device needs Linux on {PROCESSOR}"

NEW = {
    "MTLComputePipelineDescriptor": fake_device.FakePipelineDescriptor,
    "MTLIndirectCommandBufferDescriptor": fake_device.FakeCommandsDescriptor,
}
"""Classes of which a caller creates objects with ``new``."""
MADE = {
    "MTLDevice": fake_device.FakeDevice,
    "MTLFunction": fake_device.FakeFunction,
    "MTLLibrary": fake_device.FakeLibrary,
    "MTLComputePipelineState": fake_encoders.FakePipeline,
    "MTLCommandQueue": fake_commands.FakeQueue,
    "MTLCommandBuffer": fake_commands.FakeCommandBuffer,
    "MTLComputeCommandEncoder": fake_encoders.FakeComputeEncoder,
    "MTLBlitCommandEncoder": fake_encoders.FakeBlitEncoder,
    "MTLIndirectCommandBuffer": fake_encoders.FakeCommands,
    "MTLIndirectComputeCommand": fake_encoders.FakeCommand,
    "MTLSharedEvent": fake_commands.FakeSharedEvent,
}
"""Classes of which only methods of a device, or of its objects, create objects."""


class FakeMetal:
    """One simulated Mac. ``cache`` is the folder of compiled files. Raises TierUnavailable if
    there is no g++, and on another processor."""

    def __init__(self, behaviour: Behaviour | None = None, cache: Path | None = None) -> None:
        if platform.system() != "Linux" or platform.machine() != PROCESSOR:
            raise TierUnavailable(TIER, WRONG_PROCESSOR, "run it on such a machine")
        folder = cache or user_folder("cache") / "metal-simulated"
        self.behaviour = behaviour or Behaviour()
        compiler = FakeCompiler(folder)
        objc = FakeObjc(compiler)
        self._objc = objc
        self._machine = objc.owner = Machine(objc, compiler, self.behaviour)
        objc.add_root()
        strings = fake_device.string_methods()
        objc.add_class("NSString", iter(strings[:2]))
        objc.add_class("NSError", iter(strings[2:]))
        options = (
            fake_device.FakeNewerSettings if self.behaviour.math_mode else fake_device.FakeSettings
        )
        for name, kind in {**NEW, "MTLCompileOptions": options}.items():
            objc.add_class(name, iter([*_methods(kind), fake_device.new(kind, name)]))
        for name, kind in MADE.items():
            objc.add_class(name, iter(_methods(kind)))
        objc.add_class("MTLBuffer", iter(BUFFER_METHODS))
        self.metal = ObjectiveC(objc.ffi, objc.library, self, simulated=True)

    @property
    def problems(self) -> list[str]:
        """The caller's mistakes so far."""
        return self._objc.problems

    @property
    def calls(self) -> list[str] | None:
        """The messages since this was set to a list."""
        return self._objc.calls

    @calls.setter
    def calls(self, calls: list[str] | None) -> None:
        self._objc.calls = calls

    @property
    def leaked(self) -> list[str]:
        """Classes of the objects that were not released."""
        return self._objc.alive()

    @property
    def taken(self) -> int:
        """Bytes of all existing buffers."""
        return self._machine.taken

    def MTLCreateSystemDefaultDevice(self) -> Any:
        """See Metal: nil if there is no device."""
        made = 0
        if self.behaviour.present:
            made = self._objc.make("MTLDevice", fake_device.FakeDevice(self._machine))
        return self._objc.pointer(made)


def _methods(kind: type) -> list[Method]:
    return [each for base in reversed(kind.__mro__) for each in methods_of(base)]


def _of_buffer(value: Callable[[FakeBuffer], int]) -> Callable[[FakeBuffer], int]:
    """``value`` as it is: a lambda gets its parameter's type here."""
    return value


BUFFER_METHODS = (
    method("contents", "^v@:")(_of_buffer(lambda buffer: buffer.host)),
    method("gpuAddress", "Q@:")(_of_buffer(lambda buffer: buffer.device)),
)
