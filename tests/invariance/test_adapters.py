"""A row's bits depend on its own adapters alone: not on those of others in its step, on chunks, on
preemption, or on what others left in the prefix cache."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.types import Request, SamplingParams
from reference.model.adapters import Adapters
from reference.runner import ModelRunner, StepInput, Submission
from tests.adapters import write_adapter
from tests.invariance.engines import Bench, Schedule, assert_schedule_invariant, bench_on

PROMPT = tuple(range(3, 40))
CHOICES = ((), ((0, 1.0),), ((1, 0.5),), ((0, -0.5), (1, 1.0)), ((0, 0.75),))
REQUESTS = tuple(
    Request(n, PROMPT, 4, SamplingParams(temperature=0.9, seed=n), adapters=adapters)
    for n, adapters in enumerate(CHOICES, 1)
)
"""One prompt with no adapter, with each, with both and with another scale."""
SCHEDULES = {
    "together": Schedule(chunk_tokens=64),
    "small chunks that join late": Schedule(chunk_tokens=7, joins={2: 3, 3: 1, 5: 4}),
    "preempted": Schedule(
        chunk_tokens=20, batch=frozenset({2, 3}), joins={1: 2, 4: 2, 5: 2}, withheld=14
    ),
}
TWICE = (*REQUESTS, *(replace(request, id=request.id + 10) for request in REQUESTS))
"""Every request again, which finds the pages of its own adapters."""
AGAIN = Schedule(
    joins={request.id: 10 * n for n, request in enumerate(TWICE)},
    unscored=frozenset(request.id for request in TWICE),
)


@pytest.fixture(scope="module")
def files(synthetic_model, tmp_path_factory) -> tuple[Path, tuple[Path, ...]]:
    """A model, and two adapters of different ranks."""
    path = synthetic_model(architecture="qwen3", quant="q4_k_m")
    folder = tmp_path_factory.mktemp("adapters")
    first = write_adapter(folder / "a.gguf", path, rank=3)
    return path, (first, write_adapter(folder / "b.gguf", path, rank=12, seed=2))


@pytest.fixture(scope="module", params=["cpu", "native", "opencl", "cuda"])
def bench(request, files) -> Iterator[Bench]:
    path, adapters = files
    with bench_on(request.param, path, adapters=adapters) as bench:
        yield bench


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_schedule_changes_no_bit(bench, schedule):
    before = bench.preempted
    assert_schedule_invariant(bench, REQUESTS, schedule)
    assert (bench.preempted > before) == (schedule is SCHEDULES["preempted"])
    digests = [bench.alone(request).digests[len(PROMPT) - 1] for request in REQUESTS]
    assert len(set(digests)) == len(REQUESTS)


def test_only_equal_adapters_share_pages(bench):
    """Every second run finds the whole pages of its prompt, and no first one finds any."""
    before = bench.reused
    assert_schedule_invariant(bench, TWICE, AGAIN)
    assert bench.reused - before == len(REQUESTS) * (len(PROMPT) // 16 * 16)


def test_a_request_without_is_the_models(bench, files):
    """Alone and beside adapters it gives what the model gives without any."""
    with Bench(files[0]) as plain:
        expected = plain.alone(REQUESTS[0])
    assert bench.execute(REQUESTS, Schedule())[1].digests == expected.digests
    assert bench.alone(REQUESTS[0]).tokens == expected.tokens


class OthersAdapters:
    """A runner that gives each token the adapters of the token before it."""

    def __init__(self, inner: ModelRunner) -> None:
        self.inner = inner

    def submit(self, inputs: StepInput) -> Submission:
        if inputs.adapters is not None:
            inputs = replace(inputs, adapters=np.roll(inputs.adapters, 1, axis=0))
        return self.inner.submit(inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_anothers_adapter_is_found(files):
    """The proof fails where a token gets another token's adapter."""
    path, adapters = files
    with (
        Bench(path, adapters=adapters) as alone,
        Bench(path, adapters=adapters, wrap=OthersAdapters, oracle=alone) as broken,
        pytest.raises(AssertionError, match="position"),
    ):
        assert_schedule_invariant(broken, REQUESTS, SCHEDULES["together"])


def test_anothers_pages_are_found(files, monkeypatch):
    """The proof fails where adapters are no part of the prefix cache's key."""
    path, adapters = files
    monkeypatch.setattr(Adapters, "identity", lambda self, scales: ())
    with Bench(path, adapters=adapters) as broken, pytest.raises(AssertionError, match="position"):
        assert_schedule_invariant(broken, TWICE, AGAIN)
