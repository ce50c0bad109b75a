"""Experts, recurrent states and windows keep the bits whatever the schedule, as dense layers do.

Fewer examples a model than ``test_schedules`` draws, for more models."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from contract.dtypes import F16, F32
from contract.opcodes import Opcode
from contract.types import Request
from tests.families_table import DELTA_NET, FAMILIES, HYBRID
from tests.invariance import controls, family_controls
from tests.invariance.engines import (
    TIERS,
    Bench,
    Schedule,
    assert_prefill_equals_decode,
    assert_schedule_invariant,
    bench_on,
    request_pool,
)
from tests.invariance.test_schedules import CONTROL, PROOF, prove_prefill, prove_schedules

SyntheticModel = Callable[..., Path]

MODELS = {
    "llama-8-experts": ("q4_k_m", F16), "mistral3": ("q4_k_m", F16), "smollm3": ("q4_k_m", F16),
    "llama4-experts-chunks": ("q8_0", F16), "apertus": ("q8_0", F16),
    "granite": ("f32", F32), "glm4-biases": ("q8_0", F16), "phi3-window": ("q4_k_m", F16),
    "olmo2-windows": ("q5_1", F32), "command-r": ("f32", F32), "cohere2": ("q4_k_m", F16),
    "qwen3moe": ("f32", F32), "qwen3moe-untied-fused-qkv": ("q5_1", F16),
    "exaone4-windows": ("q8_0", F16), "granitemoe-experts-shared": ("f32", F32),
    "minimax-m2-experts": ("q8_0", F16), "ernie4_5": ("q8_0", F16), "seed_oss": ("q4_k_m", F16),
    "qwen2moe-experts": ("q4_k_m", F16), "olmoe-experts": ("f32", F32),
    "gpt-oss-experts": ("mxfp4_moe", F16), "glm4moe-experts": ("q8_0", F16),
    "ernie4_5-moe-experts": ("q8_0", F16),
    "bailingmoe2-experts": ("q8_0", F16), "exaone-moe-experts": ("q8_0", F16),
    "afmoe-experts": ("q4_k_m", F16),
    "qwen2vl": ("q8_0", F16), "qwen3vl": ("q4_k_m", F16), "qwen3vlmoe-experts": ("q8_0", F16),
    "deepseek2-experts-groups": ("q4_k_m", F16), "deepseek2": ("q8_0", F32),
    "qwen35": ("q8_0", F16), "qwen35moe-fused": ("q4_k_m", F32), "qwen3next": ("f32", F32),
    "qwen3next-fused-ssm-in": ("bf16", F16), "lfm2": ("q4_k_m", F16), "lfm2moe": ("q8_0", F16),
    "falcon-h1-norms": ("q8_0", F16), "kimi-linear-experts": ("q4_k_m", F16),
    "nemotron_h-groups": ("q8_0", F16), "nemotron_h_moe": ("q4_k_m", F16),
    "hunyuan-dense": ("f32", F32), "hunyuan-moe-experts": ("q8_0", F16),
    "dots1-experts": ("q8_0", F16), "internlm2": ("q8_0", F16), "minicpm": ("f32", F32),
    "exaone": ("q8_0", F16), "chatglm": ("q4_k_m", F16), "arcee": ("q8_0", F16),
    "baichuan": ("q8_0", F16), "falcon": ("q4_k_m", F16), "nemotron": ("q8_0", F16),
    "olmo": ("f32", F32), "stablelm-head-norms": ("q4_k_m", F16),
    "deepseek-experts": ("q8_0", F16), "bailingmoe-experts": ("q8_0", F16),
    "mamba2-groups": ("q4_k_m", F16), "gpt2": ("q8_0", F16), "starcoder": ("q4_k_m", F16),
    "mistral4-experts": ("q4_k_m", F16), "hy_v3-experts": ("q8_0", F16),
    "mellum-experts": ("q8_0", F16), "smallthinker-experts-windows": ("q4_k_m", F16),
    "starcoder2": ("q8_0", F16), "stablelm": ("q8_0", F16), "phi2": ("q8_0", F16),
    "gptneox-parallel": ("f32", F32), "gemma": ("f32", F32), "gemma2": ("q4_k_m", F16),
    "qwen": ("q8_0", F16), "xverse": ("q8_0", F16), "pangu-embedded": ("q8_0", F16),
    "orion": ("q8_0", F16), "codeshell": ("q8_0", F16), "jais2": ("q8_0", F16),
    "maincoder": ("q8_0", F16),
    "granitehybrid-groups": ("q8_0", F16), "gemma3": ("q4_k_m", F32),
    "gemma4-values-from-keys": ("q8_0", F16),
    "gemma4-experts-fused-values-from-keys": ("q4_k_m", F32), "gemma4-shared-kv": ("f32", F32),
    "gemma4-per-layer-embeddings": ("q8_0", F32), "gemma3n-shared-kv": ("q8_0", F16),
}  # fmt: skip
VOCAB = 320
POOL = request_pool(VOCAB, count=8, longest=80)
"""Windows are 20 positions: the longer prompts go far beyond, the shorter stay inside."""
FEW = settings(PROOF, max_examples=3)


def pool_of(bench: Bench) -> tuple[Request, ...]:
    """One for each slot where steps take long, of up to 42 tokens, which are three pages."""
    return POOL[1:4] + POOL[5:6] if bench.emulated else POOL


ON_EVERY_TIER = (
    *("qwen3moe", "qwen35", "qwen3next", "lfm2", "granitehybrid-groups", "gemma4-shared-kv"),
)
ON_VULKAN = ("qwen35",)
"""A processor that plays a graphics card takes long for each."""
VARIANTS = ("qwen3moe-untied-fused-qkv", "qwen3next-fused-ssm-in", "gemma4-values-from-keys")
"""Others have every op of theirs: weights lie in other tensors, which soak tries."""
SOAK = {(model, tier) for model in VARIANTS for tier in TIERS}
SOAK |= {("qwen3next", tier) for tier in ("late", "opencl")}
"""Tiers have its ops from qwen35, and itself on the CPU."""
SHORT = ("qwen3moe", "qwen35")
"""Experts and states on every tier; every kind of layer on the native one."""


ALIKE = (
    *("smollm3", "granite", "glm4-biases", "command-r", "cohere2", "internlm2", "minicpm", "gemma"),
    *("qwen2vl", "qwen3vl", "stablelm", "phi2", "gptneox-parallel", "starcoder2", "apertus"),
    *("seed_oss", "ernie4_5", "hunyuan-dense", "phi3-window", "exaone4-windows"),
    *("exaone", "chatglm", "arcee", "baichuan", "falcon", "nemotron", "olmo"),
    *("stablelm-head-norms", "deepseek-experts", "bailingmoe-experts"),
    *("qwen2moe-experts", "olmoe-experts", "granitemoe-experts-shared", "minimax-m2-experts"),
    *("glm4moe-experts", "ernie4_5-moe-experts", "bailingmoe2-experts", "dots1-experts"),
    *("qwen3vlmoe-experts", "hunyuan-moe-experts", "exaone-moe-experts", "starcoder"),
    *("mistral4-experts", "hy_v3-experts", "mellum-experts", "qwen", "xverse", "pangu-embedded"),
    *("orion", "codeshell", "jais2", "maincoder"),
)
"""What tells them apart has no state from token to token but pages, windows and experts, which
others have as well."""


def marks_of(model: str, tier: str) -> list[pytest.MarkDecorator]:
    """Whether soak tests, ``ci/test --all`` or every run has a model on a tier."""
    if (model, tier) in SOAK:
        return [pytest.mark.soak]
    in_every_run = (tier == "native" and model not in ALIKE) or model in SHORT
    return [] if in_every_run else [pytest.mark.long]


def runs(marks: Callable[[str, str], list[pytest.MarkDecorator]]) -> list[Any]:
    """Parameters of ``bench``."""
    return [
        pytest.param((model, tier), id=f"{model} on {tier}", marks=marks(model, tier))
        for model in MODELS
        for tier in TIERS
        if model in {"native": MODELS, "vulkan": ON_VULKAN}.get(tier, ON_EVERY_TIER)
    ]


def fewer_marks(model: str, tier: str) -> list[pytest.MarkDecorator]:
    """Drawn schedules have all of them in every run, fixed ones a model of each kind of layer."""
    marks = marks_of(model, tier)
    return marks if marks or model in ON_EVERY_TIER or tier != "native" else [pytest.mark.long]


RUNS, FEWER_RUNS = runs(marks_of), runs(fewer_marks)


@pytest.fixture(params=RUNS, scope="module")
def bench(request, synthetic_model) -> Iterator[Bench]:
    model, tier = request.param
    quant, kv_dtype = MODELS[model]
    path = synthetic_model(quant=quant, **FAMILIES[model])
    with bench_on(tier, path, kv_dtype=kv_dtype) as bench:
        yield bench


def test_no_schedule_changes_a_bit(bench):
    pool = pool_of(bench)
    assert_schedule_invariant(bench, pool, Schedule(chunk_tokens=5, steps_ahead=1))
    assert len(bench.runner.batch_sizes) >= 4, "the batch size hardly varied"
    prove_schedules(bench, FEW, pool)


@pytest.mark.parametrize("bench", FEWER_RUNS, indirect=True)
def test_prefill_logits_are_decode_logits(bench):
    prove_prefill(bench, FEW, pool_of(bench))
    # 42 tokens: far beyond a window, and three pages.
    assert_prefill_equals_decode(bench, POOL[5], 1)


@pytest.mark.parametrize("bench", FEWER_RUNS, indirect=True)
def test_everyone_at_once(bench):
    """The whole pool: slots are used again and their states start anew. How far ahead steps are
    submitted matters where they are computed later."""
    for steps_ahead in (0, 1, 3) if bench.late else (3,):
        assert_schedule_invariant(bench, pool_of(bench), Schedule(64, steps_ahead))
    assert max(bench.runner.sequence_counts) == bench.runner.limits.slots


@pytest.mark.parametrize("tier", TIERS)
def test_a_model_that_attends_nowhere(tier, synthetic_model):
    """Every layer a delta net: a step has no page table."""
    recurrent = {**DELTA_NET, "interval": HYBRID["layers"] + 1}
    path = synthetic_model(quant="q8_0", **FAMILIES["qwen35"] | {"recurrent": recurrent})
    with bench_on(tier, path) as bench:
        opcodes = bench.runner.graph.opcodes
        assert Opcode.SSM_DELTA_NET in opcodes
        assert not opcodes & {Opcode.FLASH_ATTN, Opcode.FLASH_ATTN_BATCHED}
        for host_pages in (6,) if bench.emulated else (0, 6):
            schedule = Schedule(chunk_tokens=5, steps_ahead=1, host_pages=host_pages)
            assert_schedule_invariant(bench, pool_of(bench), schedule)
        assert_prefill_equals_decode(bench, POOL[0], 1)


def test_every_architecture_is_here():
    """Of those that are not dense."""
    found = {FAMILIES[name]["architecture"] for name in MODELS if name not in VARIANTS}
    assert found >= {fields["architecture"] for fields in FAMILIES.values()} - {"qwen2", "qwen3"}


BROKEN: dict[str, tuple[str, Callable[[], Any]]] = {
    "experts added in another order": ("qwen3moe", family_controls.reversed_experts_tier),
    "state of the slot's last sequence": ("qwen35", family_controls.stale_state_tier),
    "convolution starts anew with every chunk": ("qwen3next", family_controls.forgetful_tier),
    "summation order by batch": ("gemma4-shared-kv", controls.split_k_tier),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_control_schedules(fault, synthetic_model):
    """Negative control: the proof fails on an engine with this fault."""
    name, tier = BROKEN[fault]
    path = synthetic_model(quant="f32", **FAMILIES[name])
    with Bench(path, tier=tier()) as bench, pytest.raises(AssertionError, match="request"):
        prove_schedules(bench, CONTROL, POOL)
