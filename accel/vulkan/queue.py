"""An open device with one queue, which executes everything in the order of submission."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from accel.vulkan.api import TIER, Vulkan, VulkanError
from accel.vulkan.device import (
    FEATURES,
    FEATURES_11,
    FEATURES_12,
    INTEGER_DOT,
    MEMORY_BUDGET,
    Device,
    feature_chain,
)
from accel.vulkan.matrices import EXTENSION as MATRICES
from accel.vulkan.matrices import matrix_features
from contract.errors import DeviceLost, TierUnavailable

NANOSECONDS = 1_000_000_000
PATIENCE_SECONDS = 600.0
"""Longest that memory operations wait for earlier submissions."""
OPTIONAL_FEATURES_12 = ("shaderFloat16",)

Fill = Callable[[Any], None]
"""Records commands into a command buffer."""


class Queue:
    """The only queue of ``device``. Raises TierUnavailable when the device cannot be opened.

    Every submission has a number, and submissions end in the order of their numbers."""

    def __init__(self, vulkan: Vulkan, device: Device) -> None:
        self.vulkan = vulkan
        self.device = device
        self.submitted = 0
        self._once: deque[tuple[int, Any]] = deque()
        self._closed = False
        self.family = _compute_family(vulkan, device)
        try:
            self.handle = vulkan.create("Device", device.handle, self._information())
        except VulkanError as error:
            reason = f"{device.name} cannot be opened ({error})"
            raise TierUnavailable(TIER, reason, "free the device or choose another") from None
        try:
            self._prepare()
        except VulkanError as error:
            vulkan.run("DestroyDevice", self.handle, vulkan.ffi.NULL)
            reason = f"{device.name} cannot be used ({error})"
            raise TierUnavailable(TIER, reason, "free the device or choose another") from None

    def record(self, fill: Fill, once: bool = False) -> Any:
        """A command buffer that can be submitted any number of times, even while it runs, or only
        ``once``."""
        vulkan = self.vulkan
        information = vulkan.structure(
            "CommandBufferAllocateInfo", commandPool=self._pool, commandBufferCount=1
        )
        handle = vulkan.ffi.new("VkCommandBuffer *")
        vulkan.call("AllocateCommandBuffers", self.handle, information, handle)
        commands = handle[0]
        usage = "ONE_TIME_SUBMIT" if once else "SIMULTANEOUS_USE"
        flags = vulkan.flags("COMMAND_BUFFER_USAGE", usage)
        try:
            begin = vulkan.structure("CommandBufferBeginInfo", flags=flags)
            vulkan.call("BeginCommandBuffer", commands, begin)
            fill(commands)
            vulkan.call("EndCommandBuffer", commands)
        except BaseException:
            self.free([commands])
            raise
        return commands

    def free(self, recorded: Sequence[Any]) -> None:
        """Free command buffers, none of which may be running."""
        if not self._closed and recorded:
            handles = self.vulkan.array("VkCommandBuffer", list(recorded))
            self.vulkan.run("FreeCommandBuffers", self.handle, self._pool, len(recorded), handles)

    def submit(self, batches: Sequence[Sequence[Any]]) -> int:
        """Start command buffers after all earlier ones, in one call, and return the submission's
        number.

        Each batch is work that the driver hands to the device separately."""
        vulkan = self.vulkan
        number = self.submitted + 1
        self._value[0] = number
        infos, entries = [], []
        for index, batch in enumerate(batches):
            handles = vulkan.array("VkCommandBuffer", list(batch))
            entry = {"commandBufferCount": len(batch), "pCommandBuffers": handles}
            if index == len(batches) - 1:
                entry |= {"pNext": self._signal, "signalSemaphoreCount": 1}
                entry |= {"pSignalSemaphores": self._semaphores}
            infos.append(vulkan.structure("SubmitInfo", **entry))
            entries.append(infos[-1][0])
        array = vulkan.array("VkSubmitInfo", entries)
        vulkan.call("QueueSubmit", self._queue, len(entries), array, vulkan.ffi.NULL)
        self.submitted = number
        return number

    def run_once(self, fill: Fill) -> int:
        """Record and submit ``fill`` between two full barriers, and return the submission's
        number."""

        def fenced(commands: Any) -> None:
            self.barrier(commands)
            fill(commands)
            self.barrier(commands)

        self._recycle()
        commands = self.record(fenced, once=True)
        number = self.submit([[commands]])
        self.free_after(number, commands)
        return number

    def free_after(self, number: int, commands: Any) -> None:
        """Free a command buffer some time after submission ``number`` has ended."""
        self._once.append((number, commands))

    def barrier(self, commands: Any) -> None:
        """Record a barrier: everything before it has ended and is visible to device and host before
        what follows."""
        stages = self._all_stages
        self.vulkan.run("CmdPipelineBarrier", commands, stages, stages, *self._full)

    def level_barrier(self, commands: Any) -> None:
        """Record a barrier between kernels: later ones see what earlier ones wrote and may
        overwrite what those read."""
        stage = self._compute_stage
        self.vulkan.run("CmdPipelineBarrier", commands, stage, stage, *self._level)

    def bind(self, commands: Any, pipeline: Any) -> None:
        """Record that the launches that follow run ``pipeline``."""
        self.vulkan.run("CmdBindPipeline", commands, self._bind_point, pipeline)

    def dispatch(self, commands: Any, layout: Any, constants: bytes, groups: int) -> None:
        """Record a launch of ``groups`` work-groups with these push constants."""
        data = self.vulkan.ffi.from_buffer(constants)
        stage = self._shader_stage
        self.vulkan.run("CmdPushConstants", commands, layout, stage, 0, len(data), data)
        self.vulkan.run("CmdDispatch", commands, groups, 1, 1)

    def reached(self, number: int) -> bool:
        """Whether submission ``number`` has ended."""
        counter = self._counter
        self.vulkan.call("GetSemaphoreCounterValue", self.handle, self._timeline, counter)
        return bool(counter[0] >= number)

    def wait(self, number: int, seconds: float) -> bool:
        """Sleep until submission ``number`` has ended, at most ``seconds``; returns whether it
        has."""
        self._awaited[0] = number
        nanoseconds = min(int(seconds * NANOSECONDS), (1 << 63) - 1)
        result = self.vulkan.call("WaitSemaphores", self.handle, self._wait, nanoseconds)
        return result == self._success

    def finish(self) -> None:
        """Wait for everything submitted. Raises DeviceLost when it does not end."""
        self.await_number(self.submitted)

    def await_number(self, number: int) -> None:
        """Wait for submission ``number``. Raises DeviceLost when it does not end."""
        if not self.wait(number, PATIENCE_SECONDS):
            raise DeviceLost(
                f"{self.device.name}: a copy did not end within {PATIENCE_SECONDS:g} s"
            )

    def close(self, lost: bool) -> None:
        """Destroy the device; if it is ``lost``, only what can be destroyed safely."""
        if self._closed:
            return
        self._closed = True
        if lost:
            return
        vulkan, null = self.vulkan, self.vulkan.ffi.NULL
        vulkan.call("DeviceWaitIdle", self.handle)
        vulkan.run("DestroyCommandPool", self.handle, self._pool, null)
        vulkan.run("DestroySemaphore", self.handle, self._timeline, null)
        vulkan.run("DestroyDevice", self.handle, null)

    def _information(self) -> Any:
        """The creation parameters of the device: one queue, and the features that are used."""
        vulkan, device = self.vulkan, self.device
        dot = device.integer_dot and INTEGER_DOT in device.extensions
        chain, structures, packed = feature_chain(vulkan, dot)
        for found, names in zip(structures, (FEATURES, FEATURES_11, FEATURES_12), strict=True):
            for name in names:
                setattr(found, name, 1)
        offered, (_, _, twelve), _ = feature_chain(vulkan, False)
        vulkan.run("GetPhysicalDeviceFeatures2", device.handle, offered)
        for name in OPTIONAL_FEATURES_12:
            setattr(structures[2], name, getattr(twelve, name))
        packed.shaderIntegerDotProduct = dot
        if device.matrices:
            structures[2].vulkanMemoryModel = 1
            chain = matrix_features(vulkan, chain)
        queue = vulkan.structure(
            "DeviceQueueCreateInfo",
            queueFamilyIndex=self.family,
            queueCount=1,
            pQueuePriorities=vulkan.array("float", [1.0]),
        )
        requested = [e for e in (INTEGER_DOT, MEMORY_BUDGET) if e in device.extensions]
        requested += [MATRICES] if device.matrices else []
        names = vulkan.array("char *", [vulkan.text(name) for name in requested])
        return vulkan.structure(
            "DeviceCreateInfo",
            pNext=chain,
            queueCreateInfoCount=1,
            pQueueCreateInfos=queue,
            enabledExtensionCount=len(requested),
            ppEnabledExtensionNames=names,
        )

    def _prepare(self) -> None:
        """Create the objects that every submission needs."""
        vulkan = self.vulkan
        handle = vulkan.ffi.new("VkQueue *")
        vulkan.run("GetDeviceQueue", self.handle, self.family, 0, handle)
        self._queue = handle[0]
        pool = vulkan.structure("CommandPoolCreateInfo", queueFamilyIndex=self.family)
        self._pool = vulkan.create("CommandPool", self.handle, pool)
        kind = vulkan.structure(
            "SemaphoreTypeCreateInfo", semaphoreType=vulkan.constant("SEMAPHORE_TYPE_TIMELINE")
        )
        semaphore = vulkan.structure("SemaphoreCreateInfo", pNext=kind)
        self._timeline = vulkan.create("Semaphore", self.handle, semaphore)
        self._semaphores = vulkan.array("VkSemaphore", [self._timeline])
        self._value = vulkan.array("uint64_t", 1)
        self._signal = vulkan.structure(
            "TimelineSemaphoreSubmitInfo",
            signalSemaphoreValueCount=1,
            pSignalSemaphoreValues=self._value,
        )
        self._awaited = vulkan.array("uint64_t", 1)
        self._wait = vulkan.structure(
            "SemaphoreWaitInfo",
            semaphoreCount=1,
            pSemaphores=self._semaphores,
            pValues=self._awaited,
        )
        self._counter = vulkan.ffi.new("uint64_t *")
        self._success = vulkan.constant("SUCCESS")
        self._all_stages = vulkan.flags("PIPELINE_STAGE", "ALL_COMMANDS", "HOST")
        self._compute_stage = vulkan.flags("PIPELINE_STAGE", "COMPUTE_SHADER")
        self._shader_stage = vulkan.flags("SHADER_STAGE", "COMPUTE")
        self._bind_point = vulkan.constant("PIPELINE_BIND_POINT_COMPUTE")
        self._full = self._memory_barrier(("MEMORY_WRITE",), ("MEMORY_READ", "MEMORY_WRITE"))
        self._level = self._memory_barrier(("SHADER_WRITE",), ("SHADER_READ", "SHADER_WRITE"))

    def _memory_barrier(self, before: tuple[str, ...], after: tuple[str, ...]) -> tuple[Any, ...]:
        """The arguments of vkCmdPipelineBarrier from its flags on."""
        vulkan, null = self.vulkan, self.vulkan.ffi.NULL
        barrier = vulkan.structure(
            "MemoryBarrier",
            srcAccessMask=vulkan.flags("ACCESS", *before),
            dstAccessMask=vulkan.flags("ACCESS", *after),
        )
        return 0, 1, barrier, 0, null, 0, null

    def _recycle(self) -> None:
        while self._once and self.reached(self._once[0][0]):
            self.free([self._once.popleft()[1]])


def _compute_family(vulkan: Vulkan, device: Device) -> int:
    """The first queue family that computes; every device has one that also copies."""
    families = vulkan.list_all(
        "GetPhysicalDeviceQueueFamilyProperties", "QueueFamilyProperties", device.handle
    )
    compute = vulkan.flags("QUEUE", "COMPUTE")
    for number, family in enumerate(families):
        if family.queueFlags & compute:
            return number
    raise TierUnavailable(TIER, f"{device.name} computes nothing", "choose another device")
