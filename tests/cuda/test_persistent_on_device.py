"""The persistent step kernel on a device: whole models of every family against the CPU tier, and
kernels that are told to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from accel.cuda.driver import open_driver
from accel.cuda.persistent import StepTable
from accel.cuda.runtime import Choices
from accel.cuda.step_table import PeerWorkspaces
from accel.cuda.tier import CudaTier
from accel.packets import tier as tier_module
from contract.dtypes import I3R, I4R, I12, ROTATED_KV, DType
from contract.errors import DeviceLost
from contract.records import QUERY_TOKEN, SAMPLING
from contract.types import Request, SamplingParams
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from reference.cpu.tier import CpuTier
from reference.engine import Engine, EngineOptions
from reference.limits import Limits
from reference.model.open import Model, open_model
from reference.runner import ModelRunner, StepInput
from tests.cuda.test_persistent import MODELS, without_rows
from tests.model_runs import REQUESTS, assert_same, generate
from tests.needs import need_device

pytestmark = pytest.mark.device

BLOCKS = ("8x3", "16x1", "8x2")
LONG = Request(1, tuple(3 + i % 90 for i in range(1020)), 12, ignore_end=True)
OpenStepTier = Callable[[str], CudaTier]


@pytest.fixture
def open_tier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenStepTier]:
    """Tiers with blocks of a shape, closed after the test."""
    need_device(open_driver)
    cache = tmp_path_factory.getbasetemp()
    with ExitStack() as opened:
        yield lambda step: opened.enter_context(CudaTier(choices=Choices(cache=cache, step=step)))


def model_of(name: str, folder: Path, quant: str = "q8_0") -> Model:
    path = folder / f"{name}-{quant}.gguf"
    if not path.exists():
        write_synthetic(path, sized_spec("tiny", quant=quant, **MODELS[name]))
    return open_model(path)


def one_token() -> StepInput:
    """The first of a sequence."""
    sampling, pages = np.zeros(1, SAMPLING), np.arange(6, dtype=np.int32).reshape(1, 6)
    return StepInput(np.zeros(1, QUERY_TOKEN), np.zeros(1, np.int32), sampling, pages)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_bits_of_the_cpu(
    name: str, block: str, folder: Path, open_tier: OpenStepTier
) -> None:
    """Prompts in chunks, one to three sequences that decode, sampling of every sort."""
    model = model_of(name, folder, "q4_k_m" if name == "mixed" else "q8_0")
    expected = generate(model, CpuTier(), REQUESTS, I12)
    assert_same(expected, generate(model, open_tier(block), REQUESTS, I12))


@pytest.mark.parametrize("dtype", ROTATED_KV, ids=str)
@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3moe", "wide"])
def test_rotated_pages(name: str, dtype: DType, folder: Path, open_tier: OpenStepTier) -> None:
    """Steps of one token as one launch, others as a graph."""
    model = model_of(name, folder)
    expected = generate(model, CpuTier(), REQUESTS, dtype)
    assert_same(expected, generate(model, open_tier("8x3"), REQUESTS, dtype))


@pytest.mark.parametrize(
    ("block", "dtype"), [*((block, I12) for block in BLOCKS), ("8x3", I4R), ("8x2", I3R)], ids=str
)
def test_steps_that_are_queued_ahead(
    block: str, dtype: DType, folder: Path, open_tier: OpenStepTier
) -> None:
    """Two hundred tokens, across the border of a span, banks taking turns without the host."""
    model = model_of("qwen3", folder)
    outcomes = []
    request = Request(1, LONG.prompt, 200, SamplingParams(temperature=0.8, seed=3), ignore_end=True)
    for tier, ahead in ((CpuTier(), 0), (open_tier(block), 3)):
        limits = Limits(1, 1280, 80, dtype, step_tokens=128, step_rows=1)
        with ModelRunner(model, tier, limits) as runner:
            engine = Engine(runner, EngineOptions(end_of_generation=frozenset(), steps_ahead=ahead))
            engine.submit(request)
            outcomes.append([event.token for event in engine.run()])
    assert outcomes[0] == outcomes[1]


def test_a_step_that_waits_forever_leaves_the_device(
    folder: Path, open_tier: OpenStepTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first product writes nothing. Told to stop its blocks end, and a tier opened then has the
    device for itself."""
    model = model_of("qwen3", folder)
    bound = StepTable.bound

    def broken(
        self: StepTable, packets: NDArray[np.void], stop: int, peers: PeerWorkspaces | None = None
    ) -> NDArray[np.uint8]:
        return without_rows(bound(self, packets, stop, peers))

    limits = Limits(1, 96, 6, I12, step_tokens=1, step_rows=1)
    with monkeypatch.context() as patch:
        patch.setattr(StepTable, "bound", broken)
        patch.setattr(tier_module, "DEFAULT_TIMEOUT_SECONDS", 2.0)
        runner = ModelRunner(model, open_tier("8x3"), limits)
        with pytest.raises(DeviceLost, match="did not end"):
            runner.step(one_token())
    expected = generate(model, CpuTier(), REQUESTS[:1], I12)
    assert_same(expected, generate(model, open_tier("8x3"), REQUESTS[:1], I12))
