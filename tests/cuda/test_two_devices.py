"""Two devices of one host as one tier: the bits of the CPU tier, and of one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from accel.cuda.device import find_devices
from accel.cuda.driver import open_driver
from accel.cuda.launcher import Recording
from accel.cuda.multi_device import MultiDeviceTier, open_cuda
from accel.cuda.runtime import Choices
from contract.dtypes import F16, I3R, I4R, I12, DType
from contract.errors import DeviceLost
from contract.tier import Tier
from contract.types import Request, SamplingParams
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from reference.cpu.tier import CpuTier
from reference.engine import Engine, EngineOptions
from reference.limits import Limits
from reference.model.open import open_model
from reference.runner import ModelRunner
from tests.conftest import SyntheticModel
from tests.cuda import test_experts_on_device as experts
from tests.cuda import test_own_heads as own_heads
from tests.cuda.test_persistent import MODELS
from tests.cuda.test_persistent_on_device import LONG, model_of, one_token
from tests.families_table import FAMILIES
from tests.model_runs import REQUESTS, SHORT, assert_same, compare, generate
from tests.needs import machine_lacks, need_device
from tests.tiers import test_families as families

pytestmark = pytest.mark.device

OpenTier = Callable[..., Tier]


@pytest.fixture
def open_tier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenTier]:
    """``open_tier(device, **choices)`` opens tiers that are closed after the test."""
    if len(find_devices(need_device(open_driver))) < 2:
        machine_lacks("second CUDA device")
    cache = tmp_path_factory.getbasetemp()
    with ExitStack() as opened:
        yield lambda device, **choices: opened.enter_context(
            open_cuda(device, Choices(cache=cache, **choices))
        )


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_bits_of_the_cpu(name: str, folder: Path, open_tier: OpenTier) -> None:
    """Prompts in chunks, one to three sequences that decode, sampling of every sort."""
    model = model_of(name, folder, "q4_k_m" if name == "mixed" else "q8_0")
    expected = generate(model, CpuTier(), REQUESTS, I12)
    assert_same(expected, generate(model, open_tier("0,1"), REQUESTS, I12))
    assert_same(expected, generate(model, open_tier("1"), REQUESTS, I12))


HEADS = {"heads": 8, "kv_heads": 2, "hidden": 256, "layers": 2}
OWN_HEADS: Mapping[str, Mapping[str, Any]] = {
    "packed": {**MODELS["mixed"], **HEADS},
    "wide": {**MODELS["heads256"], **HEADS},
    "windows": {**MODELS["gemma3"], **HEADS},
    "biased": {**MODELS["llama"], **HEADS, "heads": 6},
    "experts": {**MODELS["qwen3moe"], **HEADS},
    "gates": {**MODELS["qwen35"], **HEADS},
}


@pytest.mark.parametrize("way", [{}, {"step": ""}], ids=str)
@pytest.mark.parametrize("dtype", [I12, F16, I4R, I3R], ids=str)
@pytest.mark.parametrize("name", OWN_HEADS)
def test_own_heads_have_the_bits_of_the_cpu(
    name: str, dtype: DType, way: dict[str, Any], folder: Path, open_tier: OpenTier
) -> None:
    """Every device has pages of its own KV heads, and what copies of pages save are those of one
    device."""
    path = folder / f"own-heads-{name}.gguf"
    write_synthetic(path, sized_spec("tiny", quant="q4_k_m", **OWN_HEADS[name]))
    model, tier = open_model(path), open_tier("0,1", **way)
    assert_same(generate(model, CpuTier(), REQUESTS, dtype), generate(model, tier, REQUESTS, dtype))
    assert own_heads.divided_among(tier, model, dtype) == {2}
    expected = own_heads.outcomes(model, CpuTier(), dtype)
    assert own_heads.outcomes(model, tier, dtype) == expected


@pytest.mark.parametrize("quant", ["q4_k_m", "q8_0"])
@pytest.mark.parametrize("name", experts.MODELS)
def test_experts_and_delta_nets_have_the_bits_of_the_cpu(
    name: str, quant: str, folder: Path, open_tier: OpenTier
) -> None:
    """Every device has rows of every expert, and whole states."""
    path = folder / f"two-devices-{name}-{quant}.gguf"
    write_synthetic(path, sized_spec("tiny", quant=quant, **experts.MODELS[name]))
    model, tier = open_model(path), open_tier("0,1")
    want, got = experts.logits(model, CpuTier()), experts.logits(model, tier)
    assert [one.tobytes() for one in got] == [one.tobytes() for one in want]


@pytest.mark.parametrize("name", families.MODELS)
def test_families_have_the_bits_of_the_cpu(
    name: str, synthetic_model: SyntheticModel, open_tier: OpenTier
) -> None:
    """Every architecture, in small chunks: latent pages, convolutions, experts of every choice."""
    quant, kv_dtype = families.MODELS[name]
    model = open_model(synthetic_model(quant=quant, **FAMILIES[name]))
    compare(model, open_tier("0,1"), kv_dtype, SHORT)


@pytest.mark.parametrize(
    "way", [{}, {"step": ""}, {"step": "16x1"}, {"graphs": False}, {"programmatic": False}], ids=str
)
def test_steps_that_are_queued_ahead(
    way: dict[str, Any], folder: Path, open_tier: OpenTier
) -> None:
    """A long prompt in large chunks, then two hundred tokens none of which waits for the host, by
    one launch a step on every device and by graphs that gather."""
    model = model_of("mixed", folder, "q4_k_m")
    sampling = SamplingParams(temperature=0.8, seed=3)
    request = Request(1, LONG.prompt, 200, sampling, ignore_end=True)
    outcomes = []
    for tier, ahead in ((CpuTier(), 0), (open_tier("1,0", **way), 3)):
        limits = Limits(1, 1280, 80, I12, step_tokens=256, step_rows=1)
        with ModelRunner(model, tier, limits) as runner:
            engine = Engine(runner, EngineOptions(end_of_generation=frozenset(), steps_ahead=ahead))
            engine.submit(request)
            outcomes.append([event.token for event in engine.run()])
    assert outcomes[0] == outcomes[1]


def test_weights_are_on_one_device_each(folder: Path, open_tier: OpenTier) -> None:
    """Matrices are halves; and a device holds what was planned."""
    model = model_of("mixed", folder, "q4_k_m")
    limits = Limits(1, 96, 6, I12, step_tokens=16, step_rows=1)
    held = []
    for device in ("0", "0,1"):
        tier = open_tier(device)
        graph = model.graph(limits)
        buffers = tier.footprint(graph, limits.largest).buffers
        name = "model.ffn_down.weight[0]"
        held.append(buffers[name])
    assert held[1] <= held[0] // 2 + 4096


def test_a_device_that_waits_in_vain_is_given_back(
    folder: Path, open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them never gets its step. The other is told to stop waiting, and both can be had
    again."""
    model = model_of("qwen3", folder)
    limits = Limits(1, 96, 6, I12, step_tokens=1, step_rows=1)
    tier = open_tier("0,1")
    assert isinstance(tier, MultiDeviceTier)
    runner = ModelRunner(model, tier, limits)
    runner.step(one_token())
    second, enqueue = tier._members[1]._runtime.context, Recording.enqueue

    def only_first(self: Recording, stream: Any, inputs: int) -> None:
        if self.context is not second:
            enqueue(self, stream, inputs)

    monkeypatch.setattr(Recording, "enqueue", only_first)
    in_flight = runner.submit(one_token())
    with pytest.raises(DeviceLost, match="did not end within 1 s"):
        tier.wait(in_flight.fence, timeout=1.0)
    assert all(one._runtime.context.closed for one in tier._members)
    monkeypatch.undo()
    expected = generate(model, CpuTier(), REQUESTS[:1], I12)
    assert_same(expected, generate(model, open_tier("0,1"), REQUESTS[:1], I12))
