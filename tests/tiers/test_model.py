"""A whole model on every tier: every logit and token equals the CPU tier's."""

import pytest

from contract.tier import Tier
from reference.cpu.tier import CpuTier
from reference.engine import Engine, EngineOptions
from reference.limits import Limits
from reference.model.open import Model, open_model
from reference.runner import ModelRunner
from tests.few_rows import assert_definitions
from tests.long_cases import long_except
from tests.model_runs import CONTEXT, REQUESTS, compare
from tests.tiers.conftest import each
from tests.tiers.ways import MODELS, OTHERS, Way


def models(*slow: str) -> pytest.MarkDecorator:
    """On every way with kernels of each op and on OTHERS; on ``slow`` ones by ``--all`` only."""
    short = each(*(name for name in (*MODELS, *OTHERS) if name not in slow))
    ways = [*short, *long_except(slow)]
    return pytest.mark.parametrize("way", ways, indirect=True, scope="module")


@models("amd-userq", "vulkan-integers", "vulkan-own-memory", "opencl-one-worker")
def test_logits_and_tokens_are_the_cpu_tiers(tier, way, tiny_model_path):
    """Mixed prefill and decode, greedy and sampled. What is left to ``--all`` has the kernels of
    another way, or ops that parity compares; the user queues of AMD have the steps below."""
    compare(open_model(tiny_model_path), tier, requests=way.requests)


@pytest.mark.soak
@pytest.mark.parametrize(
    "way", each("metal-simulated", "amd-kfd", "amd-userq"), indirect=True, scope="module"
)
def test_long_requests_on_simulated_devices(tier, tiny_model_path):
    """More than a chunk, a window and a page."""
    compare(open_model(tiny_model_path), tier, requests=REQUESTS)


@models("amd-kfd", *OTHERS)
def test_steps_fed_on_the_device_sample_the_same_tokens(tier, way, tiny_model_path):
    """Decode without the host between the steps, on device memory of either kind. Of amdkfd see
    ``tests/amd/test_tier.py``, which counts its calls as well."""
    model = open_model(tiny_model_path)
    expected = tokens_of(model, CpuTier(), way, steps_ahead=0)
    for ahead in (1, 3):
        assert tokens_of(model, tier, way, ahead) == expected


def tokens_of(model: Model, tier: Tier, way: Way, steps_ahead: int) -> dict[int, list[int]]:
    """Tokens of each request, all of them served together."""
    limits = Limits(len(way.requests), CONTEXT, 24, step_tokens=64, step_rows=32)
    found: dict[int, list[int]] = {request.id: [] for request in way.requests}
    with ModelRunner(model, tier, limits) as runner:
        engine = Engine(runner, EngineOptions(steps_ahead=steps_ahead))
        for request in way.requests:
            engine.submit(request)
        for event in engine.run():
            found[event.request_id].append(event.token)
    return found


@pytest.mark.parametrize("way", each("metal-simulated", "amd-kfd"), indirect=True, scope="module")
def test_steps_of_few_rows_are_the_definitions(tier, tiny_model_path):
    """Rows are picked in the last layer: some, none, and those of the middle of a chunk. Tests of
    OpenCL and Vulkan do so with every architecture."""
    assert_definitions(open_model(tiny_model_path), tier)
