"""What a plan predicts is what a tier allocates, within one part in a hundred."""

import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.native.tier import Choices as NativeChoices
from accel.native.tier import NativeTier
from accel.opencl.runtime import Choices
from accel.opencl.tier import OpenClTier
from accel.vulkan.runtime import Choices as VulkanChoices
from accel.vulkan.tier import VulkanTier
from contract.dtypes import F16, F32, I3R, I12, Q8_0
from contract.footprint import Footprint
from contract.records import QUERY_TOKEN, SAMPLING
from contract.tier import Tier
from harness.tiers import open_tier
from reference.cpu.tier import CpuTier
from reference.limits import Limits, whole_contexts
from reference.memory.planner import MemoryPlan, plan_memory
from reference.model.open import Model, open_model
from reference.runner import ModelRunner, StepInput
from tests.families_table import FAMILIES
from tests.needs import need_device
from tests.opencl_parts import SOME, holding, is_usual

TOLERANCE = 0.01
CONTEXT = 1000
CHUNK = 40
STEPS = (CHUNK, 1, 3, 4, 7)
"""Tokens of the steps that are run: each is lowered on its own."""
FEW_STEPS = (1, 3)
"""Those where a processor plays a graphics card: 40 tokens take it seconds, and no memory."""


@pytest.fixture(scope="module", autouse=True)
def what_others_left_is_not_searched() -> None:
    """Each case asks for a collection, which took ten times the case among what earlier modules
    keep."""
    gc.collect()
    gc.freeze()


@contextmanager
def open_tier_of(way: str, cache: Path) -> Iterator[Tier]:
    if way == "cpu":
        with CpuTier() as tier:
            yield tier
        return
    if way == "cuda":
        with need_device(partial(open_tier, way)) as tier:
            yield tier
        return
    if way == "native":
        # Arranged weights that are mapped from a file are not the interpreter's memory.
        own_choices = NativeChoices(cache=cache)
        with need_device(lambda: NativeTier(choices=own_choices)) as tier:
            yield tier
        return
    if way.startswith("vulkan"):
        own = VulkanChoices(cache=cache, shared=False if way == "vulkan-own" else None)
        with need_device(lambda: VulkanTier(choices=own)) as tier:
            yield tier
        return
    shared = {"opencl": None, "opencl-banked": False}[way]
    choices = Choices(shared_addresses=shared, cache=cache)
    with (
        holding(SOME, not is_usual(choices)),
        need_device(lambda: OpenClTier(choices=choices)) as tier,
    ):
        yield tier


WAYS = ("cpu", "native", "opencl", "opencl-banked", "vulkan", "vulkan-own", "cuda")


@pytest.fixture(params=WAYS)
def tier(request, kernel_cache) -> Iterator[Tier]:
    with open_tier_of(request.param, kernel_cache) as opened:
        yield opened


def plan_on(model: Model, tier: Tier, limits: Limits) -> tuple[MemoryPlan, Footprint]:
    graph = model.graph(limits)
    footprint = tier.footprint(graph, limits.largest)
    return plan_memory(graph, limits, footprint, tier.info.host_unified), footprint


def step_of(tokens: int, limits: Limits, first: int = 0) -> StepInput:
    """Tokens from ``first`` on at the begin of slot 0, whose last row is wanted; they differ, so
    that experts do."""
    query = np.zeros(tokens, QUERY_TOKEN)
    query["token"] = first + np.arange(tokens)
    query["position"] = np.arange(tokens)
    pages = np.arange(limits.slots * limits.slot_pages, dtype=np.int32)
    return StepInput(
        query, np.array([tokens - 1], np.int32), np.zeros(1, SAMPLING),
        pages.reshape(limits.slots, limits.slot_pages),
    )  # fmt: skip


def close(measured: int, predicted: int) -> bool:
    return abs(measured - predicted) <= TOLERANCE * predicted


