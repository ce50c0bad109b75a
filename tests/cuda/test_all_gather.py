"""Shares of tensors brought to every device, by blocks of all devices that take turns as a drawn
order says."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from accel.cuda.gathers import (
    PART,
    WHOLE,
    addresses_of,
    barrier_bytes,
    gather_rule,
    others_argument,
)
from accel.cuda.program import Source, tuned_source
from accel.cuda.tuned import Remaining, last_reads
from accel.packets.binding import bind_step
from accel.packets.device_op import ANY
from accel.packets.layouts import WeightLayout
from accel.packets.packet import SCRATCH_MEMORY
from accel.packets.schedule import schedule_launches
from accel.packets.shares import ALL_GATHER, Share
from accel.packets.step import Count, Op, Per, Step, Tensor
from contract.ir.inputs import InputLayout
from tests.cuda.emulated_step import DEVICE, aligned_memory
from tests.cuda.emulator import Emulated, emulate

MAX_TOKENS = 5
STRIDE = 200
TENSORS = (Tensor("a", 0, 160, STRIDE), Tensor("a", 161, 37, STRIDE), Tensor("b", 16, 64, 96))
"""Aligned for vectors of four, not aligned, and of another buffer."""
TOGETHER = """
struct CALL { U64 scratch, inputs, packets, ended, seen; };
extern "C" __global__ void all_devices(U64 calls) {
    const CALL &call = ((const CALL *)calls)[blockIdx.x / BLOCKS];
    all_gather(call.scratch, call.inputs, *(const PACKETS *)call.packets, 0);
    // What the next kernel of a device would read.
    __syncthreads();
    if (threadIdx.x == 0 && ++*(unsigned *)call.ended == BLOCKS)
        memcpy((void *)call.seen, (const void *)call.scratch, SEEN_BYTES);
}
"""
TOO_EARLY = """
    if (threadIdx.x == 0 && blockIdx.x == 0) {
        const OTHERS &others = packets.others;
        const unsigned now = ((unsigned *)others.words)[STEP_AT] + 1;
        release_to_system((unsigned *)others.of[0].words + HEARD_AT + others.index, now);
    }
    if (packets.others.index) for (int i = 0; i < 400; i++) spin_pause();
