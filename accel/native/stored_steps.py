"""A cache of lowered steps: packets with numbers of buffers instead of addresses.

The key of an entry is everything its packets depend on: the graph, the shape bucket, the offsets of
a step's inputs, the workers, and times and sizes of the files that lower. The folder holds at most
MAX_STEPS; those written first go. An entry that is damaged or of another build is lowered
anew."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

import accel.native
from accel.native.names import TIER
from accel.packets.binding import (
    BUFFER_MEMORY,
    BUFFER_SHIFT,
    AddressOf,
    MatrixOf,
    bind_step,
    symbolic,
)
from accel.packets.disk_cache import read_entry, write_entry
from accel.packets.estimate_cache import CODE, code_state, entry_name
from accel.packets.layouts import WeightLayout
from accel.packets.packet import PACKET
from accel.packets.step import Schedule, Step
from contract.arrays import Records
from contract.ir.inputs import InputLayout
from contract.ir.nodes import Graph
from contract.lazy_dataclass import dataclass
from contract.shape_key import ShapeKey

MAGIC = b"zinc-rt step 1\n"
SUFFIX = ".step"
MAX_STEPS = 256
KIND_SHIFT = 60
LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class StoredStep:
    """A lowered step. ``packets`` PACKET[ops] refer to ``buffers``, the name of each and whether it
    is read as a matrix for products; ``shared_bytes`` and ``own_bytes`` are of scratch memory."""

    packets: Records
    buffers: tuple[tuple[str, bool], ...]
    shared_bytes: int
    own_bytes: int

    @classmethod
    def of(cls, step: Step, schedule: Schedule, inputs: InputLayout) -> StoredStep:
        """The form of a lowered step that is stored."""
        numbers: dict[tuple[str, bool], int] = {}

        def number(name: str, matrix: bool) -> int:
            return symbolic(numbers.setdefault((name, matrix), len(numbers)))

        packets = bind_step(
            step,
            schedule,
            inputs,
            lambda name: number(name, False),
            lambda name: (number(name, True), 0, WeightLayout.STORED),
        )
        return cls(packets, tuple(numbers), schedule.shared_bytes, schedule.own_bytes)

    def bound(self, address_of: AddressOf, matrix_of: MatrixOf) -> Records:
        """The packets with addresses, as ``bind_step`` makes them."""
        packets = self.packets.copy()
        operands = packets["operand"]
        symbolic_at = operands >> KIND_SHIFT == BUFFER_MEMORY >> KIND_SHIFT
        symbols = operands[symbolic_at]
        offsets = symbols & ((1 << BUFFER_SHIFT) - 1)
        numbers = ((symbols ^ BUFFER_MEMORY) >> BUFFER_SHIFT).astype(np.intp)
        # Address, stride and layout of each buffer; only those of matrices replace a packet's.
        table = np.zeros((len(self.buffers), 3), np.uint64)
        for index, (name, matrix) in enumerate(self.buffers):
            table[index] = matrix_of(name) if matrix else (address_of(name), 0, 0)
        operands[symbolic_at] = table[numbers, 0] + offsets
        matrices = np.array([matrix for _, matrix in self.buffers], bool)[numbers]
        ops, columns = (index[matrices] for index in symbolic_at.nonzero())
        packets["stride"][ops, columns] = table[numbers[matrices], 1]
        packets["layout"][ops] = table[numbers[matrices], 2]
        return packets

    def encoded(self) -> bytes:
        """The step as bytes."""
        facts = json.dumps([self.buffers, self.shared_bytes, self.own_bytes]).encode()
        return len(facts).to_bytes(LENGTH_BYTES, "little") + facts + self.packets.tobytes()

    @classmethod
    def decoded(cls, data: bytes) -> StoredStep:
        """The step of ``encoded``'s bytes."""
        end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
        buffers, shared_bytes, own_bytes = json.loads(data[LENGTH_BYTES:end])
        packets = np.frombuffer(data, PACKET, offset=end)
        return cls(packets, tuple(map(tuple, buffers)), shared_bytes, own_bytes)


class StepCache:
    """The cached steps in one ``folder``, for a number of ``workers``."""

    def __init__(self, folder: Path, workers: int) -> None:
        self._folder = folder
        self._workers = workers

    def of(
        self,
        graph: Graph,
        bucket: ShapeKey,
        inputs: InputLayout,
        lower: Callable[[], tuple[Step, Schedule]],
    ) -> StoredStep:
        """The step of a graph for one shape bucket; ``lower`` gives it where there is no entry, and
        its errors are raised."""
        path = self._path(graph, bucket, inputs)
        data = None if path is None else read_entry(path, MAGIC)
        if data is not None:
            return StoredStep.decoded(data)
        step = StoredStep.of(*lower(), inputs)
        if path is not None:
            self._write(path, step)
        return step

    def store(
        self, graph: Graph, bucket: ShapeKey, inputs: InputLayout, lowered: tuple[Step, Schedule]
    ) -> bool:
        """Make the entry of a lowered step, if that is possible; returns whether there is one."""
        path = self._path(graph, bucket, inputs)
        if path is None:
            return False
        self._write(path, StoredStep.of(*lowered, inputs))
        # Unlike ``Path.exists``, this raises nothing for a folder that may not be entered.
        return os.path.exists(path)

    def _path(self, graph: Graph, bucket: ShapeKey, inputs: InputLayout) -> Path | None:
        """The file of an entry; None where it is not known which code lowers."""
        code = code_state((*CODE, accel.native))
        if code is None:
            return None
        offsets = sorted(inputs.offsets.items())
        name = entry_name(graph, code, TIER, self._workers, bucket, offsets)
        return (self._folder / name).with_suffix(SUFFIX)

    def _write(self, path: Path, step: StoredStep) -> None:
        _make_room(self._folder)
        write_entry(path, MAGIC, step.encoded())


def _make_room(folder: Path) -> None:
    """Remove the oldest entries until one more is allowed."""
    with contextlib.suppress(OSError):
        found = sorted((file.stat().st_mtime_ns, file) for file in folder.glob("*" + SUFFIX))
        for _, file in found[: max(0, len(found) - MAX_STEPS + 1)]:
            file.unlink()
