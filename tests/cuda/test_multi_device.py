"""Several devices as one tier, on the double of the driver: real kernels block by block, one device
far ahead of the other, and devices that are lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.cuda.multi_device import MultiDeviceTier, ShardedBuffer, open_cuda
from accel.cuda.program import Compiler
from accel.cuda.runtime import Choices
from accel.cuda.tier import CudaTier
from accel.packets.rules import ROW_PARTS, lower_graph
from accel.packets.shares import Share, divided_weights, share_step
from accel.packets.step import Tensor
from contract.dtypes import F32, I12
from contract.errors import DeviceLost, OutOfMemory
from contract.ir.graph import BufferDecl, BufferKind
from contract.records import QUERY_TOKEN, SAMPLING
from contract.shape_key import ShapeKey
from contract.tier import Tier
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from reference.cpu.tier import CpuTier
from reference.limits import Limits
from reference.model.open import Model, open_model
from reference.runner import LOGITS, ModelRunner, StepInput, Submission
from tests.cuda.fake_context import CUresult
from tests.cuda.fake_devices import DeviceContext, EmulatedDevices, FakeDevices
from tests.cuda.fake_nvrtc import FakeNvrtc
from tests.cuda.test_persistent import EXPERTS, MODELS
from tests.cuda.test_tier import GRAPH, LARGEST, LAYOUT, STATE, block_of, doubled, values_of

LIMITS = Limits(2, 32, 4, I12, step_tokens=4, step_rows=2)
STEPS = (((5, 6, 7), 0), ((-1,), 3), ((9, 9), 4), ((-1,), 6))
"""Tokens of a step, the first's position."""
FAMILIES = {
    **MODELS,
    "eight": {**MODELS["qwen3"], "heads": 8, "kv_heads": 8, "feed_forward": 672, "layers": 1},
    "qwen35moe": {**MODELS["qwen35"], "architecture": "qwen35moe"},
}
FAMILIES["qwen35moe"]["experts"] = {**EXPERTS, "shared_width": 160}
HYBRID = pytest.param("qwen35moe", marks=pytest.mark.long)
EXPERTS_ALONE = pytest.param("qwen3moe", marks=pytest.mark.soak)
EIGHT = pytest.param("eight", "5,0,1,2,3,4,6,7", marks=pytest.mark.soak)
DOWN, TABLE = "model.ffn_down.weight[0]", "model.token_embd.weight"


def model_of(name: str, folder: Path, quant: str = "q8_0") -> Model:
    path = folder / f"{name}-{quant}.gguf"
    if not path.exists():
        write_synthetic(path, sized_spec("tiny", quant=quant, **FAMILIES[name]))
    return open_model(path)


def opened(
    driver: FakeDevices, device: str = "0,1", step: str = "", said: Any = None, **choices: Any
) -> Any:
    chosen = Choices(step=step, **choices)
    return open_cuda(device, chosen, said, driver, Compiler(FakeNvrtc()))


def submitted(runner: ModelRunner) -> Iterator[Submission]:
    """All steps, each as soon as it is asked for."""
    limits = runner.limits
    for tokens, first in STEPS:
        query = np.zeros(len(tokens), QUERY_TOKEN)
        query["token"], query["slot"] = tokens, 1
        query["position"] = first + np.arange(len(tokens))
        table = np.arange(limits.pages, dtype=np.int32)[::-1].reshape(limits.slots, -1).copy()
        rows = np.array([len(tokens) - 1], np.int32)
        yield runner.submit(StepInput(query, rows, np.zeros(1, SAMPLING), table, (LOGITS,)))


def outcomes(
    model: Model, tier: Tier, between: Callable[[], None] = lambda: None
) -> list[tuple[int, bytes]]:
    """Token and logits of every step, all of which were submitted before any was waited for."""
    with ModelRunner(model, tier, LIMITS) as runner:
        in_flight = list(submitted(runner))
        between()
        collected = [runner.collect(one) for one in in_flight]
    return [(int(out.token[0]), out.logits.tobytes()) for out in collected]


def contexts(driver: FakeDevices) -> list[DeviceContext]:
    return [one for one in driver.contexts if not one.destroyed]


@pytest.mark.parametrize("name", ["gemma3", HYBRID, EXPERTS_ALONE])
def test_two_devices_have_the_bits_of_the_cpu(name: str, folder: Path) -> None:
    """Families of every sort: norms behind products, experts, recurrent layers. The tier says that
    their steps of one token gather."""
    model, driver = model_of(name, folder), EmulatedDevices(folder)
    expected, said = outcomes(model, CpuTier()), list[str]()
    with opened(driver, said=said.append) as tier:
        assert tier.info.device == "Fake device (0) + Fake device (1)"
        assert outcomes(model, tier) == expected
    assert driver.gathers
    assert bool(driver.sent) == (name == "gemma3")
    assert sum("one device may be faster" in line for line in said) == 1


