"""Requests served together by a whole model on a tier, and whether two tiers gave the same bits."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from contract.dtypes import F32, DType
from contract.tier import Tier
from contract.types import Request, SamplingParams
from reference.cpu.tier import CpuTier
from reference.engine import Engine, EngineOptions
from reference.limits import Limits
from reference.model.open import Model
from reference.runner import ModelRunner

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

FEW = (
    Request(1, tuple(range(80, 91)), 3, ignore_end=True),
    Request(2, (7,), 4, SamplingParams(temperature=1.3, top_p=0.8, seed=2**40), ignore_end=True),
)
"""For simulated devices, which take longest for each token."""

Outcome = tuple[dict[int, list[int]], dict[int, list[NDArray[np.float32]]]]


def generate(
    model: Model, tier: Tier, requests: tuple[Request, ...], kv_dtype: DType = F32
) -> Outcome:
    """Tokens and all logits of each request, served together in small chunks."""
    combined = model.adapters.combined
    limits = Limits(3, CONTEXT, 24, kv_dtype, step_tokens=32, step_rows=32, adapters=combined)
    tokens: dict[int, list[int]] = {request.id: [] for request in requests}
    logits: dict[int, list[NDArray[np.float32]]] = {request.id: [] for request in requests}
    with ModelRunner(model, tier, limits) as runner:
        engine = Engine(runner, EngineOptions(end_of_generation=frozenset(), chunk_tokens=20))
        for request in requests:
            sink = logits[request.id]
            engine.submit(request, on_logits=lambda *rows, sink=sink: sink.append(rows[-1].copy()))
        for event in engine.run():
            tokens[event.request_id].append(event.token)
    return tokens, logits


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
