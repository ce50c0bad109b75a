"""The invariances on real weights: a bounded run of the default model."""

from collections.abc import Iterator

import pytest

from contract.types import Request, SamplingParams
from tests.invariance import controls
from tests.invariance.engines import (
    TIERS,
    Bench,
    Schedule,
    assert_prefill_equals_decode,
    assert_schedule_invariant,
    bench_on,
)

TEXTS = {
    "The capital of France is Paris, and": SamplingParams(),
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n": SamplingParams(
        temperature=0.8, top_p=0.95, seed=42
    ),
    "Water boils at": SamplingParams(repeat_penalty=1.2),
}


ON_REAL_WEIGHTS = [tier for tier in TIERS if tier not in ("cpu", "late", "vulkan")]
"""The CPU tier, steps computed late, which are the CPU's, and a processor that plays a graphics
card have synthetic models."""


@pytest.fixture(scope="module", params=ON_REAL_WEIGHTS)
def bench(request, default_model_path) -> Iterator[Bench]:
    sizes = {"context": 64, "pages": 10, "step_tokens": 28}
    with bench_on(request.param, default_model_path, **sizes) as bench:
        yield bench


@pytest.fixture(scope="module")
def requests_(bench) -> list[Request]:
    encode = bench.model.tokenizer.encode
    return [
        Request(number, tuple(encode(text, parse_special=True)), 4, sampling)
        for number, (text, sampling) in enumerate(TEXTS.items(), 1)
    ]


SCHEDULES = {
    "together, small chunks": Schedule(chunk_tokens=5, steps_ahead=1),
    "joining, leaving, permuted slots and pages": Schedule(
        chunk_tokens=9, steps_ahead=3, slot_order=(2, 0, 3, 1),
        page_order=(7, 2, 9, 0, 4, 1, 8, 3, 6, 5), joins={1: 2, 2: 0, 3: 3}, cancels={2: 6},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_changes_a_bit(bench, requests_, name):
    assert_schedule_invariant(bench, requests_, SCHEDULES[name])
    assert max(bench.runner.sequence_counts) > 1
    assert len(bench.runner.batch_sizes) > 2


def test_prefill_logits_are_decode_logits(bench, requests_):
    assert_prefill_equals_decode(bench, requests_[0], 24)


def test_control_leaked_page(default_model_path, requests_):
    """Negative control: on real weights too a shared page changes logits."""
    with (
        Bench(
            default_model_path, context=64, pages=10, step_tokens=28, wrap=controls.LeakedPage
        ) as bench,
        pytest.raises(AssertionError, match="request"),
    ):
        assert_schedule_invariant(bench, requests_[::2], Schedule())
