"""Estimates the cost of a step on an AMD card from the shipped code: instructions, bytes and waves
of every packet.

One work-group of each launch is executed and counted as the command processor would run it, with
the operands' real sizes; the other groups of the launch count as much. Seconds follow from a few
numbers of a data sheet and from guesses marked as such. No card was measured."""

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from accel.amd.kernel import MAP_NORESERVE
from accel.amd.kernel_files import FOLDER
from accel.amd.launcher import ARGUMENTS
from accel.amd.sim.execute import Launch, Program, run_launch
from accel.amd.sim.memory_view import PAGE, MemoryView
from accel.amd.steps import SPLIT_TOKENS, step_of
from accel.amd.tools.listing import occupancy
from accel.kernels.compiled import read_compiled
from accel.kernels.launches import MAX_GROUPS
from accel.kernels.source import Module, module_of
from accel.packets.binding import bind_step
from accel.packets.layouts import WeightLayout, tile_bytes
from accel.packets.packet import PACKET
from accel.packets.schedule import schedule_levels
from accel.packets.step import Op, Schedule, Step
from contract.dtypes import StorageClass
from contract.ir.inputs import input_layout
from contract.ir.nodes import BufferKind, Graph
from contract.kernel import KernelHeader, decode_kernel
from contract.records import QUERY_TOKEN, STEP
from contract.shape_key import ShapeKey

BASE = 1 << 40
REGION = 8 << 30
REGIONS = ("control", "inputs", "scratch", "weights", "state")
ARGUMENTS_AT, PACKETS_AT = PAGE, 2 * PAGE
FAR = frozenset({"weights", "state"})
"""Regions whose bytes come from the GPU's memory; bytes of other regions were just written."""


@dataclass(frozen=True, slots=True)
class Card:
    """A data sheet: SIMDs of 32 lanes, clock, memory. And guesses, in seconds: the cost of a launch
    for the command processor, and of waiting for launches and emptying caches."""

    name: str = "RX 9070 XT or R9700"
    simds: int = 128
    hertz: float = 2.4e9
    bytes_per_second: float = 640e9
    reached: float = 0.8
    """Guess: the share of the memory's speed that plain reads reach."""
    cycles_alone: float = 5.0
    """Guess: cycles per instruction of a wave that is alone on its SIMD."""
    launch_seconds: float = 0.3e-6
    level_seconds: float = 2.0e-6
    matrix_cycles: float = 8.0
    """Cycles of a product of 16 x 16 x 16 bytes: 389 T operations a second at a boost clock of 2.97
    GHz."""


@dataclass(frozen=True, slots=True)
class PacketCost:
    """One launch. ``instructions`` are counted once a wave, ``far`` bytes come from or go to the
    GPU's memory, ``near`` bytes stay in its caches; ``resident`` are waves a SIMD holds.
    ``products`` of the instructions multiply matrices."""

    kernel: str
    groups: int
    waves: int
    resident: int
    instructions: int
    far: int
    near: int
    wait: bool
    products: int = 0

    def limits(self, card: Card) -> Mapping[str, float]:
        """The least seconds it takes, by the resource that limits it."""
        used = min(card.simds, self.waves)
        cycles = self.instructions + self.products * (card.matrix_cycles - 1)
        issue = cycles / (used * card.hertz)
        rounds = max(1.0, self.waves / (card.simds * self.resident))
        alone = rounds * self.instructions / self.waves * card.cycles_alone / card.hertz
        return {
            "memory": self.far / (card.bytes_per_second * card.reached),
            "issue": issue,
            "latency": alone,
        }

    def seconds(self, card: Card) -> float:
        """Seconds, with its share of launching and waiting."""
        fixed = card.launch_seconds + (card.level_seconds if self.wait else 0)
        return max(self.limits(card).values()) + fixed


