"""Several devices on the double of the driver: contexts that reach each other's memory, and kernels
that wait for each other.

A device goes on only while somebody waits for it, or another device does that somebody waits for:
so one is a whole step ahead of the others, or behind, wherever nothing forbids it."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from accel.cuda.gathers import words_of_others
from accel.cuda.program import Source
from accel.cuda.step_table import HEAD
from accel.packets.packet import INPUT_MEMORY, PACKET, SCRATCH_MEMORY
from tests.cuda.emulated_launch import run_all
from tests.cuda.emulator import ENTRY, Emulated, emulate
from tests.cuda.fake_context import SUCCESS, CUresult, FakeContext, words
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.fake_kernels import OFFSET_MASK

GATHER = "all_gather"
STEP_AT, HEARD_AT = 1, 2
"""Words of a launch by which devices meet, see ``kernels/sending.h``."""
AWAITED = "    await_others(others, now);\n"
REDEFINED = """
#undef __shared__
#define __shared__ static
"""
PLAIN = "(U64 scratch, U64 inputs, const __grid_constant__ PACKET packet)"
INSTRUCTIONS = {
    r'asm\("cvt\.f32\.f16.*': "value = half_bits(bits);",
    r'asm\("dp4a\.s32\.s32.*': "sum = emulated_dot(a, b, true);",
    r'asm\("dp4a\.s32\.u32.*': "sum = emulated_dot(a, b, false);",
}
ENTRIES = r"KERNEL\((\w+)\)(?=\s*\{)", r'extern "C" __global__ void launch_\1' + PLAIN
OTHERWISE = "#undef KERNEL"
"""In the text of a kernel that has a plain one's as a function."""
DOT = """
static int emulated_dot(unsigned a, unsigned b, bool is_signed) {
    int sum = 0;
    for (int i = 0; i < 4; i++) sum += byte_at(a, i, true) * byte_at(b, i, is_signed);
    return sum;
}
"""


class Function(str):
    """A kernel's name, and the text and macros of its module."""

    image: bytes

    @property
    def source(self) -> Source:
        """What it was compiled from."""
        lines = self.image.decode().split("\n")
        options = [line for line in lines[: lines.index("")] if line.startswith("-")]
        macros = [line[2:].split("=") for line in options if line.startswith("-D")]
        text = "\n".join(lines[len(options) :])
        return Source(str(self), text, tuple((name, int(value)) for name, value in macros))


@dataclass
class DeviceContext(FakeContext):
    """A context of device ``device``."""

    device: int = 0
    reached: list[FakeContext] = field(default_factory=list)


@dataclass
class CompletionWaiter:
    """The end of a launch that gathers: nothing happens but that all have come."""

    ready: Callable[[], bool]

    def __call__(self) -> None:
        pass


class FakeDevices(FakeDriver):
    """``count`` devices that reach each other, but for those ``apart``: pairs of numbers."""

    def __init__(self, count: int = 2, **attributes: int) -> None:
        super().__init__(**attributes)
        self.devices = count
        self.apart: set[tuple[int, int]] = set()
        self.of_device: dict[tuple[str, int], int] = {}
        self.contexts: list[DeviceContext] = []
        self.gathers = 0
        self.broken: tuple[FakeContext, Callable[[], None]] | None = None
        """A context, and what happens there instead of a gather."""

    def new_context(self, device: int) -> FakeContext:
        made = DeviceContext(device=device)
        for other in self.contexts:
            if not other.destroyed:
                other.others.append(made)
                made.others.append(other)
        self.contexts.append(made)
        return made

    def cuDeviceGetAttribute(self, name: str, device: int) -> tuple[Any, ...]:
        return SUCCESS, self.of_device.get((name, device), self.attributes[name])

    def cuDeviceCanAccessPeer(self, device: int, other: int) -> tuple[Any, ...]:
        return SUCCESS, int((device, other) not in self.apart)

    def cuCtxEnablePeerAccess(self, other: DeviceContext, flags: int) -> tuple[Any, ...]:
        assert isinstance(self.current, DeviceContext)
        assert other not in self.current.reached
        assert other.device != self.current.device
        self.current.reached.append(other)
        return (SUCCESS,)

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[Any, ...]:
        if not self._has(module, name.decode()):
            return CUresult.CUDA_ERROR_NOT_FOUND, None
        function = Function(name.decode())
        function.image = module
        return SUCCESS, function

    def _has(self, module: bytes, name: str) -> bool:
        return name == GATHER or name in self.kernels

    def cuLaunchKernelEx(
        self, config: Any, function: Any, arguments: int, extra: int
    ) -> tuple[Any, ...]:
        if function != GATHER:
            return super().cuLaunchKernelEx(config, function, arguments, extra)
        gather = Gather.of_launch(self.current, function.source, arguments)
        self.launched.append((str(function), [attribute.id for attribute in config.attrs]))
        self.gathers += 1

        def send() -> None:
            if self.broken is not None and self.broken[0] is gather.context:
                self.broken[1]()
            else:
                gather.send()

        self._enqueue(send)
        return self._enqueue(CompletionWaiter(gather.has_come))


