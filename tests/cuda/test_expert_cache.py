"""Experts that move between host memory and the device: the bits of resident ones at every moment,
on the double of the driver with the real kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from accel.cuda import expert_cache
from accel.cuda.expert_cache import (
    ExpertCache,
    StackShape,
    experts_held,
    make_expert_cache,
    slot_bytes,
    table_bytes,
)
from accel.cuda.memory import HostWeight
from accel.cuda.streamed_weights import cached_stacks
from accel.cuda.submissions import Mark
from accel.cuda.tier import CudaTier
from accel.packets.weight_ring import ring_of
from contract.dtypes import I12
from contract.records import QUERY_TOKEN, SAMPLING
from contract.tier import Tier
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from reference.cpu.tier import CpuTier
from reference.limits import Limits
from reference.model.open import Model, open_model
from reference.runner import LOGITS, ModelRunner, StepInput
from tests.cuda.fake_context import words
from tests.cuda.fake_devices import EmulatedDevices
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.test_experts import SHAPE
from tests.cuda.test_multi_device import opened

LIMITS = Limits(2, 32, 4, I12, step_tokens=20, step_rows=2)
TOKENS = 7, 200, 31, 90, 160, 44, 7, 200
"""Each is a step of its own after the prompt."""
SIZES = (("gate", 256), ("down", 500))
HELD = 3
"""Experts of a layer on the device."""
EXPERTS, COUNT = 6, 90
LAYERS = [[StackShape(f"{name}{n}", EXPERTS, size) for name, size in SIZES] for n in range(2)]


def model_of(folder: Path, count: int) -> Model:
    """A mixture of two layers with ``count`` experts each."""
    path = folder / f"{count}-experts.gguf"
    if not path.exists():
        experts = {"count": count, "used": 2, "width": 256}
        spec = {"architecture": "qwen3moe", **SHAPE, "layers": 2, "experts": experts}
        write_synthetic(path, sized_spec("tiny", quant="q4_k_m", **spec))
    return open_model(path)


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice before every step, of experts that were used once."""
    monkeypatch.setattr(expert_cache, "STEPS", 1)
    monkeypatch.setattr(expert_cache, "MIN_GAIN", 1.0)


def outcomes(model: Model, tier: Tier, prompt: int) -> list[tuple[int, bytes]]:
    """Token and logits of every step, the first of which reads ``prompt`` tokens."""
    found, position = [], 0
    with ModelRunner(model, tier, LIMITS) as runner:
        for tokens in (range(5, 5 + prompt), *([token] for token in TOKENS)):
            query = np.zeros(len(tokens), QUERY_TOKEN)
            query["token"] = tokens
            query["position"] = position + np.arange(len(tokens))
            position += len(tokens)
            table = np.arange(LIMITS.pages, dtype=np.int32).reshape(LIMITS.slots, -1)
            rows = np.array([len(tokens) - 1], np.int32)
            given = StepInput(query, rows, np.zeros(1, SAMPLING), table, (LOGITS,))
            out = runner.step(given)
            found.append((int(out.token[0]), out.logits.tobytes()))
    return found


def nbytes_for(stacks: Sequence[Sequence[StackShape]]) -> int:
    """Bytes of a cache of ``HELD`` experts of each layer."""
    return table_bytes(stacks) + HELD * sum(map(slot_bytes, stacks))


def cached(model: Model, folder: Path, prompt: int) -> tuple[list[tuple[int, bytes]], int]:
    """The outcomes with a few experts on the device, and how many were moved there."""
    driver = EmulatedDevices(folder, 1)
    with opened(driver, "0") as tier:
        assert isinstance(tier, CudaTier)
        graph = model.graph(LIMITS)
        names = [n for n in tier.streamable(graph, LIMITS.largest) if "_exps" in n]
        stacks = cached_stacks(ring_of(graph, names, tier._device_bytes))
        nbytes = nbytes_for(stacks)
        assert [experts_held(stacks, nbytes - one) for one in (0, 1)] == [HELD, HELD - 1]
        tier.stream(graph, names, nbytes)
        found = outcomes(model, tier, prompt)
        cache = tier._streamed.cache
        assert cache is not None
        assert all(len(set(layer.slots)) == HELD for layer in cache.layers)
        return found, cache.moved


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize(
    ("count", "prompt"), [(8, 17), pytest.param(66, 10, marks=pytest.mark.soak)]
)
def test_experts_move_and_no_bit_changes(folder: Path, count: int, prompt: int) -> None:
    """After a prompt of which only the last layer, which computes fewer rows, reads a list, and
    after one whose tokens are grouped by expert."""
    model = model_of(folder, count)
    found, moved = cached(model, folder, prompt)
    assert found == outcomes(model, CpuTier(), prompt)
    assert moved > 0


