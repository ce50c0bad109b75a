"""Whole models: every logit and token of the OpenCL tier equals the CPU tier's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from accel.opencl.runtime import Choices
from accel.opencl.tier import OpenClTier
from contract.dtypes import F16, F32, Q8_0, DType
from contract.tier import Tier
from contract.types import Request, SamplingParams
from reference.cpu.tier import CpuTier
from reference.engine import Engine
from reference.limits import Limits
from reference.model.open import Model, open_model
from reference.runner import ModelRunner
from tests.opencl.conftest import EACH_WAY, WAYS, OpenTier

CONTEXT = 96
REQUESTS = (
    Request(1, tuple(range(5, 52)), 12, ignore_end=True),
    Request(2, tuple(range(80, 91)), 9, SamplingParams(temperature=0.9, top_k=40, seed=5)),
    Request(3, (7,), 20, SamplingParams(temperature=1.3, top_p=0.8, min_p=0.01, seed=2**40)),
    Request(4, tuple(range(30, 60)), 8, SamplingParams(repeat_penalty=1.3, presence_penalty=0.2)),
)
SHORT = tuple(
    replace(request, prompt=request.prompt[len(request.prompt) // 2 :], max_tokens=3 + request.id)
    for request in REQUESTS
)
"""Of 24, 6, 1 and 15 tokens: more than a chunk, a window and a page. Few steps follow: a processor
that plays a graphics card takes long for each token."""

Outcome = tuple[dict[int, list[int]], dict[int, list[NDArray[np.float32]]]]


def generate(
    model: Model, tier: Tier, requests: tuple[Request, ...], kv_dtype: DType = F32
) -> Outcome:
    """Tokens and all logits of each request, served together in small chunks."""
    limits = Limits(3, CONTEXT, 24, kv_dtype, step_tokens=32, step_rows=32)
    tokens: dict[int, list[int]] = {request.id: [] for request in requests}
    logits: dict[int, list[NDArray[np.float32]]] = {request.id: [] for request in requests}
    with ModelRunner(model, tier, limits) as runner:
        engine = Engine(runner, end_of_generation=frozenset(), chunk_tokens=20)
        for request in requests:
            sink = logits[request.id]
            engine.submit(request, on_logits=lambda *rows, sink=sink: sink.append(rows[-1].copy()))
        for event in engine.run():
            tokens[event.request_id].append(event.token)
    return tokens, logits


@pytest.mark.parametrize("way", EACH_WAY)
def test_steps_fed_on_the_device_sample_the_same_tokens(
    open_opencl: OpenTier, tiny_model_path: Path, way: str
) -> None:
    """Decode without the host between the steps, on device memory of either kind."""
    model = open_model(tiny_model_path)
    limits = Limits(len(REQUESTS), CONTEXT, 24, step_tokens=64, step_rows=32)
    outcomes = []
    for tier, ahead in ((CpuTier(), 0), (open_way(open_opencl, WAYS[way]), 3)):
        with ModelRunner(model, tier, limits) as runner:
            engine = Engine(runner, steps_ahead=ahead)
            for request in REQUESTS:
                engine.submit(request)
            tokens: dict[int, list[int]] = {request.id: [] for request in REQUESTS}
            for event in engine.run():
                tokens[event.request_id].append(event.token)
            outcomes.append(tokens)
    assert outcomes[0] == outcomes[1]


def assert_same(expected: Outcome, got: Outcome) -> None:
    """Tokens and every bit of every logit."""
    assert got[0] == expected[0]
    for request, chunks in expected[1].items():
        assert len(chunks) == len(got[1][request])
        for one, other in zip(chunks, got[1][request], strict=True):
            assert np.array_equal(one, other)


def compare(
    model: Model, tier: Tier, kv_dtype: DType = F32, requests: tuple[Request, ...] = REQUESTS
) -> None:
    """All requests on ``tier`` against the CPU tier."""
    with CpuTier() as cpu:
        expected = generate(model, cpu, requests, kv_dtype)
    assert all(len(tokens) > 1 for tokens in expected[0].values())
    assert_same(expected, generate(model, tier, requests, kv_dtype))


def open_way(open_opencl: OpenTier, choices: Choices) -> OpenClTier:
    """A tier opened with exactly ``choices``, but for the cache."""
    names = ("mode", "threads", "shared_addresses", "native_arithmetic")
    return open_opencl(**{name: getattr(choices, name) for name in names})


@pytest.mark.parametrize("way", EACH_WAY)
def test_every_way_of_running_gives_the_cpu_tiers_bits(
    open_opencl: OpenTier, tiny_model_path: Path, way: str
) -> None:
    """Mixed prefill and decode, greedy and sampled: persistent == launches == numpy."""
    compare(open_model(tiny_model_path), open_way(open_opencl, WAYS[way]))


@pytest.mark.parametrize(
    ("architecture", "quant", "kv_dtype"),
    [
        ("llama", "q4_0", F16),
        ("llama", "q8_0", F32),
        ("qwen2", "q5_k", F16),
        ("qwen3", "q6_k", F16),
        ("llama", "f16", F32),
        ("qwen2", "bf16", F16),
        ("llama", "f32", F32),
        ("qwen3", "q4_k_m", Q8_0),
        ("llama", "q5_0", Q8_0),
    ],
    ids=str,
)
def test_every_family_and_storage(
    tier: OpenClTier,
    synthetic_model: Callable[..., Path],
    architecture: str,
    quant: str,
    kv_dtype: DType,
) -> None:
    """Biases, head norms, tied embeddings, float and quantized weights, both page types."""
    path = synthetic_model(architecture=architecture, quant=quant)
    compare(open_model(path), tier, kv_dtype)


def test_default_model_writes_the_cpu_tiers_tokens(tier: OpenClTier, default_model: Model) -> None:
    """Twenty greedy tokens of the default model, with all their logits."""
    prompt = tuple(default_model.tokenizer.encode("The sky is blue because"))
    request = (Request(1, prompt, 20),)
    with CpuTier() as cpu:
        expected = generate(default_model, cpu, request)
    assert_same(expected, generate(default_model, tier, request))
