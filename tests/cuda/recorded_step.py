"""A model's steps by the definitions, every buffer of them kept, and persistent launches of the
same steps on emulated blocks, each with what the definitions have in front of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel.cuda.bound_bucket import move_to_first_rows
from accel.cuda.device import Device
from accel.cuda.packed_tiles import tile_bytes
from accel.cuda.persistent import StepTable
from accel.cuda.plan import Plan, PlannedLaunch
from accel.cuda.planning import ALONE, divided_buffers, planned_bucket
from accel.cuda.step_choice import StepChoice
from accel.cuda.step_table import PeerWorkspaces
from accel.cuda.unpacked_pages import unpack_rotated
from accel.packets.binding import bind_step
from accel.packets.layouts import WeightLayout
from accel.packets.rules import lower_graph
from accel.packets.shares import Share
from accel.packets.step import Op, Schedule, Step
from contract.ir.graph import Graph
from contract.ir.inputs import input_layout, pack_inputs
from contract.ir.nodes import BufferDecl, BufferKind
from contract.ir.prune_rows import prune_rows
from contract.ir.scratch import buffer_bytes
from contract.records import QUERY_TOKEN, SAMPLING
from contract.shape_key import ShapeKey
from reference.cpu.tier import CpuTier, _array, bind, define
from reference.limits import Limits
from reference.model.open import Model
from reference.model.weights import constant_bytes, weight_bytes
from tests.cuda.emulated_step import aligned_memory, arranged
from tests.cuda.emulator import emulate

Bytes = NDArray[np.uint8]
NOWHERE = 1
"""Address of what no persistent launch reads."""


def table_of(launch: PlannedLaunch) -> StepTable:
    """The table of a persistent launch."""
    assert isinstance(launch.table, StepTable)
    return launch.table


@dataclass
class RecordedModel:
    """``graph`` of ``model``, as it is lowered for steps of ``key``, with memory for each of its
    buffers in them."""

    model: Model
    limits: Limits
    key: ShapeKey
    graph: Graph = field(init=False)
    raw: dict[str, Bytes] = field(default_factory=dict)
    arrays: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.graph = prune_rows(self.model.graph(self.limits), self.key)
        tier = CpuTier()
        for decl in self.graph.buffers.values():
            if decl.kind in (BufferKind.WEIGHT, BufferKind.CONSTANT):
                data = self._stored(decl)
                buffer = tier.upload(decl, data)
                raw = self.raw[decl.name] = aligned_memory(data.nbytes)
                raw[:] = data.reshape(-1)
                self.arrays[decl.name] = buffer.matrix or _array(decl, raw, self.key)
            else:
                raw = self.raw[decl.name] = aligned_memory(buffer_bytes(decl, self.limits.largest))
                if decl.kind is not BufferKind.SCRATCH:
                    raw[:] = 0
                self.arrays[decl.name] = _array(decl, raw, self.key)

    def _stored(self, decl: BufferDecl) -> Bytes:
        if decl.kind is BufferKind.CONSTANT:
            return constant_bytes(self.model, decl)
        return weight_bytes(self.model.file, decl)

    def inputs(
        self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int]
    ) -> dict[str, NDArray[Any]]:
        """REQUEST buffers of a step; pages of a slot follow each other from the last one down."""
        query = np.zeros(len(tokens), QUERY_TOKEN)
        query["token"], query["position"], query["slot"] = tokens, positions, slots
        sampling = np.zeros(self.key.rows, SAMPLING)
        given = {
            "request.query": query.view(np.int32).reshape(len(tokens), 4),
            "request.sampling": sampling.view(np.int32).reshape(
                self.key.rows, SAMPLING.itemsize // 4
            ),
            "request.output_rows": np.arange(self.key.rows, dtype=np.int32)[::-1].copy(),
        }
        if "request.page_table" in self.arrays:
            table = self.arrays["request.page_table"]
            order = np.arange(table.size, dtype=np.int32)[::-1]
            given["request.page_table"] = order.reshape(table.shape).copy()
        return given

    def step(self, given: dict[str, NDArray[Any]]) -> None:
        """Every node by its definition."""
        for name, values in given.items():
            self.arrays[name][...] = values.reshape(self.arrays[name].shape)
        with np.errstate(all="ignore"):
            for node in self.graph.nodes:
                define(node, bind(node, self.arrays))()


@dataclass
class DeviceSteps:
    """Steps of ``recorded`` in the form of ``bucket``, with memory of one device that lasts from
    step to step. ``units`` are matrices as kernels read them; a device has its ``share`` of each
    step; ``chosen`` says which launches count."""

    recorded: RecordedModel
    bucket: ShapeKey
    device: Device
    chosen: Any
    folder: Path
    share: Share = ALONE
    units: dict[str, Bytes] = field(default_factory=dict)
    step: Step = field(init=False)
    plan: Plan = field(init=False)
    schedule: Schedule = field(init=False)

    def __post_init__(self) -> None:
        self.lower()
        self.layout = input_layout(self.recorded.graph, self.bucket)
        self.inputs = aligned_memory(self.layout.nbytes)
        self.workspace = aligned_memory(max(1, self.plan.workspace_bytes))
        self.workspace[:] = 0
        self.stop = np.zeros(1, np.uint32)
        self.states = {
            decl.name: aligned_memory(self.part_of(decl.name, self.recorded.raw[decl.name]).nbytes)
            for decl in self.recorded.graph.of_kind(BufferKind.STATE, BufferKind.OUTPUT)
        }
        self.packets = bind_step(
            self.step, self.schedule, self.layout, self._address_of, self.matrix_of
        )

    def lower(self) -> None:
        """Set ``step``, ``plan`` and ``schedule``."""
        raise NotImplementedError

    def matrix_of(self, name: str) -> tuple[int, int, WeightLayout]:
        """Address, row bytes and layout of a matrix."""
        raise NotImplementedError

    def made_here(self, name: str) -> Bytes | None:
        """What plain kernels leave in a buffer that no graph has."""
        return None

    def begin(self, given: dict[str, NDArray[Any]], before: dict[str, Bytes]) -> None:
        """Take the inputs of a step, and the states ``before`` it."""
        self.inputs[:] = pack_inputs(self.layout, self.recorded.key, given)
        for name, state in before.items():
            self.states[name][:] = self.part_of(name, state)

    def part_of(self, name: str, state: Bytes) -> Bytes:
        """What the device has of a state."""
        return state

    def scratch_before(self, inside: range) -> Bytes:
        """Scratch memory with what ops ``inside`` read of it, as recorded."""
        scratch = aligned_memory(max(1, self.schedule.shared_bytes))
        for name in outside(self.step.ops, self.known(), inside, written=False):
            self.scratch_of(scratch, name)[:] = self.recorded_bytes(name)
        return scratch

    def known(self) -> list[str]:
        """Scratch buffers of which it is recorded what they hold."""
        return [name for name in self.step.scratch if self.is_known(name)]

    def is_known(self, name: str) -> bool:
        """Whether it is recorded what a buffer holds."""
        return name in self.recorded.arrays or self.made_here(name) is not None

    def recorded_bytes(self, name: str) -> Bytes:
        """What a buffer holds by the definitions."""
        made = self.made_here(name)
        if made is not None:
            return made
        if self.recorded.graph.buffers[name].kind is BufferKind.STATE:
            return self.recorded.raw[name]
        values: NDArray[Any] = self.recorded.arrays[name]
        return values.reshape(-1).view(np.uint8)

    def scratch_of(self, scratch: Bytes, name: str) -> Bytes:
        """The bytes of a buffer in scratch memory."""
        start = self.schedule.shared[name]
        return scratch[start : start + self.recorded_bytes(name).nbytes]

    def compare_states(self, numbers: Iterable[int]) -> list[str]:
        """What ops of these numbers left of states is what was recorded; the names of these."""
        names = {name for number in numbers for name in self.step.ops[number].results()}
        for name in names & self.states.keys():
            got, want = self.states[name], self.part_of(name, self.recorded_bytes(name))
            assert got[: want.nbytes].tobytes() == want.tobytes(), name
        return [*(names & self.states.keys())]

    def _address_of(self, name: str) -> int:
        return (self.states.get(name, self.recorded.raw[name])).ctypes.data


NOT_ARRIVED = 0xFFFFFFFF
"""The bits of an exchanged float that nobody has stored."""


@dataclass
class PersistentSteps(DeviceSteps):
    """The persistent launches of steps, of blocks that are ``chosen``."""

    changed: Callable[[Bytes], Bytes] = lambda table: table
    """What becomes of the table of a launch."""
    own_heads: bool = False
    """Whether the device has pages of its own heads."""

    def lower(self) -> None:
        graph, bucket = self.recorded.graph, self.bucket
        whole = unpack_rotated(lower_graph(graph, bucket, 64, "cuda"), graph, bucket)
        divided = divided_buffers(graph, [whole], self.share) if self.own_heads else {}
        self.pages = {n: d for n, d in divided.items() if d.kind is BufferKind.STATE}
        assert bool(self.pages) == self.own_heads
        choice = StepChoice(tuple(self.chosen))
        self.lowered = planned_bucket(whole, self.device, choice, self.share, self.pages)
        found = self.lowered
        self.step, self.plan, self.schedule = found.step, found.plan, found.schedule

    def __post_init__(self) -> None:
        super().__post_init__()
        move_to_first_rows(self.lowered, self.packets)

    def part_of(self, name: str, state: Bytes) -> Bytes:
        if name not in self.pages:
            return state
        pages, *_, kv_heads, _ = map(int, self.pages[name].shape)
        records = state.reshape(pages, self.share.count, -1)
        assert kv_heads % self.share.count == 0
        return np.ascontiguousarray(records[:, self.share.index]).reshape(-1)

    @property
    def launches(self) -> list[PlannedLaunch]:
        """The persistent ones."""
        return [launch for launch in self.plan.launches if launch.table is not None]

    def matrix_of(self, name: str) -> tuple[int, int, WeightLayout]:
        decl = self.recorded.graph.buffers[name]
        rows, columns = int(decl.shape[-2]), int(decl.shape[-1])
        row_bytes = decl.dtype.row_bytes(columns)
        if name not in self._multiplied():
            return NOWHERE, row_bytes, WeightLayout.UNITS
        if name not in self.units:
            stored = self.recorded.raw[name].reshape(rows, row_bytes)
            self.units[name] = arranged(decl.dtype, stored, self.folder)
        return self.units[name].ctypes.data, tile_bytes(decl.dtype, columns), WeightLayout.UNITS

    def _multiplied(self) -> set[str]:
        """Matrices of the persistent launches."""
        ops = [self.step.ops[number] for one in self.launches for number in inside_of(one)]
        tensors = [op.operands[op.matrix] for op in ops if op.matrix is not None]
        return {tensor.buffer for tensor in tensors if tensor is not None}

    def run(self, given: dict[str, NDArray[Any]], before: dict[str, Bytes], seed: int) -> None:
        """One step, whose results are compared with those recorded; ``before`` are the states it
        began with. A launch finds what the definitions have in front of it."""
        self.begin(given, before)
        for number, launch in enumerate(self.launches):
            scratch = self.scratch_before(inside_of(launch))
            assert self.launch(launch, scratch, seed + number), "it waits for what never comes"
            self.compare(launch, scratch, before)

    def compare(self, launch: PlannedLaunch, scratch: Bytes, before: dict[str, Bytes]) -> None:
        """What a launch left is what was recorded."""
        inside = inside_of(launch)
        for name, values in self._exchanged(launch).items():
            want = self.recorded_bytes(name).view(np.float32)
            got = values[: want.size]
            everywhere = {tensor.buffer for tensor in table_of(launch).exchange.everywhere}
            if self.own_heads and name not in everywhere:
                # What only the device itself reads are columns of its own heads.
                own = got.view(np.uint32) != NOT_ARRIVED
                assert own.sum() * self.share.count == want.size, name
                got, want = got[own], want[own]
            assert np.array_equal(got, want, equal_nan=True), name
        for name in outside(self.step.ops, self.step.scratch, inside, written=True):
            got = self.scratch_of(scratch, name)
            assert got.tobytes() == self.recorded_bytes(name).tobytes(), name
        table = table_of(launch)
        ended = () if table.end is None else table.end.done
        for name in self.compare_states((*inside, *ended)):
            size = self.part_of(name, self.recorded_bytes(name)).nbytes
            was = self.part_of(name, before[name])
            assert self.states[name][size:].tobytes() == was[size:].tobytes(), name

    def launch(self, launch: PlannedLaunch, scratch: Bytes, seed: int) -> bool:
        """All blocks of one launch; False where they wait forever."""
        assert launch.workspace is not None
        table = self.bound_table(launch)
        addresses = [one.ctypes.data for one in (scratch, self.inputs, table, self.workspace)]
        addresses[-1] += launch.workspace
        return emulate(launch.source, self.folder).run_together(
            launch.entry, launch.grid[0], launch.threads, seed, *addresses
        )

    def bound_table(self, launch: PlannedLaunch, peers: PeerWorkspaces | None = None) -> Bytes:
        """What the kernel reads of its phases."""
        bound = table_of(launch).bound(self.packets, self.stop.ctypes.data, peers)
        table = aligned_memory(bound.nbytes)
        table[:] = self.changed(bound)
        return table

    def _exchanged(self, launch: PlannedLaunch) -> dict[str, NDArray[np.float32]]:
        """What the phases of a launch handed each other in the step before, from the bank it
        used."""
        table = table_of(launch)
        assert launch.workspace is not None
        own = self.workspace[launch.workspace :]
        steps = int(own[:4].view(np.uint32)[0])
        size = table.exchange.bank_bytes
        first = table.exchange_at + (steps - 1) % table.banks * size
        bank = ~own[first : first + size].view(np.uint32)
        offsets = table.exchange.offsets
        known = [name for name in offsets if name in self.recorded.arrays]
        return {name: bank[offsets[name] // 4 :].view(np.float32) for name in known}


def inside_of(launch: PlannedLaunch) -> range:
    """Numbers of the ops of a launch."""
    return range(launch.first, launch.first + launch.count)


def outside(ops: Sequence[Op], names: Iterable[str], inside: range, *, written: bool) -> list[str]:
    """Of ``names`` the buffers that ops ``inside`` share with others: those that they read, or that
    they have ``written`` for ops behind them."""
    found = []
    for name in names:
        writers, readers = touching(ops, name, True), touching(ops, name, False)
        wrote = any(op in inside for op in writers)
        if written and wrote and any(op >= inside.stop for op in readers):
            found.append(name)
        if not written and not wrote and any(op in inside for op in readers):
            found.append(name)
    return found


def touching(ops: Sequence[Op], name: str, written: bool) -> list[int]:
    """Numbers of the ops that write the buffer, or that read it."""
    return [
        number
        for number, op in enumerate(ops)
        for place, tensor in enumerate(op.operands)
        if tensor is not None and tensor.buffer == name and (place in op.written) == written
    ]
