"""Delta-net kernels as work-groups execute them, and the logarithms of the cores' code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from accel.kernels.source import GROUP_SIZE
from accel.opencl import binding as cl
from accel.opencl.program import build_program, op_files
from accel.packets.binding import bind_step
from accel.packets.rules import lower_graph
from accel.packets.schedule import schedule_launches
from contract.ir.inputs import input_layout, pack_inputs
from contract.ir.nodes import BufferKind
from contract.opcodes import Opcode
from contract.ops import TABLE
from contract.shape_key import ShapeKey
from harness.parity import Case, by_definition, difference, fill, generate
from harness.parity.execute import ELEMENT, build_graph
from reference.exact.elementary import log, softplus
from reference.matrix import Matrix
from tests.kernels.processor import ProcessorModules, cpu_device

OPCODES = (
    Opcode.SCALE_COLUMNS,
    Opcode.SSM_CONV1D,
    Opcode.SSM_DELTA_NET,
    Opcode.SSM_GATED_NORM,
    Opcode.SSM_SCAN,
)
MOST_GROUPS = 3
"""Fewer than the units of the larger cases, so that groups take several in turn."""
UNWRITTEN = 0xFF
ENTRY = """
__kernel void logarithms(__global const float *x, __global float *one, __global float *sixteen,
                         __global float *plus) {
    const uint i = get_global_id(0);
    one[i] = log1(x[i]);
    plus[i] = softplus1(x[i]);
    if (i % 16 == 0) vstore16(log16(vload16(0, x + i)), 0, sixteen + i);
}
"""


class WorkGroups:
    """The kernels that GPU tiers share, run on arrays of this process."""

    def __init__(self) -> None:
        self._modules = ProcessorModules()

    def run(self, case: Case, operands: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Every written and updated operand of the case."""
        graph = build_graph(case)
        sizes = case.sizes
        counts = ShapeKey(sizes["tokens"], 0)
        step, layout = lower_graph(graph, counts, 1, "opencl"), input_layout(graph, counts)
        schedule = schedule_launches(step)
        arrays = {}
        for name, decl in graph.buffers.items():
            shape = [sizes["tokens"] if dim == "tokens" else dim for dim in decl.shape]
            array = np.full((*shape, 4), UNWRITTEN, np.uint8).view(ELEMENT[decl.dtype])[..., 0]
            if name in operands:
                held = operands[name]
                content = held.blocks if isinstance(held, Matrix) else held
                margin = (shape[-1] - content.shape[-1]) // 2
                array[..., margin : shape[-1] - margin] = content
            arrays[name] = array
        scratch = np.full(max(1, schedule.shared_bytes), UNWRITTEN, np.uint8)
        requests = {decl.name: arrays[decl.name] for decl in graph.of_kind(BufferKind.REQUEST)}
        inputs = pack_inputs(layout, counts, requests)
        addresses = {name: array.ctypes.data for name, array in arrays.items()}
        packets = bind_step(step, schedule, layout, addresses.__getitem__, _no_matrix)
        for packet, op in zip(packets, step.ops, strict=True):
            groups = op.launch_groups(GROUP_SIZE, MOST_GROUPS)
            one, places = np.array([packet]), (scratch.ctypes.data, inputs.ctypes.data)
            self._modules.launch(op.name, one, groups, op.dtype, *places)
        return {o.name: arrays[o.name] for o in TABLE[case.opcode].outputs}


class CoreLogarithms:
    """Elementary functions as cores compute them."""

    def __init__(self) -> None:
        device = cpu_device()
        self._context = cl.Context([device.handle])
        self._queue = cl.CommandQueue(self._context)
        options = (
            "-cl-std=CL1.2 -DSHARED_ADDRESSES=1 -DNATIVE_DIVIDE=1 -DNATIVE_SQRT=1 -DDOT_VNNI=0"
        )
        files = {**op_files(("scale",), frozenset()), "logarithms.cl": ENTRY}
        program = build_program(self._context, device, files, options, None)
        self._kernel = cl.Kernel(program, "logarithms")

    def __call__(self, x: np.ndarray) -> list[np.ndarray]:
        """log of one, log of sixteen, softplus."""
        source = cl.Buffer(self._context, cl.READ_ONLY | cl.COPY_HOST_PTR, hostbuf=x)
        targets = [cl.Buffer(self._context, cl.WRITE_ONLY, x.nbytes) for _ in range(3)]
        self._kernel.set_args(source, *targets)
        cl.enqueue_nd_range_kernel(self._queue, self._kernel, x.shape, None)
        results = [np.empty_like(x) for _ in range(3)]
        for result, target in zip(results, targets, strict=True):
            cl.enqueue_copy(self._queue, result, target)
        return results


def _no_matrix(name: str) -> Any:
    raise AssertionError(f"{name} is no operand of a product")


@pytest.fixture(scope="module")
def work_groups() -> WorkGroups:
    return WorkGroups()


@pytest.fixture(scope="module")
def logarithms() -> CoreLogarithms:
    return CoreLogarithms()


@pytest.mark.parametrize("case", [c for o in OPCODES for c in generate(o)], ids=str)
def test_work_groups_equal_the_definition(work_groups: WorkGroups, case: Case) -> None:
    """The code accelerators run: the parity suite's cases, bit for bit."""
    operands = fill(case)
    expected = by_definition(case, operands)
    got = work_groups.run(case, operands)
    for operand in TABLE[case.opcode].outputs:
        may_break = case.may_break or operand.name == "state"
        problem = difference(expected[operand.name], got[operand.name], may_break=may_break)
        assert problem is None, f"{operand.name}: {problem}"


def test_logarithms_equal_the_definition(logarithms: CoreLogarithms) -> None:
    """Positive numbers of every exponent, subnormals and the neighbours of 1 and sqrt(1/2)."""
    rng = np.random.default_rng(4)
    anything = rng.integers(1, 0x7F800000, 1 << 14, np.uint32).view(np.float32)
    tiny = rng.integers(1, 0x00800000, 1 << 10, np.uint32).view(np.float32)
    near = (np.array([1.0, np.sqrt(0.5)], np.float32).view(np.uint32)[:, None]).astype(np.int64)
    near = (near + np.arange(-8, 8)).astype(np.uint32).reshape(-1).view(np.float32)
    x = np.concatenate([anything, tiny, near, np.float32(1.0) + rng.random(1024, np.float32)])
    one, sixteen, _ = logarithms(x)
    assert (one == log(x)).all()
    assert (sixteen == log(x)).all()


def test_softplus_equals_the_definition(logarithms: CoreLogarithms) -> None:
    """Both signs, infinities and NaN."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal(1 << 12).astype(np.float32) * np.float32(30.0)
    x[:4] = np.inf, -np.inf, np.nan, 0.0
    *_, plus = logarithms(x)
    with np.errstate(all="ignore"):
        assert np.array_equal(plus, softplus(x), equal_nan=True)