def test_matrices_of_heads_are_no_experts(folder: Path) -> None:
    """A layer may have stacks of both, of other numbers: one of heads is never cached."""
    path = folder / "latent.gguf"
    latent = {"rank": 256, "unrotated": 256, "rotated": 64, "value": 64, "query_rank": 0}
    experts = {"count": 6, "used": 2, "width": 256, "shared_width": 256}
    spec = {"architecture": "deepseek2", **SHAPE, "latent": latent, "experts": experts}
    write_synthetic(path, sized_spec("tiny", quant="q4_k", **spec, leading_dense=0))
    graph = open_model(path).graph(LIMITS)
    with opened(EmulatedDevices(folder, 1), "0") as tier:
        assert isinstance(tier, CudaTier)
        names = tier.streamable(graph, LIMITS.largest)
        assert any("attn_k_b" in name for name in names)
        (stacks,) = cached_stacks(ring_of(graph, names, tier._device_bytes))
    assert len(stacks) == 3
    assert {stack.experts for stack in stacks} == {6}


class Steps:
    """Steps that read every matrix of every stack where the lists say, and count uses."""

    def __init__(self, driver: FakeDriver, tier: CudaTier) -> None:
        self.driver, memory = driver, tier._memory
        cache = make_expert_cache(memory, LAYERS, nbytes_for(LAYERS))
        assert cache is not None
        self.cache, self.wrong, self.done = cache, 0, 0
        rng = np.random.default_rng(7)
        for stack in (stack for layer in LAYERS for stack in layer):
            host, mapped = memory.pinned.mapped(stack.name, stack.experts * stack.matrix_bytes)
            host[:] = rng.integers(0, 256, host.nbytes)
            cache.matrices[stack.name] = HostWeight(0, host.nbytes, host, mapped=mapped)
        cache.fill(cache.matrices)

    def submit(self, number: int) -> None:
        """Enqueue a step in which some experts are used."""
        used = [(number // 4 + n) % EXPERTS for n in range(2)]
        self.cache.advance()
        self.driver._enqueue(lambda: self.step(used))

    def step(self, used: list[int]) -> None:
        self.done += 1
        for layer in self.cache.layers:
            for stack, at, first in zip(layer.stacks, layer.lists, layer.counts, strict=True):
                listed = longs(self.cache.lists.address + at * 8, stack.list_words)
                if listed[0] != self.cache.counts.address + 4 * first:
                    self.wrong += 1
                    continue
                words(int(listed[0]), EXPERTS)[used] += 1
                host = self.cache.matrices[stack.name].host
                assert host is not None
                for expert in range(EXPERTS):
                    found = ctypes.string_at(int(listed[1 + expert]), stack.matrix_bytes)
                    right = host[expert * stack.matrix_bytes :][: stack.matrix_bytes]
                    self.wrong += found != right.tobytes()


def longs(address: int, count: int) -> np.ndarray:
    """uint64[count] at an address."""
    return np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(address))


def _at_once(patch: pytest.MonkeyPatch) -> None:
    """Copies to the device do not wait for the steps before."""
    patch.setattr(Mark, "hold", lambda self, stream: None)


def _still_listed(patch: pytest.MonkeyPatch) -> None:
    """Experts that leave the device keep their addresses there until others have come."""
    send = ExpertCache._send_lists
    patch.setattr(ExpertCache, "_send_lists", lambda cache: None if cache._coming else send(cache))


def _early(patch: pytest.MonkeyPatch) -> None:
    """Experts that come are listed before their copies have ended."""
    patch.setattr(Mark, "passed", property(lambda self: True))


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("plant", [None, _at_once, _still_listed, _early])
def test_every_step_finds_every_matrix(
    driver: FakeDriver,
    tier: CudaTier,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None] | None,
    late: bool,
) -> None:
    """With steps in flight, and copies as early and as late as they may be. Negative controls: an
    order that is wrong is caught."""
    steps = Steps(driver, tier)
    if plant is not None:
        plant(monkeypatch)
    driver.current.late = late
    for number in range(COUNT):
        steps.submit(number)
        while len(driver.current.queue) > number % 9:
            driver.current.run(1)
    monkeypatch.undo()
    tier._memory.synchronize()
    assert steps.done == COUNT
    if plant is None:
        assert steps.wrong == 0
        assert steps.cache.moved > 4
    elif late == (plant is _early):
        # A copy that is too early shows where copies run at once, one that is too late elsewhere.
        assert steps.wrong > 0
