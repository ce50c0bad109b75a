"""Copies of streamed weights from host memory to the ring, on a stream beside the step's launches.

A step's copies wait for the launches that read their slot before, and launches wait for the copies
of what they read: events say so, which a CUDA graph turns into edges. Everything else overlaps."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accel.cuda.driver import Context
from accel.cuda.plan import PlannedLaunch
from accel.cuda.submissions import Mark
from accel.packets.staging_buffers import Bytes
from accel.packets.step import Step
from accel.packets.weight_ring import WeightRing, slot_turns

START = -1
"""The number that stands for the time before all launches."""


@dataclass(frozen=True, slots=True)
class LayerCopies:
    """The ``weights`` of a layer, which are copied once launch ``after`` has ended and before
    launch ``before`` begins."""

    weights: tuple[str, ...]
    after: int
    before: int


@dataclass(frozen=True, slots=True)
class WeightCopy:
    """A copy of ``host`` to an address in the ring."""

    address: int
    host: Bytes


def layer_copies(
    step: Step, launches: Sequence[PlannedLaunch], ring: WeightRing, names: Collection[str]
) -> list[LayerCopies]:
    """The copies of those weights among ``names`` that the step reads, in the order of layers."""
    reads: dict[str, tuple[int, int]] = {}
    for number, launch in enumerate(launches):
        for op in step.ops[launch.first : launch.first + launch.count]:
            for tensor in op.operands:
                if tensor is not None and tensor.buffer in names:
                    first, _ = reads.get(tensor.buffer, (number, number))
                    reads[tensor.buffer] = first, number
    return [
        LayerCopies(tuple(present), free, needed)
        for present, free, needed in slot_turns(ring, reads)
    ]


@dataclass(slots=True, eq=False)
class CopyStream:
    """Enqueues the copies of one step on ``stream`` while its launches are enqueued elsewhere.

    ``weights`` has the copy of each weight. Events are made at the first step and reused."""

    context: Context
    stream: Any
    layers: Sequence[LayerCopies]
    weights: Mapping[str, WeightCopy]
    _marks: dict[tuple[str, int], Mark] = field(default_factory=dict)

    def begin(self, steps: Any) -> None:
        """Enqueue the copies that wait for no launch of the step; ``steps`` is the stream of
        launches."""
        self._copy_after(START, steps)

    def before(self, number: int, steps: Any) -> bool:
        """Have launch ``number``, which is enqueued next, wait for the weights it is first to read;
        False if there are none."""
        needed = [index for index, layer in enumerate(self.layers) if layer.before == number]
        for index in needed:
            self._marks["copied", index].hold(steps)
        return bool(needed)

    def behind(self, number: int, steps: Any) -> None:
        """Enqueue the copies that wait for launch ``number``, which was enqueued last."""
        self._copy_after(number, steps)

    def _copy_after(self, number: int, steps: Any) -> None:
        found = [index for index, layer in enumerate(self.layers) if layer.after == number]
        if not found:
            return
        self._mark("read", number, steps).hold(self.stream)
        for index in found:
            for copy in self._copies(index):
                self._copy(copy)
            self._mark("copied", index, self.stream)

    def _copies(self, index: int) -> Iterator[WeightCopy]:
        return (self.weights[name] for name in self.layers[index].weights)

    def _copy(self, copy: WeightCopy) -> None:
        here, nbytes = copy.host.ctypes.data, copy.host.nbytes
        self.context.call("cuMemcpyHtoDAsync", copy.address, here, nbytes, self.stream)

    def _mark(self, kind: str, number: int, stream: Any) -> Mark:
        """An event at the end of ``stream``."""
        mark = self._marks.get((kind, number))
        if mark is None:
            mark = self._marks[kind, number] = Mark(self.context, stream)
        else:
            mark.move(stream)
        return mark
