"""Whole models of launches of the kernels that GPU tiers share: the tokens and logits of the CPU
tier."""

import pytest

from contract.dtypes import I12
from contract.types import Request
from reference.cpu.tier import CpuTier
from reference.limits import Limits
from reference.model.open import open_model
from tests.few_rows import assert_definitions
from tests.kernels.processor import cpu_device
from tests.model_runs import SHORT, assert_same, generate
from tests.opencl.work_groups import work_group_tier

GREEDY = tuple(Request(one.id, one.prompt, 3, ignore_end=True) for one in SHORT[:2])


@pytest.mark.parametrize(
    ("shared", "requests"),
    [
        pytest.param(True, GREEDY, id="shared", marks=pytest.mark.long),
        pytest.param(False, GREEDY, id="banked", marks=pytest.mark.long),
        pytest.param(True, SHORT, id="shared-sampled", marks=pytest.mark.soak),
        pytest.param(False, SHORT, id="banked-sampled", marks=pytest.mark.soak),
    ],
)
def test_a_model_gives_the_same_bits(synthetic_model, kernel_cache, shared, requests):
    """Prompts in chunks, decode, sampling of every sort, in a format that has few kernels."""
    model = open_model(synthetic_model(quant="q8_0"))
    expected = generate(model, CpuTier(), requests, I12)
    with work_group_tier(cpu_device(), kernel_cache, shared_addresses=shared) as tier:
        assert_same(expected, generate(model, tier, requests, I12))


@pytest.mark.soak
def test_streamed_weights_give_the_same_bits(synthetic_model, kernel_cache):
    """All that can be streamed, by launches of work-groups in a queue."""
    model = open_model(synthetic_model(quant="q8_0", layers=4))
    expected = generate(model, CpuTier(), GREEDY, I12)
    limits = Limits(1, 96, 6)
    graph = model.graph(limits)
    with work_group_tier(cpu_device(), kernel_cache, shared_addresses=False) as tier:
        names = tier.streamable(graph, limits.largest)
        assert len(names) > 4
        tier.stream(graph, list(names))
        assert_same(expected, generate(model, tier, GREEDY, I12))


@pytest.mark.long
def test_steps_of_few_rows_are_the_definitions(synthetic_model, kernel_cache):
    """Rows are picked in the last layer: some, none, and those of the middle of a chunk."""
    model = open_model(synthetic_model(quant="q8_0"))
    with work_group_tier(cpu_device(), kernel_cache) as tier:
        assert_definitions(model, tier, I12)
