"""The plan adds up, grows with what is asked of it, and its inverse meets the budget exactly."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.dtypes import F16, F32, I3R, I4R, I12, KV_DTYPES, Q8_0, DType
from contract.footprint import Footprint, declared_footprint
from contract.ir.graph import BufferKind, Graph, GraphBuilder
from contract.ir.scratch import buffer_bytes
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from reference.cpu.tier import CpuTier
from reference.limits import Limits, whole_contexts
from reference.memory.planner import MemoryPlan, longest_plan, plan_memory, state_buffers
from reference.model.open import open_model

WIDTHS = (32, 96)
"""KV widths of the two attention layers of the hybrid graph."""
HISTORY, CHANNELS = 3, 20


@cache
def hybrid(limits: Limits) -> Graph:
    """Two attention layers of different width around a recurrent one, and a table."""
    b = GraphBuilder("hybrid")
    query = b.request("request.query", "tokens", 4)
    page_table = b.request("request.page_table", limits.slots, limits.slot_pages)
    x = b.buffer("request.x", BufferKind.REQUEST, F32, ("tokens", CHANNELS))
    weight = b.buffer("conv", BufferKind.WEIGHT, F32, (CHANNELS, HISTORY + 1), "conv")
    state = b.buffer("state.conv", BufferKind.STATE, F32, (limits.slots, HISTORY, CHANNELS))
    b.emit(
        Opcode.SSM_CONV1D, x=x, weight=weight, query=query, state=state,
        y=b.output("output.y", "tokens", CHANNELS), history=HISTORY,
    )  # fmt: skip
    table = b.buffer("table", BufferKind.CONSTANT, F32, (limits.context, 2, 4))
    for layer, width in enumerate(WIDTHS):
        q = b.buffer(f"request.q[{layer}]", BufferKind.REQUEST, F32, ("tokens", width))
        kv = b.buffer(
            f"state.kv[{layer}]", BufferKind.STATE, limits.kv_dtype, (limits.pages, 2, 16, 1, width)
        )
        heads: dict[str, Any] = {"kv_heads": 1, "head_dim": width}
        paged = {"query": query, "page_table": page_table, "kv": kv}
        b.emit(Opcode.KV_WRITE_BATCHED, k=q, v=q, **paged, **heads)
        rotated = b.emit(
            Opcode.ROPE, x=q, rope_table=table, query=query, heads=1, head_dim=width, neox=0
        )
        b.barrier()
        b.emit(
            Opcode.FLASH_ATTN_BATCHED, q=rotated,
            y=b.output(f"output.attended[{layer}]", "tokens", width), heads=1, scale=1.0, **paged,
            **heads,
        )  # fmt: skip
    return b.build()


def limits_of(context: int, slots: int = 1, kv_dtype: DType = F16) -> Limits:
    return whole_contexts(slots, context, kv_dtype, step_tokens=16 + slots, step_rows=slots)


def planned(asked: Limits) -> MemoryPlan:
    graph = hybrid(asked)
    return plan_memory(graph, asked, declared_footprint(graph, asked.largest))


@pytest.mark.parametrize(
    ("dtype", "row"),
    [
        (F32, 128 * 4), (F16, 128 * 2), (Q8_0, 4 * 34), (I12, 128 * 3 // 2 + 2), (I4R, 4 * 19 + 2),
        (I3R, 4 * 15 + 2),
    ],
)  # fmt: skip
def test_pages_and_states_are_told_apart_by_the_ops_that_update_them(dtype, row):
    """A token takes keys and values of both widths, a slot one convolution state."""
    plan = planned(limits_of(100, slots=3, kv_dtype=dtype))
    assert state_buffers(hybrid(limits_of(100))) == ({"state.kv[0]", "state.kv[1]"}, {"state.conv"})
    assert plan.pages == 3 * 7
    assert plan.kv_per_token == 2 * row
    assert plan.kv == plan.pages * 16 * plan.kv_per_token
    assert plan.recurrent_per_slot == HISTORY * CHANNELS * 4
    assert plan.recurrent == 3 * plan.recurrent_per_slot
    assert plan.constants == 100 * 2 * 4 * 4
    assert plan.weights == {"f32": CHANNELS * (HISTORY + 1) * 4}
    assert plan.mapped == sum(plan.weights.values())


def test_the_declared_bytes_are_all_counted_once():
    """Negative control of the sorting: a part nobody counts would be missing here."""
    asked = limits_of(100, slots=3)
    graph = hybrid(asked)
    declared = sum(
        buffer_bytes(decl, asked.largest)
        for decl in graph.buffers.values()
        if decl.kind is not BufferKind.SCRATCH
    )
    plan = planned(asked)
    assert plan.total == declared + plan.scratch
    assert plan.total == plan.host
    assert plan.device == 0


def test_a_device_of_its_own_keeps_only_copies_in_host_memory():
    asked = limits_of(64)
    graph = hybrid(asked)
    footprint = replace(declared_footprint(graph, asked.largest), staging=1000)
    plan = plan_memory(graph, asked, footprint, unified=False)
    assert plan.host == 1000
    assert plan.device == plan.budgeted == plan.total - 1000


def test_the_plan_is_json():
    plan = planned(limits_of(100, slots=2))
    told = json.loads(json.dumps(plan.to_dict()))
    assert told["total"] == plan.total == told["fixed"] + told["kv"] + told["recurrent"]
    assert told["kv_dtype"] == "f16"


@settings(deadline=None)
@given(
    context=st.integers(1, 300), slots=st.integers(1, 5), more=st.integers(0, 300),
    other=st.integers(0, 3), dtype=st.sampled_from(KV_DTYPES),
)  # fmt: skip
def test_the_plan_grows_with_slots_and_context(context, slots, more, other, dtype):
    small = planned(limits_of(context, slots, dtype))
    longer = planned(limits_of(context + more, slots, dtype))
    wider = planned(limits_of(context, slots + other, dtype))
    assert small.total <= longer.total
    assert small.total <= wider.total
    assert small.kv_per_token == longer.kv_per_token == wider.kv_per_token
    assert small.recurrent_per_slot == longer.recurrent_per_slot == wider.recurrent_per_slot


@settings(deadline=None)
@given(
    budget=st.integers(0, 600_000), longest=st.integers(1, 700), slots=st.integers(1, 3),
    dtype=st.sampled_from(KV_DTYPES),
)  # fmt: skip
def test_the_longest_context_meets_the_budget(budget, longest, slots, dtype):
    """Never above it; one more page would be, or the model has no more."""
    tried: list[int] = []

    def plan_at(context: int) -> MemoryPlan:
        tried.append(context)
        return planned(limits_of(context, slots, dtype))

    plan = longest_plan(plan_at, longest, budget)
    assert len(tried) <= 12
    if plan is None:
        assert planned(limits_of(min(16, longest), slots, dtype)).total > budget
        return
    assert plan.total <= budget
    assert plan.context == longest or plan.context % 16 == 0
    if plan.context < longest:
        next_page = min(plan.context + 16, longest)
        assert planned(limits_of(next_page, slots, dtype)).total > budget


@settings(deadline=None)
@given(budget=st.integers(0, 20_000), steps=st.lists(st.integers(0, 900), min_size=40, max_size=40))
def test_uneven_growth_does_not_mislead_the_search(budget, steps):
    """Memory that grows in jumps, as when buffers are aligned."""
    totals = [sum(steps[: count + 1]) for count in range(40)]

    def plan_at(context: int) -> MemoryPlan:
        plan = planned(limits_of(16))
        return replace(
            plan, context=context, weights={}, mapped=0, constants=0, step_data=0, kv=0,
            recurrent=0, scratch=totals[context // 16 - 1],
        )  # fmt: skip

    plan = longest_plan(plan_at, 640, budget)
    fitting = [16 * (index + 1) for index, total in enumerate(totals) if total <= budget]
    assert (plan.context if plan else None) == (fitting[-1] if fitting else None)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
def test_families_need_no_code(synthetic_model, kv_dtype):
    """A file's weights by their types, and its own head sizes."""
    model = open_model(synthetic_model(architecture="llama", quant="q4_k_m"))
    asked = limits_of(64, kv_dtype=kv_dtype)
    graph = model.graph(asked)
    with CpuTier(definitions_only=True) as tier:
        plan = plan_memory(graph, asked, tier.footprint(graph, asked.largest))
    by_type: dict[str, int] = {}
    for tensor in model.file.tensors.values():
        assert tensor.dtype is not None
        by_type[tensor.dtype.name] = by_type.get(tensor.dtype.name, 0) + tensor.nbytes
    assert plan.weights == by_type
    config = model.config
    heads = zip(config.kv_heads, config.head_dims, strict=True)
    assert plan.kv_per_token == sum(2 * kv * kv_dtype.row_bytes(size) for kv, size in heads)


