"""Tuned launches of a model's steps on emulated blocks, each run of ops with what the definitions
have in front of it: it must leave what they have behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel.cuda.packed_tiles import unit_layout
from accel.cuda.plan import PlannedLaunch, plan_launches
from accel.packets.layouts import WeightLayout
from accel.packets.rules import lower_graph
from accel.packets.schedule import schedule_launches
from accel.packets.shares import ALL_GATHER, divided_weights, share_step
from accel.packets.step import Op, Tensor
from contract.dtypes import StorageClass
from reference.exact.elementary import exp, sigmoid, softplus
from reference.ops.ssm_delta_net import l2_norm, split_heads
from tests.cuda.emulated_step import aligned_memory, arranged, plain_integers
from tests.cuda.emulator import TOGETHER, emulate
from tests.cuda.recorded_step import NOWHERE, DeviceSteps, inside_of, outside, touching

Bytes = NDArray[np.uint8]


@dataclass
class TunedSteps(DeviceSteps):
    """Replacements that have kernels in files that are ``chosen``."""

    made: dict[str, Bytes] = field(default_factory=dict)

    def lower(self) -> None:
        self.step = lower_graph(self.recorded.graph, self.bucket, 64, "cuda")
        self.divided = frozenset[str]()
        if self.share.count > 1:
            self.divided = divided_weights([self.step], self.share)
            self.step = share_step(self.step, self.share, self.divided).step
        self.plan = plan_launches(self.step.ops, self.device, self.step.scratch)
        self.schedule = schedule_launches(self.step, self.plan.levels)

    def made_here(self, name: str) -> Bytes | None:
        return self.made.get(name)

    @property
    def runs(self) -> list[list[PlannedLaunch]]:
        """Launches of one replacement each that has such a kernel."""
        runs = (list(run) for _, run in groupby(self.plan.launches, lambda launch: launch.first))
        return [run for run in runs if any(launch.source.name in self.chosen for launch in run)]

    def files_used(self) -> set[str]:
        """Of all launches of the step."""
        return {launch.source.name for launch in self.plan.launches}

    def matrix_of(self, name: str) -> tuple[int, int, WeightLayout]:
        decl = self.recorded.graph.buffers[name]
        rows, columns = int(decl.shape[-2]), int(decl.shape[-1])
        row_bytes = decl.dtype.row_bytes(columns)
        if decl.dtype.storage is StorageClass.FLOAT:
            return self.recorded.raw[name].ctypes.data, row_bytes, WeightLayout.STORED
        if unit_layout(decl, self.device) is not WeightLayout.UNITS:
            return NOWHERE, row_bytes, WeightLayout.PLANES
        if name not in self.units:
            stored = self.recorded.raw[name].reshape(-1, row_bytes)
            own = self.share.of(rows) if name in self.divided else range(rows)
            stacked = [
                arranged(decl.dtype, matrix[own.start : own.stop].copy(), self.folder)
                for matrix in stored.reshape(-1, rows, row_bytes)
            ]
            self.units[name] = aligned_memory(sum(matrix.nbytes for matrix in stacked))
            self.units[name][:] = np.concatenate(stacked)
        return self.units[name].ctypes.data, row_bytes, WeightLayout.UNITS

    def run(self, given: dict[str, NDArray[Any]], before: dict[str, Bytes]) -> None:
        """One step, whose results are compared with those recorded; ``before`` are the states it
        began with."""
        run_together([self], given, before)

    def begin(self, given: dict[str, NDArray[Any]], before: dict[str, Bytes]) -> None:
        super().begin(given, before)
        self._make()

    def compare(self, inside: range, scratch: Bytes) -> None:
        """What ops ``inside`` left is what was recorded; of shared ones the device's columns, of a
        buffer that others write, too, their own."""
        for name in outside(self.step.ops, self.known(), inside, written=True):
            got, want = self.scratch_of(scratch, name), self.recorded_bytes(name)
            writers = touching(self.step.ops, name, True)
            if self.share.count == 1 and all(writer in inside for writer in writers):
                assert got.tobytes() == want.tobytes(), name
                continue
            for op in inside:
                for tensor in (self.step.ops[op].operands[i] for i in self.step.ops[op].written):
                    if tensor is not None and tensor.buffer == name:
                        own = columns_of(got, tensor).tobytes()
                        assert own == columns_of(want, tensor).tobytes(), tensor
        self.compare_states(inside)

    def columns(self, scratch: Bytes, tensor: Tensor) -> NDArray[np.float32]:
        """Its columns in scratch memory, of as many rows as the buffer has."""
        start = self.schedule.shared[tensor.buffer]
        rows = self.step.scratch[tensor.buffer] // (4 * tensor.stride)
        return columns_of(scratch[start : start + 4 * rows * tensor.stride], tensor)

    def launch(self, launch: PlannedLaunch, scratch: Bytes) -> None:
        """All blocks of one launch."""
        assert launch.shared_bytes <= self.device.shared_bytes
        assert launch.entry not in TOGETHER or launch.grid[0] <= self.device.multiprocessors
        emulate(launch.source, self.folder).run(
            launch.entry, launch.grid, launch.threads, *self.arguments(launch, scratch)
        )

    def arguments(self, launch: PlannedLaunch, scratch: Bytes) -> list[int]:
        """Those of the launch's kernel."""
        assert launch.workspace is not None
        replaced = self.packets.ctypes.data + launch.first * self.packets.itemsize
        workspace = self.workspace.ctypes.data + launch.workspace
        stop = [self.stop.ctypes.data] if launch.cooperative else []
        return [scratch.ctypes.data, self.inputs.ctypes.data, replaced, workspace, *stop]

    def _make(self) -> None:
        for op in self.step.ops:
            if op.name == "quantize_activation" and self.is_known(source_of(op).buffer):
                m, scale, sums = plain_integers(self._values(source_of(op)))
                self._keep(op, m=m, scale=scale, sums=sums)
            if op.name == "ssm_delta_inputs":
                qk, gates = self._delta_inputs(op)
                self._keep(op, qk=qk, gates=gates)
            if op.name == "ssm_scan_gates":
                read = {name: self._values(named(op)[name]) for name in SCAN_READ}
                step = softplus(read["dt"] + read["dt_bias"])
                self._keep(op, gates=np.concatenate([exp(step * read["decay"]), step], axis=1))

    def _delta_inputs(self, op: Op) -> tuple[NDArray[Any], NDArray[Any]]:
        sizes = op.max_sizes()
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