@dataclass
class Gather:
    """What ``kernels/all_gather.cu`` does: see there."""

    context: FakeContext
    scratch: int
    inputs: int
    packets: np.ndarray
    others: np.ndarray
    tensors: int
    peers: int

    @classmethod
    def of_launch(cls, context: FakeContext, source: Source, arguments: int) -> Gather:
        """With the arguments at an address."""
        macros = dict(source.macros)
        packets, peers = macros["PACKET_COUNT"] * PACKET.itemsize, macros["PEERS"]
        scratch, inputs, third, _ = (int(place) for place in _places(arguments, 4))
        given = ctypes.string_at(third, packets + _others_bytes(macros))
        return cls(
            context, int(words(scratch, 2).view(np.uint64)[0]),
            int(words(inputs, 2).view(np.uint64)[0]), np.frombuffer(given[:packets], PACKET),
            np.frombuffer(given[packets:], np.int64), macros.get("TENSORS", 0), peers,
        )  # fmt: skip

    def send(self) -> None:
        """The parts, and a word behind them."""
        for number in range(self.tensors):
            packet = self.packets[number]
            count, _, columns = (int(size) for size in packet["size"][:3])
            if packet["counted"]:
                count *= int(words(self.inputs, 4)[packet["counted"] - 1])
            stride = 4 * int(packet["stride"][0])
            part = self._at(int(packet["operand"][0]), self.scratch, self.inputs)
            for peer in range(self.peers):
                record = self._record(peer)
                to = part + int(record[1 + number])
                for row in range(count):
                    target = to + row * stride
                    self._check(target, 4 * columns)
                    ctypes.memmove(target, part + row * stride, 4 * columns)
        self._words[STEP_AT] += 1
        for peer in range(self.peers):
            address = int(self._record(peer)[0]) + 4 * (HEARD_AT + int(self.others[1]))
            self._check(address, 4)
            words(address, 1)[:] = self._words[STEP_AT]

    def has_come(self) -> bool:
        """Whether all others have sent, or nobody is to wait any more."""
        if words(int(self.others[0]), 1)[0]:
            return True
        heard = np.delete(self._words[HEARD_AT:], int(self.others[1]))
        return bool((heard == self._words[STEP_AT]).all())

    @property
    def _words(self) -> np.ndarray:
        return words(int(self.others[2]), HEARD_AT + self.peers + 1)

    def _record(self, peer: int) -> np.ndarray:
        each = len(self.others[3:]) // self.peers
        return self.others[3 + peer * each : 3 + (peer + 1) * each]

    def _at(self, stored: int, scratch: int, inputs: int) -> int:
        base = scratch * bool(stored & SCRATCH_MEMORY) + inputs * bool(stored & INPUT_MEMORY)
        return base + (stored & OFFSET_MASK)

    def _check(self, address: int, nbytes: int) -> None:
        """Peers' memory that was made reachable."""
        assert isinstance(self.context, DeviceContext)
        blocks = [block for other in self.context.reached for block in other.blocks.items()]
        assert any(a <= address and address + nbytes <= a + len(b) for a, b in blocks), "not theirs"


