"""Logits and tokens of a request depend on nothing but the request.

Chunks, neighbours that join, leave and are cancelled, slots, pages and the waiting they cause
are drawn at random; every position of every request is compared with the request run alone."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from contract.dtypes import F16, F32, I3R, I4R, I12, Q8_0
from contract.types import Request
from tests.invariance import controls
from tests.invariance.engines import (
    PAGES,
    SLOTS,
    TIERS,
    Bench,
    Schedule,
    assert_prefill_equals_decode,
    assert_schedule_invariant,
    bench_on,
    loads,
    request_pool,
)

VOCAB = 300
SHAPE = {"vocab": VOCAB, "feed_forward": (512, 1280), "context": 256}
"""1280 columns are five segments in two spans."""

MODELS = {
    "llama f32": ({"architecture": "llama", "quant": "f32"}, F32),
    "llama q4_k_m, f16 cache": ({"architecture": "llama", "quant": "q4_k_m"}, F16),
    "llama q4_1, i12 cache": ({"architecture": "llama", "quant": "q4_1", "tied": False}, I12),
    "llama q4_k_m, i4r cache": ({"architecture": "llama", "quant": "q4_k_m"}, I4R),
    "llama q4_k_m, i3r cache": ({"architecture": "llama", "quant": "q4_k_m"}, I3R),
    "qwen2 q5_1, f16 cache": ({"architecture": "qwen2", "quant": "q5_1"}, F16),
    "qwen2 bf16": ({"architecture": "qwen2", "quant": "bf16"}, F32),
    "qwen3 q6_k": ({"architecture": "qwen3", "quant": "q6_k", "fused_qkv": True}, F32),
    "qwen3 q8_0, f16 cache": ({"architecture": "qwen3", "quant": "q8_0"}, F16),
    "llama q6_k, q8_0 cache": ({"architecture": "llama", "quant": "q6_k"}, Q8_0),
    "qwen3 f16, f16 cache": ({"architecture": "qwen3", "quant": "f16", "head_dim": 48}, F16),
}
POOL = request_pool(VOCAB)
SHORT = POOL[:7]
"""Prompts of at most 34 tokens, for benches that are emulated: there every token takes a while."""
PROOF = settings(
    max_examples=6, database=None, derandomize=True, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
FEWER = settings(PROOF, max_examples=2)
"""Where the bench is emulated."""
LONG = settings(PROOF, max_examples=200, derandomize=False)
"""Others every time."""
CONTROL = settings(PROOF, max_examples=40, phases=[Phase.generate], report_multiple_bugs=False)


ON_EVERY_TIER = ("llama q4_k_m, f16 cache", "qwen3 f16, f16 cache", "llama q6_k, q8_0 cache")
"""The other models differ in what only arithmetic sees, which parity compares tier by tier."""
ON_VULKAN = ON_EVERY_TIER[:1]
"""A processor that plays a graphics card takes long for each."""
ONLY_LONG = ("qwen2 q5_1, f16 cache", "qwen2 bf16", "qwen3 q6_k", "qwen3 q8_0, f16 cache")
"""Weights of other types than a model with the same pages has."""
RUNS = [
    (model, tier)
    for model in MODELS
    for tier in TIERS
    if model in {"native": MODELS, "vulkan": ON_VULKAN}.get(tier, ON_EVERY_TIER)
]
MARKED_RUNS = [
    pytest.param(run, id=" on ".join(run), marks=[pytest.mark.long] * (run[0] in ONLY_LONG))
    for run in RUNS
]


DEPTH_RUNS = [(model, tier) for model, tier in RUNS if model in ON_EVERY_TIER]
"""How far ahead steps are submitted has nothing to do with what they compute."""


FEWER_RUNS = [
    pytest.param(
        (model, tier),
        id=f"{model} on {tier}",
        marks=[] if model in ON_EVERY_TIER else [pytest.mark.long],
    )
    for model, tier in RUNS
]
"""Nor has the order in which pages are given."""


@pytest.fixture(params=MARKED_RUNS, scope="module")
def bench(request, synthetic_model) -> Iterator[Bench]:
    model, tier = request.param
    fields, kv_dtype = MODELS[model]
    with bench_on(tier, synthetic_model(**SHAPE, **fields), kv_dtype=kv_dtype) as bench:
        yield bench


def prove_schedules(bench: Bench, how: settings, pool: Sequence[Request] = POOL) -> None:
    @(FEWER if bench.emulated and how is not LONG else how)
    @given(loads(pool))
    def proof(load: tuple) -> None:
        assert_schedule_invariant(bench, *load)

    proof()


def prove_prefill(bench: Bench, how: settings, pool: Sequence[Request] = POOL) -> None:
    @(FEWER if bench.emulated and how is not LONG else how)
    @given(st.sampled_from(pool), st.integers(1, 64))
    def proof(request: Any, chunk_tokens: int) -> None:
        assert_prefill_equals_decode(bench, request, chunk_tokens)

    proof()


def test_no_schedule_changes_a_bit(bench):
    prove_schedules(bench, PROOF, POOL[:8] if bench.emulated else POOL)
    assert {1, 2} <= bench.runner.sequence_counts <= set(range(1, SLOTS + 1))
    assert len(bench.runner.batch_sizes) >= 8, "the batch size hardly varied"


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_no_schedule_changes_a_bit_for_long(bench):
    """As many on every tier."""
    prove_schedules(bench, LONG)
    prove_prefill(bench, LONG)


@pytest.mark.parametrize("bench", FEWER_RUNS, indirect=True)
def test_preemption_and_prefixes_change_no_bit(bench):
    """Seven pages for four slots: who runs is preempted, comes back, and begins from what others
    computed."""
    pool = POOL[3:8] if bench.emulated else POOL
    ids = [request.id for request in pool]
    for ahead in (0, 3) if bench.late else (3,):
        schedule = Schedule(
            chunk_tokens=24, steps_ahead=ahead, joins={id_: place for place, id_ in enumerate(ids)},
            batch=frozenset(ids[::2]), withheld=PAGES - 7, unscored=frozenset(ids), host_pages=6,
        )  # fmt: skip
        assert_schedule_invariant(bench, pool, schedule)
    assert bench.preempted > 0
    assert bench.reused > 0


def test_prefill_logits_are_decode_logits(bench):
    prove_prefill(bench, PROOF, SHORT if bench.emulated else POOL)
    assert 1 in bench.runner.batch_sizes
    assert max(bench.runner.batch_sizes) > 16


@pytest.mark.parametrize(
    ("bench", "steps_ahead"),
    [(run, depth) for run in DEPTH_RUNS for depth in ((3,) if run[1] == "vulkan" else (0, 1, 3))],
    ids=lambda value: " on ".join(value) if isinstance(value, tuple) else str(value),
    indirect=["bench"],
)
def test_every_depth_of_the_pipeline(bench, steps_ahead):
    """The whole pool, joining late, two of it cancelled."""
    pool = SHORT[::2] if bench.emulated else POOL
    ids = [request.id for request in pool]
    schedule = Schedule(
        chunk_tokens=24,
        steps_ahead=steps_ahead,
        joins={id_: 2 * place for place, id_ in enumerate(ids)},
        cancels={ids[1]: 4, ids[-1]: 2 * len(ids) + 1},
    )
    assert_schedule_invariant(bench, pool, schedule)


@pytest.mark.parametrize("bench", FEWER_RUNS, indirect=True)
def test_every_token_alone_equals_one_chunk(bench):
    """The two extremes of chunking, on the longest prompt."""
    longest = max(SHORT if bench.emulated else POOL, key=lambda request: len(request.prompt))
    for chunk_tokens in (1, 64):
        assert_prefill_equals_decode(bench, longest, chunk_tokens)


def test_the_pool_reaches_every_boundary():
    """Prompts cross pages of 16 and tiles of 64, some tokens are drawn and some are greedy."""
    lengths = {len(request.prompt) for request in POOL}
    assert min(lengths) == 1
    assert max(lengths) > 64
    assert {request.sampling.temperature > 0 for request in POOL} == {True, False}
    assert {request.sampling.penalizes for request in POOL} == {True, False}


BROKEN = {
    "summation order by batch": lambda path: Bench(path, tier=controls.split_k_tier()),
    "library sum in norms": lambda path: Bench(path, tier=controls.library_sum_tier()),
    "contracted multiply-add": lambda path: Bench(path, tier=controls.contracted_tier()),
    "leaked page": lambda path: Bench(path, wrap=controls.LeakedPage),
    "stale page table": lambda path: Bench(path, wrap=controls.StalePageTable),
    "untold row": lambda path: Bench(path, wrap=controls.UntoldRow),
    "sampler keyed by row": lambda path: Bench(path, wrap=controls.SharedSampler),
}
ARITHMETIC_FAULTS = tuple(BROKEN)[:3]


SLOW = "contracted multiply-add"
"""In schedules: that fault is noticed in prompts as well."""


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=[pytest.mark.soak] if fault == SLOW else []) for fault in BROKEN],
)
def test_control_schedules(fault, synthetic_model):
    """Negative control: the proof fails on an engine with this fault."""
    path = synthetic_model(architecture="llama", quant="f32", **SHAPE)
    with BROKEN[fault](path) as bench, pytest.raises(AssertionError, match="request"):
        prove_schedules(bench, CONTROL)


@pytest.mark.parametrize("fault", ARITHMETIC_FAULTS)
def test_control_prefill(fault, synthetic_model):
    """Negative control: the proof fails on an engine with this fault."""
    path = synthetic_model(architecture="llama", quant="f32", **SHAPE)
    with BROKEN[fault](path) as bench, pytest.raises(AssertionError, match="logits differ"):
        prove_prefill(bench, CONTROL)