def measure(model: Model, tier: Tier, limits: Limits, trace: bool = False) -> tuple[int, int]:
    """Bytes by the tier's own count, once a few steps were run, and by the interpreter's if it is
    to ``trace``, which makes all else slow."""
    before = tier.allocated_bytes
    gc.collect()
    if trace:
        tracemalloc.start()
    try:
        with ModelRunner(model, tier, limits) as runner:
            runner.prepare()
            for tokens in FEW_STEPS if isinstance(tier, VulkanTier) else STEPS:
                runner.step(step_of(tokens, limits))
            if isinstance(tier, CpuTier) and model.config.experts is not None:
                for token in range(ROWS_FOR_EXPERTS):
                    runner.step(step_of(1, limits, token))
            gc.collect()
            return tier.allocated_bytes - before, tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


LLAMA = {"architecture": "llama", "quant": "q4_k_m", "tied": False}
DENSE = [
    *((LLAMA, F32, 1), (LLAMA, F16, 4), (LLAMA, I12, 4), (LLAMA, I3R, 4)),
    ({"architecture": "qwen3", "quant": "q5_1"}, Q8_0, 4),
    ({"architecture": "qwen2", "quant": "f16"}, F16, 1),
]
EXPERTS = {"count": 6, "used": 2, "width": 88}
"""Few enough for the first step to use all of them, but in the last layer, which computes rows;
widths of no whole 16 rows."""
ROWS_FOR_EXPERTS = 12
"""With which the last layer has used all of them."""
FAMILY_CASES = {
    "qwen3moe": ("q4_k_m", F16, 4), "qwen35": ("q8_0", Q8_0, 4),
    "qwen35moe-fused": ("q4_k_m", F32, 4), "qwen3next-fused-ssm-in": ("bf16", F16, 1),
    "gemma4-per-layer-embeddings": ("q4_k_m", F16, 4),
    "gemma4-experts-fused-values-from-keys": ("q4_k_m", F32, 4),
}  # fmt: skip


def family_fields(name: str, quant: str) -> dict[str, Any]:
    """An entry of the table of families, its experts replaced."""
    fields = {**FAMILIES[name], "quant": quant}
    if "experts" in fields:
        fields["experts"] = {**fields["experts"], **EXPERTS}
    return fields


CASES = {
    **{f"{f['quant']}-{kv_dtype}-{slots}": (f, kv_dtype, slots) for f, kv_dtype, slots in DENSE},
    **{
        name: (family_fields(name, quant), kv_dtype, slots)
        for name, (quant, kv_dtype, slots) in FAMILY_CASES.items()
    },
}


BANKED = ("q4_k_m", "q5_1", "q6_k", "q8_0", "f16")
"""Weights of formats in SOME; memory of their own is of all formats alike."""
PLAYED = ("q4_k_m-f32-1", "qwen3moe", "qwen35")
"""For Vulkan, which a processor plays: what a model holds, and whose memory that is, are counted
apart."""
COMBINED = [
    pytest.param(way, case, id=f"{way}-{case}")
    for way in WAYS
    for case in CASES
    if way != "opencl-banked" or CASES[case][0]["quant"] in BANKED
    if not way.startswith("vulkan") or case in PLAYED
]


@pytest.mark.parametrize(("tier", "case"), COMBINED, indirect=["tier"])
def test_synthetic_models(tier, synthetic_model, case):
    """Weights and pages of many types, experts, states, one slot and four."""
    fields, kv_dtype, slots = CASES[case]
    model = open_model(synthetic_model(**fields))
    check(model, tier, whole_contexts(slots, CONTEXT, kv_dtype, CHUNK + slots, slots))


@pytest.mark.parametrize("tier", ["cpu", "native", "opencl-banked"], indirect=True)
def test_constraints_are_in_the_plan(tier, synthetic_model):
    """Masks, biases and listed tokens of every slot; without them nothing is planned for them."""
    model = open_model(synthetic_model(architecture="llama", quant="q4_k_m", vocab=40_000))
    plain = whole_contexts(4, CONTEXT, F16, CHUNK + 4, 4)
    limits = replace(plain, masks=4, biases=1000, top_log_probabilities=20)
    check(model, tier, limits)
    more = plan_on(model, tier, limits)[0].step_data - plan_on(model, tier, plain)[0].step_data
    assert more >= 4 * 40_000 // 8 + 4 * 1000 * 8 + 4 * (1 + 2 * 20) * 4


