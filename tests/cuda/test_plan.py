"""Which launches a step becomes: plain kernels, and tuned ones where a rule says so."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.cuda import plan as plan_module
from accel.cuda import planning
from accel.cuda.bound_bucket import BoundBucket
from accel.cuda.device import Device, cluster_grid
from accel.cuda.plan import Plan, PlannedLaunch, layout_of, plan_launches
from accel.cuda.planning import planned_bucket
from accel.cuda.program import Source
from accel.cuda.tier import CudaTier
from accel.cuda.tuned import KernelLaunch, Replacement
from accel.kernels.source import GROUP_SIZE
from accel.packets.layouts import WeightLayout
from accel.packets.packet import PACKET, aligned
from accel.packets.rules import lower_graph
from accel.packets.step import Op
from contract.dtypes import F32, Q8_0
from contract.ir.graph import Graph, GraphBuilder
from contract.ir.inputs import input_layout
from contract.ir.nodes import BufferDecl, BufferKind
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from tests.cuda.conftest import OpenTier
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.fake_kernels import add, scale
from tests.cuda.test_tier import GRAPH, LARGEST, Lowered

DEVICE = Device(0, "a device", (9, 0), 4, 1 << 30, 232448, 13000)
WORKSPACE_BYTES = 1000
LAUNCH = KernelLaunch("both", (2, 1, 1), (64, 1, 1), shared_bytes=5000)


def both_at_once(ops: Sequence[Op], device: Device) -> Replacement | None:
    """An addition and the product after it."""
    if [op.name for op in ops[:2]] != ["add", "scale"]:
        return None
    return Replacement(2, (LAUNCH,), WORKSPACE_BYTES)


def both(driver: FakeDriver, scratch: int, inputs: int, packets: int, workspace: int) -> None:
    """Checks what a tuned kernel is given, and computes the two."""
    counted = np.ctypeslib.as_array((ctypes.c_uint32 * 2).from_address(workspace))
    assert counted[0] == counted[1]
    counted += 1
    for kernel, place in ((add, 0), (scale, 8 * PACKET.itemsize)):
        kernel(driver, scratch, inputs, packets >> place & (1 << 8 * PACKET.itemsize) - 1)


@pytest.fixture
def tuned(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule is in force."""
    driver.kernels["both"] = ((8, 8, 2 * PACKET.itemsize, 8), both)
    monkeypatch.setattr(plan_module, "RULES", [both_at_once])
    monkeypatch.setattr(plan_module, "tuned_source", lambda file, macros, op: Source(file, ""))


def test_every_op_is_launched_by_its_plain_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without rules; the grid covers the most of the form, and no more than the device takes."""
    monkeypatch.setattr(plan_module, "RULES", [])
    for tokens, groups in ((1, 1), (64, 2), (10**6, 32)):
        found = planned_bucket(lower_graph(GRAPH, ShapeKey(tokens, 0), 1, "cuda"), DEVICE)
        step, plan = found.step, found.plan
        assert [launch.entry for launch in plan.launches] == ["launch_add", "launch_scale"]
        assert [launch.first for launch in plan.launches] == [0, 1]
        for launch in plan.launches:
            assert launch.threads == GROUP_SIZE
            assert launch.grid == (groups, 1, 1)
        assert plan.workspace_bytes == 0
        assert len(step.ops) == 2


@pytest.mark.usefixtures("tuned")
def test_a_rule_replaces_a_run_of_ops(driver: FakeDriver, tier: CudaTier) -> None:
    """One launch for both ops, with their packets and memory of its own that is kept and zeroed; it
    is recorded for each of the two places of inputs."""
    lowered = Lowered(tier)
    assert lowered.batch.packets == 1
    for seed in range(3):
        lowered.run(seed=seed)
    assert [name for name, _ in driver.launched] == ["launch_self_test", "both", "both"]
    assert "cuFuncSetAttribute" in driver.calls


@pytest.mark.usefixtures("tuned")
def test_workspaces_are_planned(tier: CudaTier) -> None:
    """What tuned kernels keep of every form is part of the footprint."""
    with_rule = tier.footprint(GRAPH, LARGEST).variants
    plan_module.RULES.clear()
    tier._planner.planned = None
    buckets = len(tier.buckets(LARGEST))
    assert with_rule - tier.footprint(GRAPH, LARGEST).variants == buckets * 1024


def test_what_a_graph_takes_is_kept(
    open_cuda: OpenTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next tier like this one says it and lowers nothing until it has to; one that plans
    otherwise looks for itself."""
    graphs = GRAPH, product()
    needed = [_needs(open_cuda(cache=tmp_path), graph) for graph in graphs]
    with monkeypatch.context() as patched:
        patched.setattr(planning, "lower_graph", _refuse)
        tier = open_cuda(cache=tmp_path)
        assert [_needs(tier, graph) for graph in graphs] == needed
        with pytest.raises(ArithmeticError):
            _needs(open_cuda(cache=tmp_path, step="8x3"), GRAPH)
    Lowered(tier).run()


