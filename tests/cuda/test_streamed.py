"""Weights streamed from host memory on the double of the driver: real kernels block by block, with
copies as early and as late as their events allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel.cuda import streamed_weights
from accel.cuda.streamed_weights import START, LayerCopies
from accel.cuda.tier import CudaTier
from accel.packets.weight_ring import weights_of_layers
from contract.errors import DoesNotFit, OutOfMemory
from harness.residency import Residency, plan_residency
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from reference.cpu.tier import CpuTier
from reference.memory.planner import plan_memory
from reference.model.open import Model, open_model
from reference.runner import ModelRunner
from tests.cuda.conftest import OpenTier
from tests.cuda.fake_context import CUresult
from tests.cuda.fake_devices import EmulatedDevices
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.test_experts import SHAPE
from tests.cuda.test_multi_device import FAMILIES, LIMITS, opened, outcomes
from tests.model_runs import FEW, assert_same
from tests.tiers.test_live_memory import Machine, given_and_taken
from tests.tiers.test_live_memory import expected_of as expected_outcome

LAYERS = 4
"""More than the ring has slots."""
LOADING = ("launch_self_test", "launch_arrange", "arrange_units", "find_broken")
"""Kernels that are not part of a step."""
Outcomes = list[tuple[int, bytes]]
Plant = Callable[[LayerCopies, int], LayerCopies]
EXPECTED: dict[str, Outcomes] = {}


def model_of(name: str, folder: Path) -> Model:
    path = folder / f"{name}-of-{LAYERS}.gguf"
    if not path.exists():
        write_synthetic(
            path, sized_spec("tiny", quant="q8_0", **{**FAMILIES[name], "layers": LAYERS})
        )
    return open_model(path)


def experts_file(folder: Path) -> Path:
    """A mixture whose stacks have tuned kernels."""
    path = folder / "sixteen-experts.gguf"
    experts = {"count": 16, "used": 2, "width": 256}
    spec = {"architecture": "qwen3moe", **SHAPE, "layers": LAYERS, "experts": experts}
    write_synthetic(path, sized_spec("tiny", quant="q4_k_m", **spec))
    return path


def streaming(tier: CudaTier, model: Model, part: int = 1) -> list[str]:
    """Have the tier stream every ``part``-th of the weights that can be."""
    graph = model.graph(LIMITS)
    names = list(tier.streamable(graph, LIMITS.largest))[::part]
    tier.stream(graph, names)
    return names


def streamed(
    model: Model, folder: Path, late: bool = False, part: int = 1, **choices: Any
) -> Outcomes:
    """Tokens and logits of steps that stream."""
    driver = EmulatedDevices(folder, 1)
    with opened(driver, "0", **choices) as tier:
        streaming(tier, model, part)
        driver.contexts[0].late = late
        return outcomes(model, tier)


def expected_of(name: str, folder: Path) -> Outcomes:
    if name not in EXPECTED:
        EXPECTED[name] = outcomes(model_of(name, folder), CpuTier())
    return EXPECTED[name]


@pytest.mark.parametrize(
    ("name", "late", "part", "graphs"),
    [
        ("llama", False, 1, True),
        ("llama", True, 1, True),
        pytest.param("llama", False, 3, False, marks=pytest.mark.long),
        pytest.param("qwen35moe", False, 1, True, marks=pytest.mark.soak),
    ],
)
def test_streamed_weights_give_the_bits_of_resident_ones(
    name: str, late: bool, part: int, graphs: bool, folder: Path
) -> None:
    """All steps are submitted before any is waited for, as graphs and one by one."""
    found = streamed(model_of(name, folder), folder, late, part, graphs=graphs)
    assert found == expected_of(name, folder)


def _at_once(layer: LayerCopies, launches: int) -> LayerCopies:
    """Copied while an earlier layer may still read the slot."""
    return replace(layer, after=START)


def _unwaited(layer: LayerCopies, launches: int) -> LayerCopies:
    """Waited for by the last launch alone."""
    return replace(layer, before=launches - 1)


@pytest.mark.parametrize(("plant", "late"), [(_at_once, False), (_unwaited, True)])
def test_copies_in_a_wrong_order_are_caught(
    plant: Plant, late: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: a slot is overwritten before its reader has ended, or read too early."""
    layers_of = streamed_weights.layer_copies

    def planted(step: Any, launches: Sequence[Any], *more: Any) -> list[LayerCopies]:
        return [plant(one, len(launches)) for one in layers_of(step, launches, *more)]

    monkeypatch.setattr(streamed_weights, "layer_copies", planted)
    model = model_of("llama", folder)
    assert streamed(model, folder, late) != expected_of("llama", folder)


def test_a_launch_that_waits_for_copies_does_not_start_early(folder: Path) -> None:
    """A step has the launches it has without streaming, of which one of each layer waits."""
    model = model_of("llama", folder)
    launched, late = [], []
    for part in (0, 1):
        driver = EmulatedDevices(folder, 1)
        with opened(driver, "0", step="") as tier:
            if part:
                streaming(tier, model, part)
            with ModelRunner(model, tier, LIMITS) as runner:
                runner.prepare()
        steps = [one for one in driver.launched if one[0] not in LOADING]
        launched.append([name for name, _ in steps])
        late.append(sum("programmatic" not in attributes for _, attributes in steps))
    assert launched[0] == launched[1]
    assert late[1] == late[0] * (1 + LAYERS) > 0


