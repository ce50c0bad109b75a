"""The same load at many widths, on many threads and by definition: always the same bits."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from contract.dtypes import F16
from contract.tier import Tier
from contract.types import Request, SamplingParams
from reference.cpu.tier import CpuTier
from tests.invariance import controls
from tests.invariance.engines import Bench, Schedule, Trace, request_pool
from tests.named_tiers import quick_tier

SyntheticModel = Callable[..., Path]

VOCAB = 300
WIDTHS = (1, 8, 16, 44)
CLIENTS = 44
AT_ONCE = 256
"""Prefill tokens of a step that let every slot start together; ``TRICKLE`` staggers them."""
TRICKLE = 24
RUNS = [
    *(("quick", quant) for quant in ("q4_k_m", "f32")),
    *(pytest.param("cpu", quant, marks=pytest.mark.soak) for quant in ("q4_k_m", "f32")),
]
"""Rows of integers and of numbers."""


def crowd(vocab: int) -> list[Request]:
    """44 short requests, every other one sampled."""
    random = np.random.Generator(np.random.Philox(key=CLIENTS))
    return [
        Request(
            id=number,
            prompt=tuple(int(token) for token in random.integers(0, vocab, 2 + number % 7)),
            max_tokens=3,
            sampling=SamplingParams(temperature=float(number % 2), seed=number),
        )
        for number in range(1, CLIENTS + 1)
    ]


def crowd_bench(path: Path, slots: int, tier: Tier | None = None) -> Bench:
    """A bench where ``slots`` of the crowd run at a time."""
    return Bench(
        path, tier=tier, kv_dtype=F16, slots=slots, context=32, pages=2 * slots,
        step_tokens=slots + AT_ONCE,
    )  # fmt: skip


def same(traces: dict[int, Trace], expected: dict[int, Trace], what: str) -> None:
    """Every request has the same tokens and the same logits at every position."""
    assert traces.keys() == expected.keys()
    for id_, trace in traces.items():
        assert trace.tokens == expected[id_].tokens, f"{what}: tokens of request {id_}"
        assert trace.digests == expected[id_].digests, f"{what}: logits of request {id_}"


def prove_width_invariance(path: Path, widths: tuple[int, ...], tier: Callable[[], Tier]) -> None:
    """Proof: the crowd's bits depend neither on how many run at once nor on repetition."""
    with crowd_bench(path, widths[0], tier()) as bench:
        expected = bench.execute(crowd(VOCAB), Schedule(AT_ONCE))
        assert bench.runner.sequence_counts == {widths[0]}
    for width in widths[1:]:
        with crowd_bench(path, width, tier()) as bench:
            again = (AT_ONCE,) if width == widths[-1] else ()
            for chunk_tokens in (AT_ONCE, TRICKLE, *again):
                traces = bench.execute(crowd(VOCAB), Schedule(chunk_tokens))
                same(traces, expected, f"{width} at a time, {chunk_tokens} tokens a step")
            assert max(bench.runner.sequence_counts) == width


@pytest.mark.parametrize(("tier", "quant"), RUNS)
def test_crowd_at_every_width(synthetic_model, tier, quant):
    path = synthetic_model(architecture="qwen3", quant=quant, vocab=VOCAB)
    prove_width_invariance(path, WIDTHS, {"quick": quick_tier, "cpu": CpuTier}[tier])


def test_control_kernel_that_falls_back_above_eight_rows(synthetic_model):
    """Negative control: another kernel for larger batches is noticed, at 16 and not at 8."""
    path = synthetic_model(architecture="qwen3", quant="f32", vocab=VOCAB)
    with pytest.raises(AssertionError, match="logits of request"):
        prove_width_invariance(path, (1, 16), controls.fallback_tier)


IMPLEMENTATIONS = {
    "one thread": lambda: CpuTier(threads=1),
    "two threads": lambda: CpuTier(threads=2),
    "five threads": lambda: CpuTier(threads=5),
    "definitions": lambda: CpuTier(definitions_only=True),
}


@pytest.fixture(scope="module", params=("llama q4_k_m", "qwen3 bf16"))
def reference_run(
    request, synthetic_model
) -> Iterator[tuple[Path, list[Request], dict[int, Trace]]]:
    architecture, quant = request.param.split()
    path = synthetic_model(
        architecture=architecture, quant=quant, vocab=VOCAB, feed_forward=(512, 1280)
    )
    requests = list(request_pool(VOCAB, count=6, longest=72))
    with Bench(path) as bench:
        yield path, requests, bench.execute(requests, Schedule(chunk_tokens=40))


def prove_implementation(
    run: tuple[Path, list[Request], dict[int, Trace]], make_tier: Callable[[], CpuTier]
) -> None:
    """Proof: this tier gives the bits of the default one under the same schedule."""
    path, requests, expected = run
    with Bench(path, tier=make_tier()) as bench:
        same(bench.execute(requests, Schedule(chunk_tokens=40)), expected, "implementation")
        assert len(bench.runner.batch_sizes) > 3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_threads_and_definitions_agree(reference_run, implementation):
    prove_implementation(reference_run, IMPLEMENTATIONS[implementation])


def test_control_of_implementations(reference_run):
    """Negative control: a tier that sums products in another order is noticed."""
    with pytest.raises(AssertionError, match="implementation"):
        prove_implementation(reference_run, controls.split_k_tier)
