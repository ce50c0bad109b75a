"""Mixture of experts on the OpenCL tier: what the parity suite does not reach."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from accel.packets.layouts import TILE_ROWS
from accel.packets.ops import SLOTS
from accel.packets.rules import lower_graph
from accel.packets.schedule import schedule_workers
from contract.dtypes import F32, I32, Q4_K, Q5_0, Q5_K, Q6_K, Q8_0, DType
from contract.ir.graph import BufferKind, Graph, GraphBuilder, View
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from harness.parity.cases import Case, generate
from harness.parity.execute import compare
from tests.opencl.conftest import EACH_WAY, WAYS

WORKERS = 3


def expert_layers(
    layers: int,
    *,
    hidden: int = 256,
    experts: int = 8,
    used: int = 3,
    width: int = 256,
    shared: bool = False,
) -> Graph:
    """x f32[tokens, hidden] -> y: ``layers`` of norm, routing, experts and residual."""
    builder = GraphBuilder("expert layers")
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", hidden))
    for layer in range(layers):

        def of_layer(name: str, dtype: DType, *shape: int, layer: int = layer) -> View:
            full = f"{layer}.{name}"
            return builder.buffer(full, BufferKind.WEIGHT, dtype, shape, full)

        def between(name: str, dtype: DType, *shape: int, layer: int = layer) -> View:
            decl = ("tokens", *shape)
            return builder.buffer(f"{layer}.{name}", BufferKind.SCRATCH, dtype, decl)

        last = layer == layers - 1
        h = builder.emit(Opcode.RMS_NORM, x=x, weight=of_layer("norm", F32, hidden), eps=1e-5)
        ids, weights = between("ids", I32, used), between("weights", F32, used)
        builder.emit(
            Opcode.MOE_GATE_TOPK,
            x=h,
            gate_weight=of_layer("router", F32, experts, hidden),
            ids=ids,
            weights=weights,
            used=used,
        )
        up = between("up.y", F32, used, width)
        gate = builder.emit(
            Opcode.MOE_GATE_UP,
            x=h,
            gate_weight=of_layer("gate", Q4_K, experts, width, hidden),
            up_weight=of_layer("up", Q4_K, experts, width, hidden),
            ids=ids,
            up=up,
        )
        output = builder.output("y", "tokens", hidden) if last else None
        x = builder.emit(
            Opcode.MOE_DOWN_ACC,
            x=builder.emit(Opcode.MOE_SWIGLU, gate=gate, up=up),
            down_weight=of_layer("down", Q6_K, experts, hidden, width),
            ids=ids,
            weights=weights,
            residual=x,
            y=None if shared else output,
        )
        if shared:
            matrices = shared_matrices(of_layer, hidden, width)
            x = builder.emit(Opcode.SHARED_EXPERT, x=h, residual=x, y=output, **matrices)
    return builder.build()


def shared_matrices(weight: Callable[..., View], hidden: int, width: int) -> dict[str, View]:
    """Those of the expert that every token has."""
    shapes = {
        "gate": (Q8_0, width, hidden),
        "up": (Q8_0, width, hidden),
        "down": (Q8_0, hidden, width),
        "router": (F32, hidden),
    }
    return {f"{name}_weight": weight(f"shared.{name}", *of) for name, of in shapes.items()}


EXPERT_OPCODES = (
    *(Opcode.MOE_GATE_TOPK, Opcode.MOE_GATE_UP, Opcode.MOE_SWIGLU, Opcode.MOE_DOWN_ACC),
    Opcode.SHARED_EXPERT,
)
SAMPLED = (F32, Q5_0, Q4_K, Q5_K, None)
"""A float format, one of 32-blocks, and super-blocks with and without minima: of several weights
the last has the next format. None is outside of SOME."""


def sampled_cases() -> list[Case]:
    """Every shape of the expert opcodes in a few formats."""
    return [
        case
        for opcode in EXPERT_OPCODES
        for case in generate(opcode)
        if case.dtype in SAMPLED and case.kind == "normal"
    ]


OTHER_WAYS = [
    way if way.marks else pytest.param(way.values[0], marks=pytest.mark.long)
    for way in EACH_WAY
    if way.values[0] not in ("persistent", "launch")
]
OTHER_WAYS.append(pytest.param("launch"))


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.parametrize("way", OTHER_WAYS)
def test_every_way_gives_the_bits_of_the_definition(open_opencl, way, whole):
    """Launches, banks, one worker: the parity suite itself runs the usual way only."""
    chosen = WAYS[way]
    tier = open_opencl(
        mode=chosen.mode,
        threads=chosen.threads,
        shared_addresses=chosen.shared_addresses,
        native_arithmetic=chosen.native_arithmetic,
    )
    for case in sampled_cases()[:: 1 if whole else 3]:
        assert compare(tier, case) == {}, str(case)


@pytest.mark.parametrize(("shared", "most"), [(False, 3), (True, 4)])
def test_barriers_of_a_decode_layer(shared, most):
    """Router; gate and up of all experts; down of all experts; and the shared expert's down."""
    barriers = []
    for layers in (2, 5):
        step = lower_graph(expert_layers(layers, shared=shared), ShapeKey(1, 0), WORKERS, "opencl")
        barriers.append(schedule_workers(step, WORKERS).barriers)
    assert barriers[1] - barriers[0] == 3 * most


def test_an_activation_is_quantized_once():
    """Gate, up and the shared expert read the same integers; the router is F32."""
    step = lower_graph(expert_layers(1, shared=True), ShapeKey(7, 0), WORKERS, "opencl")
    counts = Counter(op.name for op in step.ops)
    assert counts["quantize_activation"] == 3
    assert counts["expert_group"] == 1
    alone = lower_graph(expert_layers(1, shared=True), ShapeKey(1, 0), WORKERS, "opencl")
    assert "expert_group" not in {op.name for op in alone.ops}


@pytest.mark.parametrize(("tokens", "used", "experts"), [(2, 8, 64), (512, 8, 64), (9, 1, 2)])
def test_a_launch_has_a_group_for_every_chunk(tokens, used, experts):
    """As many units as any routing can cut chunks, and not a multiple of it."""
    graph = expert_layers(1, experts=experts, used=used)
    step = lower_graph(graph, ShapeKey(tokens, 0), WORKERS, "opencl")
    product = next(op for op in step.ops if op.name == "matmul" and op.max_sizes()["row_pairs"])
    product = replace(product, dtype=Q4_K)
    pairs, row_groups = tokens * used, 256 // TILE_ROWS
    # The worst routing: as many experts as possible hold one pair, one holds the rest.
    lonely = min(experts - 1, pairs)
    worst = lonely + -(-(pairs - lonely) // SLOTS)
    assert row_groups * worst <= product.launch_groups(128, 1 << 30)
    assert product.launch_groups(128, 1 << 30) <= row_groups * (worst + experts)