"""
BLOCKS = 3
SEEN_BYTES = 4 * MAX_TOKENS * (STRIDE + 96)


def gathers(share: Share, tensors: tuple[Tensor, ...]) -> list[Op]:
    """Of each tensor, or of none: then devices only wait for each other."""
    count = Count(1, Per.TOKEN, MAX_TOKENS)
    found = [
        Op(ALL_GATHER, (share.part(one), one), (ANY, ANY), count,
           (share.of(one.columns).start, len(share.of(one.columns)), share.count))
        for one in tensors
    ]  # fmt: skip
    nothing = Op(ALL_GATHER, (None, None), (ANY, ANY), Count(0, Per.STEP, 0), (0, 0, share.count))
    return found or [nothing]


def unused(buffer: str) -> tuple[int, int, WeightLayout]:
    raise AssertionError(buffer)


@dataclass
class Member:
    """One device: its memory and what it is called with."""

    share: Share
    tensors: tuple[Tensor, ...]
    stop: np.ndarray = field(default_factory=lambda: np.zeros(1, np.uint32))

    def __post_init__(self) -> None:
        ops = gathers(self.share, self.tensors)
        step = Step(ops, {})
        self.scratch = aligned_memory(SEEN_BYTES)
        self.seen = aligned_memory(SEEN_BYTES)
        self.ended = np.zeros(1, np.uint32)
        schedule = schedule_launches(step, [0] * len(ops))
        layout = InputLayout({}, 16)
        self.packets = bind_step(step, schedule, layout, self._place, unused)
        self.inputs = np.zeros(4, np.uint32)
        replacement = gather_rule(Remaining(ops, 0, last_reads(ops)), DEVICE)
        assert replacement is not None
        assert replacement.ops == len(ops)
        (self.launch,) = replacement.launches
        self.barrier = np.zeros(barrier_bytes(self.share.count), np.uint8)

    def _place(self, buffer: str) -> int:
        """Of ``a``, from the beginning of scratch memory on, and of ``b``, by its address."""
        if buffer == "a":
            return SCRATCH_MEMORY
        return self.scratch.ctypes.data + 4 * MAX_TOKENS * STRIDE

    def tensor(self, one: Tensor, seen: bool = False) -> np.ndarray:
        """Its columns, as they are or as they were when the launch ended."""
        memory, first = self.seen if seen else self.scratch, 4 * MAX_TOKENS * STRIDE
        memory = memory[first:] if one.buffer == "b" else memory[:first]
        return memory.view(np.float32).reshape(MAX_TOKENS, one.stride)[:, one.start : one.stop]

    @property
    def places(self) -> tuple[int, tuple[int, ...]]:
        """Addresses of its words, and of what it sends."""
        scratch = self.scratch.ctypes.data
        return self.barrier.ctypes.data, addresses_of(self.launch.sends, self.packets, scratch)


@dataclass
class Members:
    """All devices, in launches of BLOCKS blocks each."""

    count: int
    tensors: tuple[Tensor, ...]
    folder: Path
    changed: tuple[str, str] = ("", "")

    def __post_init__(self) -> None:
        self.all = [Member(Share(n, self.count), self.tensors) for n in range(self.count)]
        launch = self.all[0].launch
        sizes = {"PACKET_COUNT": max(1, len(self.tensors)), "SEEN_BYTES": SEEN_BYTES}
        macros = {**launch.macros, **sizes, "BLOCKS": BLOCKS}
        text = tuned_source(launch.file, {}).text
        assert self.changed[0] in text
        text = text.replace(*self.changed) if self.changed[0] else text
        text = text.replace("blockIdx.x", "(blockIdx.x % BLOCKS)").replace("gridDim.x", "BLOCKS")
        source = Source("together", text + TOGETHER, tuple(sorted(macros.items())))
        self.kernel: Emulated = emulate(source, self.folder)

    def run(self, tokens: int, seed: int, present: int | None = None) -> bool:
        """One launch on the first ``present`` devices; False where they wait forever."""
        self.arguments = []
        for member in self.all:
            member.inputs[0], member.ended[0] = tokens, 0
            peers = [one.places for one in self.all if one is not member]
            own = member.stop.ctypes.data, member.share.index, *member.places
            record = member.packets.tobytes() + others_argument(*own, peers)
            self.arguments.append(np.frombuffer(record, np.uint8).copy())
        calls = np.array(
            [
                (
                    *(one.scratch.ctypes.data, one.inputs.ctypes.data, given.ctypes.data),
                    *(one.ended.ctypes.data, one.seen.ctypes.data),
                )
                for one, given in zip(self.all, self.arguments, strict=True)
            ],
            np.uint64,
        )
        blocks = BLOCKS * (present or self.count)
        return self.kernel.run_together("all_devices", blocks, 64, seed, calls.ctypes.data)


def fill(members: Members, tokens: int, seed: int) -> list[np.ndarray]:
    """Every device's own columns; what all of them make, of each tensor."""
    rng = np.random.default_rng(seed)
    expected = []
    for one in members.tensors:
        values = rng.standard_normal((MAX_TOKENS, one.columns), np.float32)
        for member in members.all:
            there, own = member.tensor(one), member.share.of(one.columns)
            there[:] = -1
            there[:, own] = values[:, own]
        expected.append(values[:tokens])
    return expected


@pytest.mark.parametrize("count", [2, 3])
def test_every_device_gets_all_shares(count: int, folder: Path) -> None:
    """Of the tokens a step has, no more, step after step."""
    members = Members(count, TENSORS, folder)
    for step, tokens in enumerate((5, 1, 3, 0, 5)):
        expected = fill(members, tokens, step)
        assert members.run(tokens, 10 * count + step)
        for one, values in zip(TENSORS, expected, strict=True):
            for member in members.all:
                got, own = member.tensor(one, seen=True), member.share.of(one.columns)
                assert np.array_equal(got[:tokens], values)
                rest = np.delete(got[tokens:], own, axis=1)
                assert (rest == -1).all()


def test_devices_wait_for_each_other(folder: Path) -> None:
    """Without a tensor, too; one that is alone waits until it is told to stop."""
    members = Members(2, (), folder)
    assert members.run(1, 1)
    assert not members.run(1, 2, present=1)
    members = Members(2, TENSORS, folder)
    members.all[0].stop[0] = 1
    assert members.run(5, 3, present=1)


def test_a_word_before_the_data_is_noticed(folder: Path) -> None:
    """The negative control: a device that says too early that it has sent."""
    loop = "    for (unsigned tensor = FIRST_TENSOR;"
    members = Members(2, TENSORS, folder, (loop, TOO_EARLY + loop))
    wrong = 0
    for step in range(6):
        expected = fill(members, 5, step)
        assert members.run(5, step)
        wrong += any(
            not np.array_equal(member.tensor(one, seen=True), values)
            for one, values in zip(TENSORS, expected, strict=True)
            for member in members.all
        )
    assert wrong


def test_addresses_of_all_operands(folder: Path) -> None:
    """What the kernel takes for the place of the whole tensor is that of the table."""
    names = [operand.name for operand in ALL_GATHER.operands]
    assert (names.index("part"), names.index("whole")) == (PART, WHOLE)
    assert ALL_GATHER.sizes[1:3] == ("first", "columns")