def run_together(
    members: Sequence[TunedSteps], given: dict[str, NDArray[Any]], before: dict[str, Bytes]
) -> None:
    """One step of devices that share it: launches of all in turn. What ALL_GATHERs bring each is
    copied here."""
    for member in members:
        member.begin(given, before)
    for runs in zip(*(member.runs for member in members), strict=True):
        inside = inside_of(runs[0][0])
        scratches = [member.scratch_before(inside) for member in members]
        for launches in zip(*runs, strict=True):
            if launches[0].gathers:
                _gather(members, scratches, inside)
                continue
            for member, launch, scratch in zip(members, launches, scratches, strict=True):
                member.launch(launch, scratch)
        for member, scratch in zip(members, scratches, strict=True):
            member.compare(inside, scratch)


def _gather(members: Sequence[TunedSteps], scratches: Sequence[Bytes], inside: range) -> None:
    for number in inside:
        for sender, sent in zip(members, scratches, strict=True):
            op = sender.step.ops[number]
            part = op.operands[0]
            if op.device is ALL_GATHER and part is not None:
                for receiver, received in zip(members, scratches, strict=True):
                    receiver.columns(received, part)[:] = sender.columns(sent, part)


def columns_of(memory: Bytes, tensor: Tensor) -> NDArray[np.float32]:
    """The columns of a tensor of binary32 in the memory of its buffer."""
    return memory.view(np.float32).reshape(-1, tensor.stride)[:, tensor.start : tensor.stop]


DELTA_READ = ("x", "alpha", "beta", "decay", "dt_bias")
SCAN_READ = ("dt", "decay", "dt_bias")


def named(op: Op) -> dict[str, Tensor]:
    """Its operands by name."""
    pairs = zip(op.device.operands, op.operands, strict=True)
    return {one.name: tensor for one, tensor in pairs if tensor is not None}


def source_of(op: Op) -> Tensor:
    """Its first operand."""
    tensor = op.operands[0]
    assert tensor is not None
    return tensor