@dataclass(slots=True)
class _Counted:
    """The words that an executed work-group accessed; see ``execute.Watcher``."""

    touched: list[NDArray[np.int64]] = field(default_factory=list)

    def read(self, words: NDArray[np.int64]) -> None:
        self.touched.append(np.unique(words))

    def wrote(self, words: NDArray[np.int64]) -> None:
        self.touched.append(np.unique(words))

    def bytes_by_region(self) -> Mapping[str, int]:
        """The bytes accessed in each region, each byte counted once."""
        words = np.unique(np.concatenate(self.touched)) if self.touched else np.zeros(0, np.int64)
        counts = np.bincount(words * 4 // REGION, minlength=len(REGIONS))
        return dict(zip(REGIONS, (4 * counts).tolist(), strict=False))


class Paper:
    """A step of ``slots`` slots with ``context`` positions each, of which ``chunk`` are computed,
    counted launch by launch, products of many tokens by ``matrices``, the context of attention of
    at most ``split_tokens`` tokens divided."""

    def __init__(
        self,
        graph: Graph,
        slots: int,
        context: int,
        chunk: int = 1,
        matrices: bool = True,
        split_tokens: int = SPLIT_TOKENS,
    ) -> None:
        self.bucket = ShapeKey(slots * chunk, slots)
        self.graph = graph
        self.step: Step = step_of(graph, self.bucket, "t1", matrices, split_tokens)
        self.schedule: Schedule = schedule_levels(self.step)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._map = mmap.mmap(-1, REGION * len(REGIONS), flags=flags)
        self._memory = MemoryView(np.frombuffer(self._map, np.uint8), BASE)
        self._memory.map(BASE, REGION * len(REGIONS), True)
        self._fill(slots, context, chunk)
        self._known: dict[tuple[object, ...], PacketCost] = {}
        self._programs: dict[str, tuple[KernelHeader, Program]] = {}

    def costs(self) -> Iterator[PacketCost]:
        """The cost of every launch in order; equal launches are executed once."""
        for index, (op, op_schedule) in enumerate(
            zip(self.step.ops, self.schedule.op_schedules, strict=True)
        ):
            alike = (module_of(op), tuple(op.max_sizes().items()), op_schedule.wait)
            if alike not in self._known:
                self._known[alike] = self._cost(index, op, op_schedule.wait)
            yield self._known[alike]

    def _cost(self, index: int, op: Op, wait: bool) -> PacketCost:
        header, program = self._program(module_of(op))
        groups = op.launch_groups(header.workgroup_size[0], MAX_GROUPS)
        arguments = np.zeros(1, ARGUMENTS)
        arguments["scratch"] = _at("scratch")
        arguments["inputs"] = _at("inputs")
        arguments["packets"] = _at("control") + PACKETS_AT
        arguments["index"], arguments["groups"] = index, groups
        first = ARGUMENTS_AT
        self._memory.data[first : first + 32] = arguments.view(np.uint8)
        group_waves = header.workgroup_size[0] // 32
        launch = Launch(
            program, BASE + first, group_waves, max(header.lds_bytes, 4), header.vgpr_count
        )
        for region in ("scratch", "weights", "state"):
            self._map.madvise(mmap.MADV_DONTNEED, _at(region) - BASE, REGION)
        counted = _Counted()
        executed = run_launch(self._memory, launch, 1, counted)
        touched = counted.bytes_by_region()
        far = sum(nbytes for region, nbytes in touched.items() if region in FAR)
        return PacketCost(
            str(module_of(op)),
            groups,
            groups * group_waves,
            occupancy(header),
            executed.instructions * groups,
            far * groups,
            (sum(touched.values()) - far) * groups,
            wait,
            executed.products * groups,
        )

    def _program(self, module: Module) -> tuple[KernelHeader, Program]:
        name = str(module)
        if name not in self._programs:
            header = decode_kernel(read_compiled(FOLDER, name))
            self._programs[name] = header, Program(name, header.code)
        return self._programs[name]

    def _fill(self, slots: int, context: int, chunk: int) -> None:
        """Write the packets and the inputs."""
        layout = input_layout(self.graph, self.bucket)
        packets = bind_step(self.step, self.schedule, layout, self._address, self._matrix)
        assert packets.dtype == PACKET
        first = PACKETS_AT
        self._memory.data[first : first + packets.nbytes] = packets.view(np.uint8)
        inputs = self._memory.data[_at("inputs") - BASE :]
        step = inputs[: STEP.itemsize].view(STEP)
        step["tokens"], step["rows"] = slots * chunk, slots
        first_query = layout.offsets["request.query"]
        query = inputs[first_query : first_query + slots * chunk * QUERY_TOKEN.itemsize].view(
            QUERY_TOKEN
        )
        query["slot"] = np.repeat(np.arange(slots), chunk)
        query["position"] = context - chunk + np.tile(np.arange(chunk), slots)
        rows = layout.offsets["request.output_rows"]
        inputs[rows : rows + 4 * slots].view(np.int32)[:] = chunk * np.arange(1, slots + 1) - 1

    def _address(self, name: str) -> int:
        kind = self.graph.buffers[name].kind
        return _at("weights" if kind in (BufferKind.WEIGHT, BufferKind.CONSTANT) else "state")

    def _matrix(self, name: str) -> tuple[int, int, WeightLayout]:
        decl = self.graph.buffers[name]
        columns = int(decl.shape[-1])
        if decl.dtype.storage is StorageClass.FLOAT:
            return _at("weights"), decl.dtype.row_bytes(columns), WeightLayout.STORED
        return _at("weights"), tile_bytes(decl.dtype, columns), WeightLayout.PLANES


def _at(region: str) -> int:
    return BASE + REGIONS.index(region) * REGION