@pytest.mark.parametrize(("name", "devices"), [("llama", "0,1"), ("llama", "2,0,1"), EIGHT])
def test_a_step_of_one_token_is_one_launch(name: str, devices: str, folder: Path) -> None:
    """Steps with more tokens gather between launches, before it and behind it. Three devices and
    eight do not divide the rows; each of eight has a head of keys and values."""
    model = model_of(name, folder)
    driver = EmulatedDevices(folder, len(devices.split(",")), MULTIPROCESSOR_COUNT=3)
    said = list[str]()
    with opened(driver, devices, step="4x1", said=said.append) as tier:
        assert outcomes(model, tier) == outcomes(model, CpuTier())
    assert not any("may be faster" in line for line in said)
    assert driver.shared == sum(len(tokens) == 1 for tokens, _ in STEPS)
    assert driver.gathers


@pytest.mark.parametrize(("first", "graphs"), [(0, True), (1, True), (1, False)])
def test_a_device_may_be_far_ahead(first: int, graphs: bool, folder: Path) -> None:
    """One does all it can of all steps before the other begins, which then goes on no further than
    it has to."""
    model, driver = model_of("llama", folder), EmulatedDevices(folder)
    expected = outcomes(model, CpuTier())
    with opened(driver, graphs=graphs) as tier:
        assert outcomes(model, tier, lambda: contexts(driver)[first].run()) == expected


def test_a_graph_without_products_needs_no_others(folder: Path) -> None:
    """Every device does it alone; mapped memory is the same on all of them."""
    driver = FakeDevices()
    with opened(driver) as tier:
        y = tier.alloc(GRAPH.buffers["y"], LARGEST.tokens * 128 * 4)
        batch = tier.lower(GRAPH, {"y": y}, LARGEST, LAYOUT)
        values = values_of(3, 1)
        fence = tier.submit(batch, block_of(values), ["y"])
        tier.wait(fence)
        got = fence.outputs["y"].view(np.float32).reshape(values.shape)
        assert np.array_equal(got, doubled(values))
        assert not driver.gathers
        state = tier.alloc(STATE, 64)
        tier.map(state)[:] = 7
        tier.wait(tier.submit(batch, block_of(values)))
        tier.write(state, 3, np.arange(5, dtype=np.uint8))
        expected = [7, 7, 7, 0, 1, 2, 3, 4, 7]
        assert tier.read(state, 0, 9).tolist() == expected
        for one, part in zip(tier._members, state.parts, strict=True):
            assert one._memory.read(part.allocation, 0, 9).tolist() == expected


def test_a_step_waits_for_nothing_before_all_devices_have_it(folder: Path) -> None:
    """A copy to the host could wait for a device that waits for the next."""
    driver, model = EmulatedDevices(folder), model_of("llama", folder)
    with opened(driver) as tier, ModelRunner(model, tier, LIMITS) as runner:
        runner.prepare()
        steps = submitted(runner)
        runner.collect(next(steps))
        driver.calls.clear()
        in_flight = next(steps)
        ours = ("cuGraphLaunch", "cuMemcpyDtoHAsync", "cuMemHostRegister", "cuGraphInstantiate")
        calls = [name for name in driver.calls if name in ours]
        last = len(calls) - calls[::-1].index("cuGraphLaunch")
        assert calls[:last] == ["cuGraphLaunch"] * 2
        runner.collect(in_flight)


def test_memory_of_another_device_may_move(folder: Path) -> None:
    """Graphs that write to it are made anew."""
    model = model_of("llama", folder)
    expected = outcomes(model, CpuTier())
    with opened(EmulatedDevices(folder)) as tier, ModelRunner(model, tier, LIMITS) as runner:
        runner.prepare()
        got = []
        for number, step in enumerate(submitted(runner), 1):
            out = runner.collect(step)
            got.append((int(out.token[0]), out.logits.tobytes()))
            tier._members[0]._reserve(number << 20, 0)
    assert got == expected