def test_the_plan_is_what_is_allocated(folder: Path) -> None:
    """The ring instead of the weights; nothing stays allocated when nothing is streamed."""
    model, driver = model_of("llama", folder), EmulatedDevices(folder, 1)
    graph = model.graph(LIMITS)
    with opened(driver, "0") as tier:
        before = tier.allocated_bytes
        estimate = tier.streaming_footprint(
            graph, LIMITS.largest, list(tier.streamable(graph, LIMITS.largest))
        )
        names = streaming(tier, model)
        assert set(names) < set(weights_of_layers(graph))
        plan = plan_memory(graph, LIMITS, tier.footprint(graph, LIMITS.largest), unified=False)
        assert plan == plan_memory(graph, LIMITS, estimate, unified=False)
        with ModelRunner(model, tier, LIMITS) as runner:
            runner.prepare()
            assert abs(tier.allocated_bytes - before - plan.allocated) <= plan.allocated / 100
        resident = tier.footprint(graph, LIMITS.largest)
        tier.stream(graph, ())
        whole = plan_memory(graph, LIMITS, tier.footprint(graph, LIMITS.largest), unified=False)
        assert (whole.streamed, whole.ring) == (0, 0)
        assert plan.device < whole.device
        assert resident.ring > 0


@pytest.mark.parametrize("name", ["llama", "qwen35moe"])
def test_a_budget_is_planned_and_said(name: str, folder: Path, tier: CudaTier) -> None:
    """Attention first; of a mixture what is left is for experts that are used often, and the speed
    to expect is that of the experts a token uses. One byte less than the least is refused."""
    model = open_model(experts_file(folder)) if name == "qwen35moe" else model_of(name, folder)
    limits_at = [lambda context: replace(LIMITS, context=context)]

    def planned(budget: int) -> Residency:
        tier.stream(model.graph(LIMITS), ())
        found = plan_residency(model, tier, limits_at, 32, budget)
        return found.applied(model, tier, budget)

    whole = planned(1 << 27)
    assert (whole.streamed, whole.cache, whole.lines(tier, model)) == ((), 0, [])
    with pytest.raises(DoesNotFit, match="weights of all layers in host memory") as refused:
        planned(1 << 10)
    least, most = refused.value.need, whole.plan.budgeted
    for budget in (least, (least + most) // 2, most - 1):
        found = planned(budget)
        assert found.plan.budgeted <= budget
        stacks = [n for n in found.streamed if len(model.graph(LIMITS).buffers[n].shape) == 3]
        assert (found.cache > 0) <= (len(stacks) == len(found.streamed) > 0)
        (line,) = found.lines(tier, model)
        assert ("a token moves" in line) == (name == "qwen35moe")
        assert "a second by the link" in line
    assert (found.cache > 0) == (name == "qwen35moe")
    with pytest.raises(DoesNotFit) as refused:
        planned(least - 1)
    assert (refused.value.need, refused.value.have) == (least, least - 1)


@pytest.mark.soak
def test_memory_is_given_back_and_taken_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While other programs need it: pages, and then weights."""
    model = model_of("llama", folder)
    with opened(EmulatedDevices(folder, 1), "0") as tier:
        found = given_and_taken(Machine(model, tier, monkeypatch), FEW, 1 << 16)
    assert_same(expected_outcome(model, "llama", FEW), found)


def test_host_memory_that_is_refused_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page-locked memory is the system's to give; the tier runs the model resident afterwards."""
    model, driver = model_of("llama", folder), EmulatedDevices(folder, 1)
    with opened(driver, "0", step="") as tier:
        streaming(tier, model)
        with monkeypatch.context() as patch:
            patch.setattr(
                EmulatedDevices,
                "cuMemHostGetDevicePointer",
                lambda *_: (CUresult.CUDA_ERROR_INVALID_VALUE, None),
            )
            with pytest.raises(OutOfMemory, match=r"weight\[0\] in page-locked host memory"):
                outcomes(model, tier)
        tier.stream(model.graph(LIMITS), ())
        assert outcomes(model, tier) == expected_of("llama", folder)


def test_closing_ends_what_locks_pages(
    driver: FakeDriver, open_cuda: OpenTier, folder: Path
) -> None:
    """As after Ctrl-C while a model is loaded: nobody asks the driver for anything afterwards."""
    model = model_of("llama", folder)
    for _ in range(3):
        tier = open_cuda()
        streaming(tier, model)
        tier.reserve(model.graph(LIMITS), LIMITS.largest)
        tier.close()
        last = len(driver.calls) - driver.calls[::-1].index("cuCtxDestroy")
        assert driver.calls[last:] == []
        assert not tier._streamed._ahead
