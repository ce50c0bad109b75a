"""What a device is asked once before it is trusted with a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from accel.kernels.source import ALL_OPS, GROUP_SIZE, Module, Traits
from accel.packets.ops import pieces
from accel.packets.samples import Float32, sample_pairs
from accel.vulkan.api import TIER
from accel.vulkan.memory import Memory
from accel.vulkan.program import Pipeline, Program
from accel.vulkan.pushed import Packets, Places, lone_packet, pushed
from accel.vulkan.queue import Queue
from contract.errors import TierUnavailable

NEWER_HINT = "choose another device or a newer driver"
RESULTS = (
    *("divide", "root", "contraction", "difference", "regrouping"),
    *("half", "narrowing", "signed", "mixed"),
)
"""Columns of what ``kernels/self_test.k`` writes."""
INTEGERS = ("narrowing", "signed", "mixed")
TINY = 2048
"""Samples at the end that are subnormal. Sums and products of them may be flushed (rule R0), but a
tier divides in integers where a division would: what a token is can depend on it."""
JUDGED_TINY = ("divide", "root")
ALL_NATIVE = Traits(divide=True, root=True, half=True, dot=True)

Found = dict[str, NDArray[np.float32] | NDArray[np.int32]]
Answer = Callable[[Traits], Found]


@dataclass(frozen=True, slots=True)
class Samples:
    """What the device computes with: pairs of floats, and words whose low halves are binary16."""

    a: Float32
    b: Float32
    words: NDArray[np.uint32]

    @property
    def expected(self) -> Found:
        """The results of numpy, each operation rounded once."""
        a, b = self.a, self.b
        halves = self.words.astype(np.uint16).view(np.float16)
        packed, other = self.words.view(np.int8).astype(np.int32), a.view(np.int8).astype(np.int32)
        unsigned = a.view(np.uint8).astype(np.int32)
        most = np.float32(np.finfo(np.float16).max)
        return {
            "divide": a / b,
            "root": np.sqrt(a),
            "contraction": a * b + a,
            "difference": a - (b - np.float32(1)),
            "regrouping": (a + b) - a,
            "half": halves.astype(np.float32),
            "narrowing": np.minimum(b, most).astype(np.float16).view(np.uint16).astype(np.int32),
            "signed": (packed * other).reshape(-1, 4).sum(axis=1, dtype=np.int32),
            "mixed": (packed * unsigned).reshape(-1, 4).sum(axis=1, dtype=np.int32),
        }


def samples() -> Samples:
    """Pairs spread over many exponents, then subnormal ones; every fourth binary16 number of both
    signs in words whose upper bytes take the extremes."""
    a, b = sample_pairs()
    tiny = np.random.default_rng(21).integers(1, 1 << 23, TINY, dtype=np.uint32).view(np.float32)
    a, b = np.concatenate([a, tiny]), np.concatenate([b, np.abs(b[:TINY]) + np.float32(1)])
    low = np.resize(np.arange(0, 1 << 16, 4, dtype=np.uint32), len(a))
    upper = np.resize(np.array([0x8080, 0x7F7F, 0x80FF, 0x0001], np.uint32), len(a))
    return Samples(a, b, low | upper << np.uint32(16))


def traits_of(answer: Answer, device: str, has_dot: bool) -> Traits:
    """What the device does as the exact arithmetic wants it; integers do the rest.

    Raises TierUnavailable where no remedy helps.
    """
    expected = samples().expected
    native = replace(ALL_NATIVE, dot=has_dot)
    first = _right(answer(native), expected)
    traits = Traits(
        divide=first["divide"],
        root=first["root"],
        half=first["half"],
        dot=has_dot and first["signed"] and first["mixed"],
    )
    wrong = [name for name, right in first.items() if not right]
    if traits != native:
        wrong = [name for name, right in _right(answer(traits), expected).items() if not right]
    if wrong:
        reason = f"{device} does not compute exactly: {', '.join(wrong)}"
        raise TierUnavailable(TIER, reason, NEWER_HINT)
    return traits


def ask(queue: Queue, memory: Memory, program: Program, traits: Traits) -> Found:
    """What the device makes of the samples, compiled for ``traits``."""
    pipeline = program.pipeline(Module("self_test"), traits)
    given = samples()
    count = len(given.a)
    data = [array.view(np.uint8) for array in (given.a, given.b, given.words)]
    places = [memory.adopt("self-test", array) for array in data]
    places.append(memory.allocate("self-test", 4 * len(RESULTS) * count))
    addresses = [place.address for place in places]
    groups = pieces(count, GROUP_SIZE)
    launch_alone(queue, memory, program, "self_test", pipeline, addresses, (count,), groups)
    words = memory.read(places[-1], 0, places[-1].nbytes).view(np.int32).reshape(count, -1)
    for place in places:
        memory.free(place)
    return {
        name: column if name in INTEGERS else column.view(np.float32)
        for name, column in zip(RESULTS, np.ascontiguousarray(words.T), strict=True)
    }


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
    """Run a kernel of op ``name`` that belongs to no step, and wait for it."""
    packet = lone_packet(operands, sizes)
    place = memory.adopt("packet", packet.view(np.uint8))
    vulkan = queue.vulkan
    stage = vulkan.flags("SHADER_STAGE", "COMPUTE")
    given = pushed(ALL_OPS[name], Packets(packet, place.address), 0, Places())

    def fill(commands: object) -> None:
        point = vulkan.constant("PIPELINE_BIND_POINT_COMPUTE")
        vulkan.run("CmdBindPipeline", commands, point, pipeline.handle)
        data = vulkan.ffi.from_buffer(given)
        vulkan.run("CmdPushConstants", commands, program.layout, stage, 0, len(given), data)
        vulkan.run("CmdDispatch", commands, groups, 1, 1)

    queue.await_number(queue.run_once(fill))
    memory.free(place)


def _right(found: Found, expected: Found) -> dict[str, bool]:
    """Whether all judged values are ==; of NaN only that it is one."""
    judged = {name: slice(None if name in JUDGED_TINY else -TINY) for name in expected}
    return {
        name: bool(
            np.array_equal(
                found[name][judged[name]],
                wanted[judged[name]],
                equal_nan=name not in INTEGERS,
            )
        )
        for name, wanted in expected.items()
    }