def test_scratch_of_a_graph_without_any_is_none():
    builder = GraphBuilder("scale")
    x = builder.buffer("x", BufferKind.REQUEST, F32, ("tokens", 4))
    builder.emit(Opcode.SCALE, x=x, factor=2.0, y=builder.output("y", "tokens", 4))
    assert declared_footprint(builder.build(), ShapeKey(3, 0)) == Footprint({"x": 48, "y": 48})


def test_memory_at_32k_of_an_8b_shape(synthetic_model):
    """36 layers of 8 KV heads of 128 channels: I4R takes 0.31 of F16's memory at most."""
    shape = {"layers": 36, "heads": 32, "kv_heads": 8, "head_dim": 128, "context": 1 << 15}
    model = open_model(synthetic_model(architecture="qwen3", hidden=32, **shape))
    memory = {}
    for dtype in (F16, I4R, I3R):
        asked = limits_of(1 << 15, kv_dtype=dtype)
        graph = model.graph(asked)
        memory[dtype] = plan_memory(graph, asked, declared_footprint(graph, asked.largest)).kv
    assert memory[F16] == 36 * 2 * 8 * 128 * 2 << 15
    assert memory[I4R] <= 0.31 * memory[F16]
    assert memory[I3R] <= 0.24 * memory[F16]