def test_experts_are_kept_up_to_a_limit(synthetic_model, monkeypatch):
    """Half of the experts' memory: the plan has that half, and the tier comes close from below."""
    model = open_model(synthetic_model(**family_fields("qwen3moe", "q8_0")))
    limits = whole_contexts(1, CONTEXT, F16, CHUNK + 1, 1)
    with CpuTier() as tier:
        whole = plan_on(model, tier, limits)[0].allocated
        monkeypatch.setattr("reference.cpu.footprint.expert_memory_limit", lambda: 0)
        without = plan_on(model, tier, limits)[0].allocated
    limit = (whole - without) // 2
    for module in ("footprint", "prepared"):
        monkeypatch.setattr(f"reference.cpu.{module}.expert_memory_limit", lambda: limit)
    with CpuTier() as tier:
        plan, _ = plan_on(model, tier, limits)
        counted, _ = measure(model, tier, limits)
    assert abs(plan.allocated - (without + limit)) < 100
    assert without + 0.9 * limit < counted <= without + limit


@pytest.mark.parametrize(
    ("tier", "kv_dtype"),
    [
        *(pytest.param(tier, Q8_0, marks=pytest.mark.long) for tier in ("cpu", "opencl")),
        ("native", Q8_0),
        ("opencl-banked", F16),
    ],
    indirect=["tier"],
    ids=str,
)
def test_default_model(tier, default_model, kv_dtype):
    """A whole model; the interpreter sees what tiers make of host memory, whatever they count.

    Not where a processor plays a graphics card: that takes minutes and shows nothing more."""
    limits = whole_contexts(4, 2048, kv_dtype, 256 + 4, 4)
    traced, predicted = check(default_model, tier, limits, trace=True)
    if not isinstance(tier, OpenClTier) or tier.shares_memory:
        kept = plan_on(default_model, tier, limits)[0].workspace
        assert (1 - TOLERANCE) * predicted <= traced <= (1 + TOLERANCE) * predicted + kept


def check(model: Model, tier: Tier, limits: Limits, trace: bool = False) -> tuple[int, int]:
    """The interpreter's count, and the prediction that the tier's own count came close to."""
    plan, _ = plan_on(model, tier, limits)
    counted, traced = measure(model, tier, limits, trace)
    assert close(counted, plan.allocated), (counted, plan.allocated)
    assert counted <= plan.total
    return traced, plan.allocated


def test_a_wrong_prediction_is_noticed(synthetic_model, monkeypatch):
    """Negative control: a tier that forgets its prepared weights misses by more than allowed."""
    model = open_model(synthetic_model(architecture="llama", quant="q4_k_m"))
    limits = whole_contexts(1, 64, F16, CHUNK + 1, 1)
    monkeypatch.setattr("reference.cpu.footprint._prepared_bytes", lambda decl: 0)
    with CpuTier() as tier:
        plan, _ = plan_on(model, tier, limits)
        counted, _ = measure(model, tier, limits)
    assert not close(counted, plan.allocated)


def test_attention_stays_within_its_workspace(synthetic_model):
    """At full context, what a step of the CPU tier takes and gives back is what was planned."""
    model = open_model(synthetic_model(architecture="llama", quant="q8_0", context=32768))
    limits = whole_contexts(1, 32768, F16, 2, 1)
    with CpuTier() as tier:
        plan, _ = plan_on(model, tier, limits)
        with ModelRunner(model, tier, limits) as runner:
            last = step_of(1, limits)
            runner.step(last)
            last.query["position"] = 32767
            tracemalloc.start()
            try:
                runner.step(last)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
    assert 0.4 * plan.workspace < peak <= plan.workspace + (2 << 20)