def test_dividing_a_step_takes_time_in_proportion_to_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four times the layers at most ten times as many tensors are compared."""
    compared: list[int] = []
    overlaps = Tensor.overlaps

    def counted(one: Tensor, other: Tensor) -> bool:
        compared[-1] += 1
        return overlaps(one, other)

    monkeypatch.setattr(Tensor, "overlaps", counted)
    for layers in (4, 16):
        path = tmp_path / f"{layers}.gguf"
        spec = sized_spec("tiny", quant="q8_0", **{**FAMILIES["qwen3"], "layers": layers})
        write_synthetic(path, spec, sparse=True)
        model = open_model(path)
        with model.file:
            step = lower_graph(model.graph(LIMITS), ShapeKey(4, 1), ROW_PARTS, "cuda")
        compared.append(0)
        share = Share(0, 2)
        assert len(share_step(step, share, divided_weights([step], share)).step.ops) > layers
    assert 0 < compared[1] < 10 * compared[0]


@pytest.mark.parametrize(
    ("name", "matrix", "part"),
    [("llama", DOWN, (1, 2)), ("qwen35moe", "model.ffn_gate_exps.weight[0]", (2, 3))],
)
def test_what_is_divided_is_planned(
    name: str, matrix: str, part: tuple[int, int], folder: Path
) -> None:
    """A matrix takes half as much (tiles have 32 rows: of 96 rows of an expert there are three, of
    48 two), a table that is read by rows as much as ever; the devices hold what was said, and no
    second copy of a stack is in host memory."""
    model = model_of(name, folder)
    graph = model.graph(LIMITS)
    with opened(EmulatedDevices(folder), "0") as one, opened(EmulatedDevices(folder)) as two:
        alone, shared = (tier.footprint(graph, LIMITS.largest).buffers for tier in (one, two))
        assert part[1] * shared[matrix] == part[0] * alone[matrix]
        assert shared[TABLE] == alone[TABLE]
        with ModelRunner(model, two, LIMITS) as runner:
            assert two.allocated_bytes - sum(shared.values()) >= 0
            held = [device._memory.held for device in two._members]
            assert name != "llama" or max(held) - min(held) < 4096
            buffer = runner._buffers[matrix]
            stored = two.map(buffer)
            for piece in buffer.parts:
                assert name == "llama" or np.shares_memory(piece.source, stored)


def lost(
    driver: EmulatedDevices,
    tier: MultiDeviceTier,
    model: Model,
    broken: tuple[DeviceContext, Callable[[], None]],
) -> pytest.ExceptionInfo[Any]:
    """The error of a step in which a device breaks."""
    with ModelRunner(model, tier, LIMITS) as runner:
        steps = submitted(runner)
        runner.collect(next(steps))
        driver.broken = broken
        in_flight = next(steps)
        with pytest.raises(DeviceLost) as caught:
            tier.wait(in_flight.fence, timeout=0.2)
        with pytest.raises(DeviceLost):
            next(steps)
    return caught


@pytest.mark.parametrize("which", [0, 1])
def test_a_device_that_hangs_is_left_and_the_other_given_back(which: int, folder: Path) -> None:
    """The other's kernels are told to stop waiting, and the error names the one that does not end.
    Both can be opened again."""
    driver, model = EmulatedDevices(folder), model_of("llama", folder)
    tier = opened(driver)
    hanging = contexts(driver)[which]
    caught = lost(driver, tier, model, (hanging, lambda: setattr(hanging, "hangs", True)))
    named = f"did not end within 0.2 s; Fake device ({which}) did not end when told to"
    assert str(caught.value).endswith(named)
    assert [one.destroyed for one in driver.contexts] == [number != which for number in range(2)]
    tier.close()
    driver.broken = None
    with opened(driver) as again, ModelRunner(model, again, LIMITS) as runner:
        runner.collect(next(submitted(runner)))


def test_a_device_that_faults_takes_the_other_along(folder: Path) -> None:
    """It is named, and nothing waits for it."""
    driver, model = EmulatedDevices(folder), model_of("llama", folder)
    tier = opened(driver)
    faulting = contexts(driver)[1]

    def fault() -> None:
        faulting.error = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS

    caught = lost(driver, tier, model, (faulting, fault))
    assert "Fake device (1): cuEventQuery answered CUDA_ERROR_ILLEGAL_ADDRESS" in str(caught.value)
    assert contexts(driver) == []
    tier.close()


def test_a_step_that_some_devices_have_is_none(folder: Path, monkeypatch: Any) -> None:
    """Interrupted between two devices: the first would wait for the second for ever."""
    driver, model = EmulatedDevices(folder), model_of("llama", folder)
    with opened(driver) as tier, ModelRunner(model, tier, LIMITS) as runner:
        steps = submitted(runner)
        runner.collect(next(steps))
        start = CudaTier.start

        def interrupted(self: CudaTier, *arguments: Any) -> Any:
            if self is tier._members[1]:
                raise KeyboardInterrupt
            return start(self, *arguments)

        monkeypatch.setattr(CudaTier, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(steps)
        with pytest.raises(DeviceLost, match="some of the devices only"):
            tier.alloc(STATE, 64)


def test_memory_that_one_lacks_is_given_back_on_the_others() -> None:
    """The error names the buffer."""
    driver = FakeDevices()
    with opened(driver, memory_bytes=200 << 20) as tier:
        before = tier.allocated_bytes
        second = tier._members[1]._memory.allocate("somebody else's", 150 << 20)
        with pytest.raises(OutOfMemory, match="state: need"):
            tier.alloc(STATE, 100 << 20)
        tier._members[1]._memory.free(second)
        assert tier.allocated_bytes == before
        decl = BufferDecl("table", BufferKind.CONSTANT, F32, (4, 4))
        buffer: ShardedBuffer = tier.upload(decl, np.ones((4, 16), np.uint8))
        assert (tier.map(buffer) == 1).all()
        tier.free(buffer)
