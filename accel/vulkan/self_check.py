"""Tests a device's arithmetic once before a model runs on it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from accel.kernels.device_probe import RESULTS, Found, columns, samples
from accel.kernels.source import ALL_OPS, GROUP_SIZE, Module, Traits
from accel.packets.device_op import DeviceOp, pieces
from accel.packets.step_memory import StepAddresses
from accel.vulkan.memory import Memory
from accel.vulkan.program import Pipeline, Program
from accel.vulkan.pushed import Packets, lone_packet, pushed
from accel.vulkan.queue import Queue


def ask(queue: Queue, memory: Memory, program: Program, traits: Traits) -> Found:
    """The device's results for the samples, computed by kernels for ``traits``."""
    pipeline = program.pipeline(Module("self_test"), traits)
    given = samples()
    count = len(given.a)
    data = [array.view(np.uint8) for array in (given.a, given.b, given.words)]
    buffers = [memory.adopt("self-test", array) for array in data]
    buffers.append(memory.allocate("self-test", 4 * len(RESULTS) * count))
    addresses = [buffer.address for buffer in buffers]
    groups = pieces(count, GROUP_SIZE)
    launch_alone(queue, memory, program, "self_test", pipeline, addresses, (count,), groups)
    words = memory.read(buffers[-1], 0, buffers[-1].nbytes).view(np.int32).reshape(count, -1)
    for buffer in buffers:
        memory.free(buffer)
    return columns(words)


def launch_alone(
    queue: Queue,
    memory: Memory,
    program: Program,
    name: str,
    pipeline: Pipeline,
    operands: list[int],
    sizes: tuple[int, ...],
    groups: int,
) -> None:
    """Run a kernel of op ``name`` outside of any step, and wait for it."""
    packet = lone_packet(operands, sizes)
    launch_packet(queue, memory, program, ALL_OPS[name], pipeline, packet, groups)


def launch_packet(
    queue: Queue,
    memory: Memory,
    program: Program,
    op: DeviceOp,
    pipeline: Pipeline,
    packet: NDArray[np.void],
    groups: int,
) -> None:
    """Run a kernel with the given PACKET[1] outside of any step, and wait for it."""
    stored = memory.adopt("packet", packet.view(np.uint8))
    vulkan = queue.vulkan
    stage = vulkan.flags("SHADER_STAGE", "COMPUTE")
    given = pushed(op, Packets(packet, stored.address), 0, StepAddresses())

    def fill(commands: object) -> None:
        point = vulkan.constant("PIPELINE_BIND_POINT_COMPUTE")
        vulkan.run("CmdBindPipeline", commands, point, pipeline.handle)
        data = vulkan.ffi.from_buffer(given)
        vulkan.run("CmdPushConstants", commands, program.layout, stage, 0, len(given), data)
        vulkan.run("CmdDispatch", commands, groups, 1, 1)

    queue.await_number(queue.run_once(fill))
    memory.free(stored)
