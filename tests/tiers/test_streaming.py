"""Weights streamed from host memory: the bits of weights on the device, at every share of them."""

import gc
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import pytest
from numpy.typing import NDArray

from accel.opencl import binding
from accel.opencl.memory import BankedMemory
from accel.packets import weight_ring
from accel.packets.step import Step, Tensor
from accel.packets.weight_ring import WeightRing
from accel.vulkan.tier import VulkanTier
from contract.dtypes import F16
from contract.errors import OutOfMemory
from contract.tier import StreamsWeights, Tier
from contract.types import Request, SamplingParams
from reference.cpu.tier import CpuTier
from reference.engine import Engine, EngineOptions
from reference.limits import Limits
from reference.memory.planner import plan_memory
from reference.model.open import Model, open_model
from reference.runner import ModelRunner
from tests.conftest import SyntheticModel
from tests.families_table import FAMILIES
from tests.model_runs import FEW, Outcome, assert_same
from tests.tiers.conftest import each
from tests.tiers.ways import used_bytes

MODELS: Mapping[str, tuple[str, str]] = {
    "dense": ("qwen3", "q4_k_m"),
    "floats": ("llama", "f16"),
    "hybrid": ("qwen35", "q8_0"),
    "mixture": ("qwen35moe", "q4_k_m"),
}
RUNS = [
    *(("opencl-banked", model, share) for model in MODELS for share in ("all", "half", "one")),
    *(("vulkan-own-memory", model, "all") for model in ("dense", "hybrid", "mixture")),
]
LIMITS = Limits(3, 96, 6, F16, step_tokens=32, step_rows=32)
"""Six pages are fewer than the requests need together, so that one is preempted."""
REQUESTS = (
    Request(1, tuple(range(5, 35)), 40, ignore_end=True),
    Request(2, tuple(range(80, 94)), 24, SamplingParams(temperature=0.9, top_k=40, seed=5)),
    Request(3, (7,), 24, SamplingParams(temperature=1.3, top_p=0.8, seed=2**40)),
    Request(4, tuple(range(30, 60)), 8, SamplingParams(repeat_penalty=1.3, presence_penalty=0.2)),
)
mainly = pytest.mark.parametrize("way", each("opencl-banked"), indirect=True, scope="module")


def model_of(synthetic_model: SyntheticModel, name: str) -> Model:
    family, quant = MODELS[name]
    return open_model(synthetic_model(**{**FAMILIES[family], "quant": quant, "layers": 4}))


def run(model: Model, tier: Tier, requests: tuple[Request, ...]) -> tuple[Outcome, int]:
    """Tokens and logits of requests served together in chunks, besides one that is cancelled, and
    how many were preempted."""
    tokens: dict[int, list[int]] = {request.id: [] for request in requests}
    logits: dict[int, list[NDArray[np.float32]]] = {request.id: [] for request in requests}
    with ModelRunner(model, tier, LIMITS) as runner:
        options = EngineOptions(end_of_generation=frozenset(), chunk_tokens=20)
        engine = Engine(runner, options)
        for request in requests:
            sink = logits[request.id]
            engine.submit(request, on_logits=lambda _, rows, sink=sink: sink.extend(rows.copy()))
        cancelled = Request(9, tuple(range(100, 140)), 30)
        engine.submit(cancelled)
        tokens[cancelled.id] = []
        for _ in range(3):
            for event in engine.step():
                tokens[event.request_id].append(event.token)
        engine.cancel(cancelled.id)
        for event in engine.run():
            tokens[event.request_id].append(event.token)
        return (tokens, logits), engine.statistics.preempted


def chosen(model: Model, tier: Tier, share: str) -> list[str]:
    """The weights to stream: all that can be, every second one, the last one, or none."""
    assert isinstance(tier, StreamsWeights)
    names = list(tier.streamable(model.graph(LIMITS), LIMITS.largest))
    return {"all": names, "half": names[::2], "one": names[-1:], "none": []}[share]


ORACLES: dict[tuple[str, bool], Outcome] = {}
"""What the CPU tier gave."""


def expected_of(model: Model, name: str, requests: tuple[Request, ...]) -> Outcome:
    key = name, requests is FEW
    if key not in ORACLES:
        with CpuTier() as cpu:
            ORACLES[key], preempted = run(model, cpu, requests)
        assert preempted or requests is FEW
    return ORACLES[key]


@contextmanager
def streamed(tier: Tier, model: Model, names: Collection[str]) -> Iterator[None]:
    """The tier streams ``names`` meanwhile."""
    assert isinstance(tier, StreamsWeights)
    graph = model.graph(LIMITS)
    tier.stream(graph, names)
    try:
        yield
    finally:
        tier.stream(graph, ())


@pytest.mark.parametrize(
    ("way", "name", "share"),
    [pytest.param(*case, id="-".join(case)) for case in RUNS],
    indirect=["way"],
    scope="module",
)
def test_streamed_weights_give_the_bits_of_resident_ones(tier, synthetic_model, name, share):
    """Prompts in chunks, several sequences, one of them preempted, greedy and sampled."""
    model = model_of(synthetic_model, name)
    requests = FEW if isinstance(tier, VulkanTier) else REQUESTS
    names = chosen(model, tier, share)
    with streamed(tier, model, names):
        found, _ = run(model, tier, requests)
    assert_same(expected_of(model, name, requests), found)