@dataclass
class SharedLaunch:
    """One device's part of a launch that devices execute together: it begins when all of them have
    come to it, and ends for all at once."""

    driver: EmulatedDevices
    context: DeviceContext
    source: Source
    blocks: int
    threads: int
    arguments: list[int]

    @property
    def _fronts(self) -> list[object]:
        contexts = (one for one in self.driver.contexts if not one.destroyed)
        return [one.queue[0] if one.queue else None for one in contexts]

    @property
    def _stopped(self) -> bool:
        table = words(self.arguments[2], HEAD.itemsize // 4).view(HEAD)
        return bool(words(int(table["stop"][0]), 1)[0])

    def ready(self) -> bool:
        """Whether all devices have come, or this one is not to wait any more."""
        everybody = all(isinstance(one, SharedLaunch) for one in self._fronts)
        return id(self.context) in self.driver.ended or everybody or self._stopped

    def __call__(self) -> None:
        ended = self.driver.ended
        if id(self.context) in ended or self._stopped:
            ended.discard(id(self.context))
            return
        # The device that executes it has taken its own from its queue already.
        others = [one for one in self._fronts if isinstance(one, SharedLaunch)]
        together = [self, *(one for one in others if one.context is not self.context)]
        together.sort(key=lambda one: one.context.device)
        run_all(
            self.source, self.blocks, self.threads, [[one.arguments for one in together]],
            self.driver.shared, self.driver.folder,
        )  # fmt: skip
        self.driver.shared += 1
        ended.update(id(one.context) for one in together if one is not self)


class EmulatedDevices(FakeDevices):
    """Their kernels are the real ones, block by block; gathers are those above. ``shared`` counts
    the launches that they executed together, ``sent`` those that store results on all devices."""

    def __init__(self, folder: Path, count: int = 2, **attributes: int) -> None:
        super().__init__(count, **attributes)
        self.folder = folder
        self.shared = self.sent = 0
        self.ended: set[int] = set()
        self._built: dict[Source, Emulated] = {}
        self._building = Lock()

    def _has(self, module: bytes, name: str) -> bool:
        return True

    def cuLaunchKernelEx(
        self, config: Any, function: Any, arguments: int, extra: int
    ) -> tuple[Any, ...]:
        if function == GATHER:
            return super().cuLaunchKernelEx(config, function, arguments, extra)
        if dict(function.source.macros).get("SHARED_STEP"):
            given = [
                int(words(int(place), 2).view(np.uint64)[0]) for place in _places(arguments, 4)
            ]
            assert isinstance(self.current, DeviceContext)
            made = SharedLaunch(
                self, self.current, function.source, config.gridDimX, config.blockDimX, given
            )
            return self._enqueue(made)
        built, kinds = self._kernel(function)
        values = []
        kept = []
        for place, (kind, macros) in zip(_places(arguments, len(kinds)), kinds, strict=True):
            size = _size(kind, macros)
            data = ctypes.create_string_buffer(ctypes.string_at(int(place), size), size)
            kept.append(data)
            by_address = "__grid_constant__" in kind
            own = ctypes.addressof(data)
            values.append(own if by_address else int.from_bytes(data.raw[:size], "little"))
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        self.launched.append((str(function), [attribute.id for attribute in config.attrs]))

        def run(kept: object = kept) -> None:
            built.run(str(function), grid, config.blockDimX, *values)

        done = self._enqueue(run)
        macros = dict(function.source.macros)
        if macros.get("PEERS") and macros.get("MEETS", 1):
            sent = Gather.of_launch(self.current, function.source, arguments)
            self.sent += 1
            done = self._enqueue(CompletionWaiter(sent.has_come))
        return done

    def _kernel(self, function: Function) -> tuple[Emulated, list[tuple[str, dict[str, int]]]]:
        source = function.source
        text = source.text.replace(AWAITED, "")
        for pattern, instead in INSTRUCTIONS.items():
            text = re.sub(pattern, instead, text)
        if OTHERWISE not in text:
            text = re.sub(*ENTRIES, text)
        with self._building:
            if source not in self._built:
                before = DOT if "BLOCK_MEMORY" in text else REDEFINED + DOT
                changed = Source(source.name, before + text, source.macros)
                self._built[source] = emulate(changed, self.folder)
        found = next(match for match in ENTRY.finditer(text) if match["entry"] == str(function))
        return self._built[source], [
            (kind.strip(), dict(source.macros)) for kind in found["parameters"].split(",")
        ]


def _places(arguments: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(arguments))


def _others_bytes(macros: dict[str, int]) -> int:
    """Bytes behind the packets of a launch in which devices meet."""
    peers = macros.get("PEERS", 0)
    return peers and 8 * words_of_others(peers, macros["SENDS"])


def _size(kind: str, macros: dict[str, int]) -> int:
    """Bytes of an argument."""
    if "PACKETS" in kind:
        return macros["PACKET_COUNT"] * PACKET.itemsize + _others_bytes(macros)
    if "PACKET" in kind:
        return PACKET.itemsize
    return 4 if kind.startswith("unsigned") and "*" not in kind else 8
