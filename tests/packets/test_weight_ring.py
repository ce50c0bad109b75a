"""The copies of streamed weights: one for each, in time, and never onto bytes that are still
read."""

from collections.abc import Callable, Iterator, Mapping

import pytest

from accel.packets import weight_ring
from accel.packets.binding import stored_operands
from accel.packets.fused import fuse
from accel.packets.layouts import matrices_of, planes_bytes
from accel.packets.repeated import repeat_small
from accel.packets.rules import lower_graph
from accel.packets.schedule import schedule_levels, schedule_workers
from accel.packets.step import Schedule, Step
from accel.packets.weight_ring import RING, SOURCE, WeightRing, in_ring, ring_of, with_copies
from contract.ir.nodes import Graph
from contract.shape_key import ShapeKey
from reference.limits import Limits
from reference.model.open import open_model
from tests.families_table import FAMILIES

LAYERS = 5
SCHEDULES: Mapping[str, Callable[[Step], Schedule]] = {
    "levels": schedule_levels,
    "workers": lambda step: schedule_workers(step, 3),
}


@pytest.fixture(scope="module")
def graph(synthetic_model) -> Graph:
    path = synthetic_model(architecture="qwen3", quant="q4_k_m", layers=LAYERS)
    return open_model(path).graph(Limits(2, 96, 12))


def streamed(graph: Graph, every: int = 1) -> list[str]:
    """The matrices of the layers, or one of so many."""
    layers = weight_ring.weights_of_layers(graph)
    return [name for name in layers if matrices_of(graph.buffers[name])][::every]


def misuses(step: Step, schedule: Schedule, ring: WeightRing) -> list[str]:
    """Weights read in the same level as their copy or before it, and copies to bytes that the same
    level reads: found by walking over the bytes, without the rules of the schedule."""
    found, level = [], 0
    content: dict[int, str] = {}
    written: dict[int, int] = {}
    read: dict[int, int] = {}
    for op, op_schedule in zip(step.ops, schedule.op_schedules, strict=True):
        level += op_schedule.wait
        for tensor in op.operands:
            name = "" if tensor is None else tensor.buffer.removeprefix(SOURCE)
            if name not in ring.offsets:
                continue
            start = ring.offsets[name]
            bytes_ = range(start, start + ring.sizes[name], 256)
            if op.name == "copy_rows":
                found += [f"{name} overwrites" for at in bytes_ if read.get(at) == level]
                content |= dict.fromkeys(bytes_, name)
                written |= dict.fromkeys(bytes_, level)
                continue
            read |= dict.fromkeys(bytes_, level)
            right = all(content.get(at) == name and written[at] < level for at in bytes_)
            found += [] if right else [f"{name} is read"]
    return found


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_weight_is_copied_once_and_in_time(graph, kind, tokens, every):
    """And most copies run in the level of a product of the layer before."""
    names = streamed(graph, every)
    ring = ring_of(graph, names, planes_bytes)
    step = lower_graph(graph, ShapeKey(tokens, 1), 4, "test")
    copying = with_copies(step, ring, names)
    schedule = SCHEDULES[kind](in_ring(copying, ring, names))
    assert misuses(copying, schedule, ring) == []
    copied = [
        tensor.buffer
        for op in copying.ops
        for tensor in op.operands
        if tensor is not None and tensor.buffer.startswith(SOURCE)
    ]
    assert sorted(copied) == sorted(SOURCE + name for name in names)
    assert [op for op in copying.ops if op.name != "copy_rows"] == step.ops
    levels: dict[int, set[str]] = {}
    level = 0
    for op, op_schedule in zip(copying.ops, schedule.op_schedules, strict=True):
        level += op_schedule.wait
        levels.setdefault(level, set()).add(op.name)
    beside = sum("copy_rows" in ops and "matmul" in ops for ops in levels.values())
    assert beside >= len(ring.layers) - 1


@pytest.mark.parametrize(
    "family",
    [
        *("gemma4-per-layer-embeddings", "gemma4-shared-kv", "gpt-oss-experts", "lfm2"),
        *("granitehybrid-experts", "qwen35moe-fused", "glm4-biases", "phi3"),
    ],
)
def test_layers_of_every_sort_have_their_turn(synthetic_model, family):
    """Fused ops, recurrence, experts and shared keys; in steps of one token and of a prompt."""
    graph = open_model(synthetic_model(**FAMILIES[family])).graph(Limits(2, 96, 12))
    for tokens in (1, 40):
        step = repeat_small(fuse(lower_graph(graph, ShapeKey(tokens, 1), 4, "test")))
        stored = stored_operands(step)
        names = [name for name in streamed(graph) if name not in stored]
        ring = ring_of(graph, names, lambda decl: planes_bytes(decl) or 4096)
        copying = with_copies(step, ring, names)
        for schedule in SCHEDULES.values():
            assert misuses(copying, schedule(in_ring(copying, ring, names)), ring) == []
        assert len(copying.ops) - len(step.ops) == len(names)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_that_does_not_see_the_ring_is_caught(graph, kind, monkeypatch):
    """Negative control: copies right before their readers, which only the ring's bytes keep apart
    by barriers."""
    names = streamed(graph)
    ring = ring_of(graph, names, planes_bytes)

    def just_before(step: Step, *_: object) -> Iterator[tuple[str, int]]:
        return ((n, first - 1) for n, (first, _) in weight_ring._reads(step, names).items())

    monkeypatch.setattr(weight_ring, "_copy_positions", just_before)
    step = with_copies(lower_graph(graph, ShapeKey(1, 1), 4, "test"), ring, names)
    assert misuses(step, SCHEDULES[kind](in_ring(step, ring, names)), ring) == []
    assert misuses(step, SCHEDULES[kind](step), ring)


def test_layers_use_two_slots_in_turn(graph):
    """No two weights of neighbouring layers share bytes; a single layer has a single slot."""
    ring = ring_of(graph, streamed(graph), planes_bytes)
    assert len(ring.layers) == LAYERS
    for layer, after in zip(ring.layers, ring.layers[1:], strict=False):
        taken: set[int] = set()
        for name in (*layer, *after):
            start = ring.offsets[name]
            bytes_ = set(range(start, start + ring.sizes[name], 256))
            assert not taken & bytes_
            taken |= bytes_
        assert max(taken) < ring.slots_bytes
    single = ring_of(graph, ring.layers[2], planes_bytes)
    assert single.slots_bytes == single.slot_bytes
    assert ring.tensor(ring.layers[1][0]).buffer == RING


def test_layers_that_overlap_in_time_are_refused(graph):
    """A third layer that is needed while its slot is read has no slot for its bytes."""
    names = streamed(graph)
    ring = ring_of(graph, names, planes_bytes)
    step = lower_graph(graph, ShapeKey(1, 1), 4, "test")
    step.ops.reverse()
    with pytest.raises(ValueError, match="slot of the ring is in use"):
        with_copies(step, ring, names)