@mainly
def test_a_step_takes_no_more_calls(tier, synthetic_model, monkeypatch):
    """The copies are part of the recorded step: as many kernels are enqueued as without them."""
    model = model_of(synthetic_model, "dense")
    enqueue = binding.enqueue_nd_range_kernel
    calls: list[int] = []

    def counted(*arguments: Any) -> Any:
        calls[-1] += 1
        return enqueue(*arguments)

    monkeypatch.setattr(binding, "enqueue_nd_range_kernel", counted)
    for share in ("none", "all"):
        calls.append(0)
        with streamed(tier, model, chosen(model, tier, share)):
            run(model, tier, REQUESTS)
    assert calls[0] == calls[1] > 20


def _late(step: Step, ring: WeightRing, names: Collection[str]) -> Iterator[tuple[str, int]]:
    """Copies after the first product that needs them."""
    for name, (first, _) in weight_ring._reads(step, names).items():
        yield name, first


def _at_once(step: Step, ring: WeightRing, names: Collection[str]) -> Iterator[tuple[str, int]]:
    """Copies of all layers before any computes, so that later ones overwrite earlier ones."""
    for name in weight_ring._reads(step, names):
        yield name, -1


@pytest.mark.parametrize("planted", [_late, _at_once])
@mainly
def test_a_copy_at_the_wrong_time_is_caught(tier, synthetic_model, monkeypatch, planted):
    """Negative control."""
    model = model_of(synthetic_model, "dense")
    monkeypatch.setattr(weight_ring, "_copy_positions", planted)
    with streamed(tier, model, chosen(model, tier, "all")):
        found, _ = run(model, tier, REQUESTS)
    with pytest.raises(AssertionError):
        assert_same(expected_of(model, "dense", REQUESTS), found)


@mainly
def test_a_copy_to_the_wrong_bytes_is_caught(tier, synthetic_model, monkeypatch):
    """Negative control: the bytes of one weight are copied to where another of its size is."""
    model = model_of(synthetic_model, "dense")
    tensor = WeightRing.tensor

    def swapped(ring: WeightRing, name: str) -> Tensor:
        other = {"ffn_gate": "ffn_up", "ffn_up": "ffn_gate"}
        return tensor(ring, re.sub("ffn_gate|ffn_up", lambda found: other[found[0]], name))

    monkeypatch.setattr(WeightRing, "tensor", swapped)
    with streamed(tier, model, chosen(model, tier, "all")):
        found, _ = run(model, tier, REQUESTS)
    with pytest.raises(AssertionError):
        assert_same(expected_of(model, "dense", REQUESTS), found)


@pytest.mark.parametrize(
    ("way", "share"),
    [("opencl-banked", "all"), ("opencl-banked", "half")],
    indirect=["way"],
    scope="module",
)
def test_the_plan_is_what_a_tier_allocates(open_way, synthetic_model, share):
    """The estimate that weights are chosen by is close to the plan, and that to the memory."""
    model = model_of(synthetic_model, "dense")
    graph = model.graph(LIMITS)
    with open_way() as tier:
        assert isinstance(tier, StreamsWeights)
        before = tier.allocated_bytes
        names = chosen(model, tier, share)
        resident = tier.footprint(graph, LIMITS.largest)
        estimate = tier.streaming_footprint(graph, LIMITS.largest, names)
        tier.stream(graph, names)
        exact = tier.footprint(graph, LIMITS.largest)
        plans = [
            plan_memory(graph, LIMITS, found, unified=False)
            for found in (resident, estimate, exact)
        ]
        with ModelRunner(model, tier, LIMITS) as runner:
            runner.prepare()
            taken = tier.allocated_bytes - before
    assert estimate.buffers == exact.buffers
    assert 0 <= plans[1].device - plans[2].device < plans[2].device / 12
    assert abs(taken - plans[2].allocated) <= plans[2].allocated / 100
    assert plans[2].device < plans[0].device
    assert plans[2].streamed > 0 == plans[0].streamed


@mainly
def test_host_memory_that_is_refused_is_named(tier, synthetic_model, monkeypatch):
    """Nothing stays allocated, and the tier runs the model afterwards."""
    model = model_of(synthetic_model, "dense")

    def refuse(self: object, what: str, nbytes: int) -> NoReturn:
        raise OutOfMemory(what, nbytes, 0, 0)

    used = []
    for refused in (True, False, True, False):
        with streamed(tier, model, chosen(model, tier, "all")), monkeypatch.context() as patch:
            if refused:
                patch.setattr(BankedMemory, "allocate_on_host", refuse)
                with pytest.raises(OutOfMemory, match=r"weight\[0\] in host memory"):
                    run(model, tier, REQUESTS)
            else:
                found, _ = run(model, tier, REQUESTS)
        gc.collect()
        used.append(used_bytes(tier))
    assert used[0] <= used[1] == used[2] == used[3]
    assert_same(expected_of(model, "dense", REQUESTS), found)
