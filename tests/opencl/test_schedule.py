"""Barriers, private work and scratch memory, checked by an independent walk over the packets."""

import numpy as np
import pytest

from accel.packets.device_op import Split
from accel.packets.ops import TABLE
from accel.packets.packet import ALIGNMENT
from accel.packets.rules import lower_graph
from accel.packets.schedule import schedule_launches, schedule_workers
from accel.packets.step import Count, Op, Per, Schedule, Step, Tensor
from contract.shape_key import ShapeKey
from reference.limits import Limits
from reference.model.open import open_model
from tests.contract.graphs import decoder
from tests.memory import recurrent_layers
from tests.opencl.test_experts import WORKERS, expert_layers

KEYS = [ShapeKey(1, 1), ShapeKey(3, 2), ShapeKey(64, 1), ShapeKey(513, 5), ShapeKey(0, 0)]
LAYERS = 4
GRAPHS = {
    "decoder": decoder(LAYERS),
    "recurrent": recurrent_layers.graph(3, LAYERS),
    "experts": expert_layers(3),
    "shared expert": expert_layers(3, shared=True),
}


def _owners(tensor: Tensor, split: Split, rows: int) -> np.ndarray:
    """Which worker owns each column (or row) of the tensor; -1 where anyone may touch it."""
    if split is Split.ANY:
        return np.full((1, 1), -1)
    if split is Split.COLUMNS:
        return (np.arange(tensor.columns) * WORKERS // max(tensor.columns, 1))[None, :]
    return (np.arange(max(rows, 1)) * WORKERS // max(rows, 1))[:, None]


def _races(step: Step, schedule: Schedule, rows: int = 6) -> list[str]:
    """Elements one worker touches after another wrote them, or the reverse, with no barrier.
    Buffers in one memory are one."""

    def memory(name: str) -> int | str:
        return schedule.shared.get(name, name)

    found = []
    seen: list[tuple[str, Tensor, np.ndarray, bool, bool]] = []
    for op, op_schedule in zip(step.ops, schedule.op_schedules, strict=True):
        if op_schedule.wait:
            seen = []
        for touch in op.touches(op_schedule.columns, op_schedule.everyone):
            tensor = touch.tensor
            if tensor.buffer in schedule.own:
                continue
            split = Split.ANY if op_schedule.everyone else touch.split
            grid = np.broadcast_to(_owners(tensor, split, rows), (rows, max(tensor.columns, 1)))
            for name, other, other_grid, other_writes, other_all in seen:
                apart = memory(other.buffer) != memory(tensor.buffer)
                if apart or not (touch.writes or other_writes):
                    continue
                if other_all and other_writes and not touch.writes:
                    continue
                low, high = max(tensor.start, other.start), min(tensor.stop, other.stop)
                if low >= high:
                    continue
                mine = grid[:, low - tensor.start : high - tensor.start]
                theirs = other_grid[:, low - other.start : high - other.start]
                if (mine != theirs).any() or (mine < 0).any():
                    found.append(f"{name} and {op.name} meet in {tensor.buffer}")
            seen.append((op.name, tensor, grid, touch.writes, op_schedule.everyone))
    return found


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_no_worker_meets_what_another_touched(key, name):
    """Every conflict between two ops has a barrier in between."""
    step = lower_graph(GRAPHS[name], key, WORKERS, "opencl")
    assert _races(step, schedule_workers(step, WORKERS)) == []


@pytest.mark.parametrize("name", GRAPHS)
def test_a_missing_barrier_is_noticed(name):
    """The negative control of the walk above: taking any one barrier away makes a race."""
    step = lower_graph(GRAPHS[name], ShapeKey(3, 2), WORKERS, "opencl")
    schedule = schedule_workers(step, WORKERS)
    for index, op_schedule in enumerate(schedule.op_schedules):
        if not op_schedule.wait:
            continue
        op_schedules = list(schedule.op_schedules)
        op_schedules[index] = type(op_schedule)(False, op_schedule.everyone, op_schedule.columns, 0)
        broken = Schedule(
            tuple(op_schedules), schedule.shared, schedule.shared_bytes, schedule.own, 0
        )
        assert _races(step, broken), f"without barrier before op {index}"


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("key", KEYS, ids=str)
@pytest.mark.parametrize("launches", [True, False])
def test_scratch_alive_together_does_not_overlap(key, launches, name):
    """Two buffers of one level (for a worker's own memory: of one op) never share a byte, but the
    result of an elementwise op lies over an operand that ends there."""
    step = lower_graph(GRAPHS[name], key, WORKERS, "opencl")
    schedule = schedule_launches(step) if launches else schedule_workers(step, WORKERS)
    spans: dict[str, tuple[int, int]] = {}
    results: dict[tuple[str, str], Op] = {}
    uses: dict[str, int] = {}
    for index, (op, op_schedule) in enumerate(zip(step.ops, schedule.op_schedules, strict=True)):
        names = [t.buffer for t in op.operands if t is not None and t.buffer in step.scratch]
        for name in names:
            now = index if name in schedule.own else op_schedule.level
            first, last = spans.get(name, (now, now))
            spans[name] = (min(first, now), max(last, now))
        results |= {(name, names[-1]): op for name in names[:-1] if names[-1] not in uses}
        uses |= dict.fromkeys(names, index)
    for arena, nbytes in ((schedule.shared, schedule.shared_bytes), (schedule.own, None)):
        for one, offset in arena.items():
            assert offset % ALIGNMENT == 0
            assert nbytes is None or offset + step.scratch[one] <= nbytes
            for other, other_offset in arena.items():
                together = spans[one][0] <= spans[other][1] and spans[other][0] <= spans[one][1]
                if other != one and together and step.scratch[one] and step.scratch[other]:
                    apart = (
                        offset + step.scratch[one] <= other_offset
                        or other_offset + step.scratch[other] <= offset
                    )
                    op = results.get((one, other)) or results.get((other, one))
                    if not apart and op is not None and not launches:
                        last_read = min(uses[one], uses[other])
                        assert op.by_columns
                        assert step.ops[last_read] is op
                        assert arena is schedule.shared
                        assert (offset, step.scratch[one]) == (other_offset, step.scratch[other])
                        continue
                    assert apart, f"{one} and {other} overlap"


@pytest.mark.parametrize(("workers", "each"), [(2, 5), (WORKERS, 6)])
def test_what_a_decode_layer_waits_for(workers, each, synthetic_model):
    """Projections, attention, its output, gate and up, down; and more than two workers for what
    each has written of the page: nothing else."""
    barriers = []
    for layers in (2, 5):
        path = synthetic_model(architecture="qwen3", quant="q4_k_m", layers=layers)
        graph = open_model(path).graph(Limits(slots=2, context=64, pages=8))
        step = lower_graph(graph, ShapeKey(1, 1), workers, "opencl")
        barriers.append(schedule_workers(step, workers).barriers)
    assert barriers[1] - barriers[0] == 3 * each


def test_one_worker_keeps_no_private_copies():
    """Alone there is nobody to save a barrier for."""
    step = lower_graph(decoder(), ShapeKey(1, 1), 1, "opencl")
    assert schedule_workers(step, 1).own == {}


def _elementwise(*names: str, private: bool = False) -> Op:
    """An op over tensors of four columns: its operands, and its result."""
    tensors = tuple(Tensor(name, 0, 4, 4) for name in names)
    return Op(
        TABLE["add"], tensors, (Split.ROWS,) * 3, Count(6, Per.STEP, 6), (4,), (), None, private
    )


@pytest.mark.parametrize(
    ("ops", "over"),
    [
        ([_elementwise("a", "b", "y")], True),
        ([_elementwise("a", "b", "y"), _elementwise("y", "b", "z")], True),
        ([_elementwise("a", "b", "y"), _elementwise("y", "a", "z")], False),
        ([_elementwise("a", "b", "y"), _elementwise("b", "b", "y")], False),
        ([_elementwise("a", "b", "own", private=True), _elementwise("a", "own", "y")], False),
        ([_elementwise("a", "b", "y", private=True)], False),
    ],
)
def test_a_result_lies_over_an_operand_that_is_read_no_more(ops, over):
    """Not if an op reads the operand later, if every worker reads it without a barrier in between
    or repeats the op, and not if another op writes the result as well."""
    step = Step(ops, dict.fromkeys(("a", "b", "y", "z", "own"), 4096))
    schedule = schedule_workers(step, WORKERS)
    assert _races(step, schedule) == []
    shared = schedule.shared
    beneath = {name for name in ("a", "b") if shared[name] == shared.get("y")}
    assert beneath == ({"a"} if over else set())
    if over and "z" in shared:
        assert shared["z"] == shared["a"], "the result of the result, too"


def test_everyone_writing_shared_memory_bars_a_second_writer():
    """A worker still repeating an old write must not undo a newer one."""
    page = Tensor("state", 0, 4, 4)
    source = Tensor("x", 0, 4, 4)
    operands, splits = (source, None, page), (Split.ROWS,) * 3
    write = Op(TABLE["add"], operands, splits, Count(1, Per.STEP, 1), (4,), private=True)
    step = Step([write, write])
    assert [p.wait for p in schedule_workers(step, WORKERS).op_schedules] == [False, True]