def test_a_layout_without_a_rule_is_refused(
    tier: CudaTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain kernels would read wrong bytes."""
    graph = product()
    decl = graph.buffers["w"]
    monkeypatch.setattr(plan_module, "RULES", [])
    weight = tier.upload(decl, np.zeros((16, Q8_0.row_bytes(256)), np.uint8))
    y = tier.alloc(graph.buffers["y"], 4 * 16 * 4)
    bucket = ShapeKey(4, 0)
    with pytest.raises(AssertionError, match="no rule for matmul of weights arranged as UNITS"):
        tier.lower(graph, {"w": weight, "y": y}, bucket, input_layout(graph, bucket))


def test_layout_rules_are_asked_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that answers decides; without an answer rows lie side by side."""
    decl = BufferDecl("w", BufferKind.WEIGHT, Q8_0, (16, 256), "w")
    asked: list[str] = []

    def rule(name: str, answer: WeightLayout | None) -> Any:
        def ask(decl: BufferDecl, device: Device) -> WeightLayout | None:
            asked.append(name)
            return answer

        return ask

    monkeypatch.setattr(plan_module, "LAYOUT_RULES", [])
    assert layout_of(decl, DEVICE) is WeightLayout.PLANES
    rules = [rule("a", None), rule("b", WeightLayout.STORED), rule("c", None)]
    monkeypatch.setattr(plan_module, "LAYOUT_RULES", rules)
    assert layout_of(decl, DEVICE) is WeightLayout.STORED
    assert asked == ["a", "b"]


@pytest.mark.usefixtures("tuned")
def test_ops_of_one_launch_share_a_level() -> None:
    """So that no two of their operands come to lie in the same memory."""
    step = lower_graph(GRAPH, LARGEST, 1, "cuda")
    assert plan_launches([*step.ops, *step.ops], DEVICE).levels == (0, 0, 1, 1)


@pytest.mark.usefixtures("tuned")
def test_launches_pass_on_values_in_memory_all_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest counts, and nobody's own memory lies in it."""
    sizes = iter([(0, 300), (WORKSPACE_BYTES, 0), (0, 700)])

    def rule(ops: Sequence[Op], device: Device) -> Replacement:
        return Replacement(2, (LAUNCH,), *next(sizes))

    monkeypatch.setattr(plan_module, "RULES", [rule])
    step = lower_graph(GRAPH, LARGEST, 1, "cuda")
    plan = plan_launches([*step.ops] * 3, DEVICE)
    places = [launch.workspace for launch in plan.launches]
    assert (places, plan.transient_bytes) == ([0, aligned(700), 0], 700)
    assert plan.workspace_bytes >= aligned(700) + WORKSPACE_BYTES


def product() -> Graph:
    """y = x w^T."""
    builder = GraphBuilder("product")
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", 256))
    weight = builder.buffer("w", BufferKind.WEIGHT, Q8_0, (16, 256), source="w")
    builder.emit(Opcode.MATMUL, x=x, weight=weight, y=builder.output("y", "tokens", 16))
    return builder.build()


def _needs(tier: CudaTier, graph: Graph) -> tuple[Any, ...]:
    footprint = tier.footprint(graph, LARGEST)
    tier.reserve(graph, LARGEST)
    assert tier._planner.planned is not None
    return footprint, tier._planner.planned.needs


def _refuse(*given: object) -> None:
    raise ArithmeticError


def test_what_launches_pass_on_lies_apart_from_what_they_keep() -> None:
    """Own memory begins behind the largest of what is passed on, which has no place in it."""
    source = Source("a.cu", "")
    places = (0, aligned(1000), aligned(1000) + 256, None)
    launches = tuple(
        PlannedLaunch(source, "a", (1, 1, 1), (32, 1, 1), 0, workspace=place) for place in places
    )
    made = Plan(launches, aligned(1000) + 512, (), transient_bytes=1000)
    assert (made.lasting_bytes, made.memory_bytes) == (512, aligned(512))
    own, transient = 1 << 20, 1 << 30
    packets = np.zeros(0, PACKET)
    bound = BoundBucket("g", LARGEST, made, packets, [], own, 0, {}, transient=transient)
    found = [bound.workspace_of(launch) for launch in launches[:3]]
    assert found == [transient, own, own + 256]
    alone = replace(bound, plan=replace(made, transient_bytes=0))
    assert [alone.workspace_of(launch) for launch in launches[:2]] == [own, own + aligned(1000)]


WIDE = replace(DEVICE, multiprocessors=132)
OLDER = replace(WIDE, capability=(8, 0))


@pytest.mark.parametrize(
    ("tiles", "blocks", "device", "want"),
    [
        *((768, 132, WIDE, (2, 132)), (5, 132, WIDE, (2, 10)), (1, 132, WIDE, (2, 2))),
        *((9496, 132, WIDE, (2, 132)), (256, 45, WIDE, (2, 44)), (45, 45, WIDE, (1, 45))),
        *((768, 132, OLDER, (1, 132)), (5, 132, OLDER, (1, 5))),
    ],
)
def test_clusters_leave_no_block_more_to_do(
    tiles: int, blocks: int, device: Device, want: tuple[int, int]
) -> None:
    """Where one that is left over would, there are none, nor have older devices any; a grid there
    has no more blocks than tiles."""
    assert cluster_grid(tiles, blocks, device) == want
