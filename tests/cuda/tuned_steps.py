"""Tuned launches of a model's steps on emulated blocks, each run of ops with what the definitions
have in front of it: it must leave what they have behind it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel.cuda.device import Device
from accel.cuda.packed_tiles import unit_layout
from accel.cuda.plan import PlannedLaunch, plan_launches
from accel.packets.binding import bind_step
from accel.packets.layouts import WeightLayout
from accel.packets.rules import lower_graph
from accel.packets.schedule import schedule_launches
from accel.packets.step import Op, Tensor
from contract.dtypes import StorageClass
from contract.ir.inputs import input_layout, pack_inputs
from contract.ir.nodes import BufferKind
from contract.shape_key import ShapeKey
from reference.exact.elementary import exp, sigmoid, softplus
from reference.ops.ssm_delta_net import l2_norm, split_heads
from tests.cuda.emulated_step import aligned_memory, arranged, plain_integers
from tests.cuda.emulator import emulate
from tests.cuda.recorded_step import NOWHERE, RecordedModel, outside

Bytes = NDArray[np.uint8]


@dataclass
class TunedSteps:
    """The launches of kernels in ``files`` of steps of ``recorded`` in the form of ``bucket``."""

    recorded: RecordedModel
    bucket: ShapeKey
    device: Device
    files: frozenset[str]
    folder: Path
    units: dict[str, Bytes] = field(default_factory=dict)
    made: dict[str, Bytes] = field(default_factory=dict)
    """What plain kernels leave in buffers that no graph has."""

    def __post_init__(self) -> None:
        graph = self.recorded.graph
        self.step = lower_graph(graph, self.bucket, 64, "cuda")
        self.plan = plan_launches(self.step.ops, self.device, self.step.scratch)
        self.schedule = schedule_launches(self.step, self.plan.levels)
        self.layout = input_layout(graph, self.bucket)
        self.inputs = aligned_memory(self.layout.nbytes)
        self.workspace = aligned_memory(max(1, self.plan.workspace_bytes))
        self.workspace[:] = 0
        kept = graph.of_kind(BufferKind.STATE, BufferKind.OUTPUT)
        self.states = {decl.name: self.recorded.raw[decl.name].copy() for decl in kept}
        self.places = {name: aligned_memory(raw.nbytes) for name, raw in self.states.items()}
        self.packets = bind_step(
            self.step, self.schedule, self.layout, self._address_of, self._matrix_of
        )

    @property
    def runs(self) -> list[list[PlannedLaunch]]:
        """Launches of one replacement each."""
        own = [launch for launch in self.plan.launches if launch.source.name in self.files]
        return [list(run) for _, run in groupby(own, lambda launch: launch.first)]

    def files_used(self) -> set[str]:
        """Of all launches of the step."""
        return {launch.source.name for launch in self.plan.launches}

    def _address_of(self, name: str) -> int:
        return (self.places.get(name, self.recorded.raw[name])).ctypes.data

    def _matrix_of(self, name: str) -> tuple[int, int, WeightLayout]:
        decl = self.recorded.graph.buffers[name]
        rows, columns = int(decl.shape[-2]), int(decl.shape[-1])
        row_bytes = decl.dtype.row_bytes(columns)
        if decl.dtype.storage is StorageClass.FLOAT:
            return self.recorded.raw[name].ctypes.data, row_bytes, WeightLayout.STORED
        if unit_layout(decl, self.device) is not WeightLayout.UNITS:
            return NOWHERE, row_bytes, WeightLayout.PLANES
        if name not in self.units:
            stored = self.recorded.raw[name].reshape(-1, row_bytes)
            stacked = [
                arranged(decl.dtype, matrix.copy(), self.folder)
                for matrix in stored.reshape(-1, rows, row_bytes)
            ]
            self.units[name] = aligned_memory(sum(matrix.nbytes for matrix in stacked))
            self.units[name][:] = np.concatenate(stacked)
        return self.units[name].ctypes.data, row_bytes, WeightLayout.UNITS

    def run(self, given: dict[str, NDArray[Any]], before: dict[str, Bytes]) -> None:
        """One step, whose results are compared with those recorded; ``before`` are the states it
        began with."""
        self.inputs[:] = pack_inputs(self.layout, self.recorded.key, given)
        for name, state in before.items():
            self.places[name][:] = state
        self._make()
        for run in self.runs:
            scratch = aligned_memory(max(1, self.schedule.shared_bytes))
            inside = range(run[0].first, run[0].first + run[0].count)
            for name in outside(self.step.ops, self._known(), inside, written=False):
                self._scratch_of(scratch, name)[:] = self._recorded(name)
            for launch in run:
                self.launch(launch, scratch)
            for name in outside(self.step.ops, self._known(), inside, written=True):
                got = self._scratch_of(scratch, name)
                assert got.tobytes() == self._recorded(name).tobytes(), name
            for name in self._written_states(inside):
                got, want = self.places[name], self._recorded(name)
                assert got[: want.nbytes].tobytes() == want.tobytes(), name

    def launch(self, launch: PlannedLaunch, scratch: Bytes) -> None:
        """All blocks of one launch, one after the other."""
        assert launch.workspace is not None
        assert launch.shared_bytes <= self.device.shared_bytes
        replaced = self.packets.ctypes.data + launch.first * self.packets.itemsize
        emulate(launch.source, self.folder).run(
            launch.entry,
            launch.grid,
            launch.block[0],
            scratch.ctypes.data,
            self.inputs.ctypes.data,
            replaced,
            self.workspace.ctypes.data + launch.workspace,
        )

    def _make(self) -> None:
        for op in self.step.ops:
            if op.name == "quantize_activation" and self._is_known(source_of(op).buffer):
                m, scale, sums = plain_integers(self._values(source_of(op)))
                self._keep(op, m=m, scale=scale, sums=sums)
            if op.name == "ssm_delta_inputs":
                qk, gates = self._delta_inputs(op)
                self._keep(op, qk=qk, gates=gates)

    def _delta_inputs(self, op: Op) -> tuple[NDArray[Any], NDArray[Any]]:
        sizes = op.most_sizes()
        size, heads = sizes["state_size"], (sizes["key_heads"], sizes["value_heads"])
        read = {name: self._values(one) for name, one in named(op).items() if name in DELTA_READ}
        q, k, _ = split_heads(read["x"], *heads, size)
        eps, scale = op.reals
        q, k = l2_norm(q, eps) * np.float32(scale), l2_norm(k, eps)
        qk = np.concatenate([q, k], axis=1).reshape(len(q), -1)
        g = exp(softplus(read["alpha"] + read["dt_bias"]) * read["decay"])
        return qk, np.concatenate([g, sigmoid(read["beta"])], axis=1)

    def _keep(self, op: Op, **results: NDArray[Any]) -> None:
        for name, values in results.items():
            self.made[named(op)[name].buffer] = np.ascontiguousarray(values).view(np.uint8).ravel()

    def _values(self, tensor: Tensor) -> NDArray[Any]:
        """Its columns, of the rows there are."""
        rows: Any = self.recorded.arrays[tensor.buffer]
        if not isinstance(rows, np.ndarray):
            rows = self.recorded.raw[tensor.buffer].view(np.float32)
        rows = rows.reshape(-1, tensor.stride) if tensor.stride > 1 else rows.reshape(-1)
        values: NDArray[Any] = rows[:, tensor.start : tensor.stop] if rows.ndim > 1 else rows
        return values

    def _known(self) -> list[str]:
        return [name for name in self.step.scratch if self._is_known(name)]

    def _is_known(self, name: str) -> bool:
        return name in self.recorded.arrays or name in self.made

    def _written_states(self, inside: range) -> set[str]:
        names = {name for number in inside for name in self.step.ops[number].results()}
        return names & self.places.keys()

    def _recorded(self, name: str) -> Bytes:
        if name in self.made:
            return self.made[name]
        kind = self.recorded.graph.buffers[name].kind
        if kind is BufferKind.STATE:
            return self.recorded.raw[name]
        values: NDArray[Any] = self.recorded.arrays[name]
        return values.reshape(-1).view(np.uint8)

    def _scratch_of(self, scratch: Bytes, name: str) -> Bytes:
        start = self.schedule.shared[name]
        return scratch[start : start + self._recorded(name).nbytes]


DELTA_READ = ("x", "alpha", "beta", "decay", "dt_bias")


def named(op: Op) -> dict[str, Tensor]:
    """Its operands by name."""
    pairs = zip(op.device.operands, op.operands, strict=True)
    return {one.name: tensor for one, tensor in pairs if tensor is not None}


def source_of(op: Op) -> Tensor:
    """Its first operand."""
    tensor = op.operands[0]
    assert tensor is not None
    return tensor
