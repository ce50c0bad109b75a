"""What goes wrong while a tier runs, what keeps steps apart, and what steps are made of."""

import errno
from dataclasses import replace

import numpy as np
import pytest

from accel.amd import launcher, pm4
from accel.amd.program import checked
from accel.amd.self_check import ProbeCase, divides_exactly
from accel.amd.sim.fake_kernel import FakeKernel
from accel.amd.sim.fake_machine import Behaviour
from accel.amd.steps import SPLIT_TOKENS, buckets_of, step_of
from accel.amd.tier import AmdTier
from accel.amd.topology import PAGE
from accel.kernels.device_probe import Found, samples
from contract.errors import CodecError, DeviceLost, OutOfMemory, TierUnavailable
from contract.kernel import GpuTarget
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from contract.tier import Tier
from harness.parity.cases import all_cases
from harness.parity.execute import compare, run_barrier
from reference.cpu.tier import CpuTier
from reference.engine import Engine, EngineOptions
from reference.limits import Limits
from reference.model.open import Model, open_model
from reference.runner import ModelRunner
from tests.amd.code import shipped, wait_memory
from tests.amd.conftest import DRIVERS
from tests.model_runs import FEW
from tests.patience import PATIENCE_SECONDS

DEPENDENT = next(case for case in all_cases(1) if case.opcode is Opcode.RMS_NORM_FUSED_MLP_GATE_UP)
"""An opcode whose launches read what those before them wrote."""


def test_two_launches_that_depend(tier):
    """On a GPU that checks what a launch may see."""
    assert compare(tier, DEPENDENT) == {}


def test_a_step_without_launches(tier):
    """Its fence comes."""
    run_barrier(tier)


@pytest.mark.parametrize("left_out", ["wait_for_launches", "acquire_memory"])
def test_a_flush_or_an_acquire_that_is_missing_is_noticed(open_amd, monkeypatch, left_out):
    """Negative control: the packet is left out between the launches of a step."""
    tier = open_amd(FakeKernel(Behaviour(checked=True)), native=True)
    monkeypatch.setattr(launcher.pm4, left_out, lambda *_: [])
    with pytest.raises(DeviceLost, match=r"launch \d+ .*reads what launch"):
        compare(tier, DEPENDENT)


def test_a_cut_buffer_is_noticed(open_amd, monkeypatch):
    """Negative control: the last word of a step is not sent."""
    tier = open_amd()
    whole = pm4.indirect_buffer
    monkeypatch.setattr(pm4, "indirect_buffer", lambda at, n, flags: whole(at, n - 1, flags))
    with pytest.raises(DeviceLost, match=r"past the end of its buffer|in the midst of a packet"):
        compare(tier, DEPENDENT)


def test_a_queue_that_hangs_is_given_up(open_amd, name, monkeypatch):
    """The step waits for memory that nobody writes; the tier is lost from then on, and its queue
    is taken from it."""
    kernel = FakeKernel()
    tier = open_amd(kernel, name)
    fence = tier._runtime.queue.fence_address + 128
    whole = pm4.indirect_buffer

    def hanging(address: int, words: int, flags: int) -> pm4.Words:
        return [*wait_memory(fence, 1), *whole(address, words, flags)]

    monkeypatch.setattr(pm4, "indirect_buffer", hanging)
    monkeypatch.setattr("accel.amd.queue.GRACE_SECONDS", 0.05)
    wait = AmdTier.wait
    monkeypatch.setattr(AmdTier, "wait", lambda self, fence, timeout=None: wait(self, fence, 0.05))
    with pytest.raises(DeviceLost, match=r"did not end within 0\.05 s"):
        compare(tier, DEPENDENT)
    assert kernel.machine.gpu.queues == {}
    with pytest.raises(DeviceLost, match="did not end"):
        compare(tier, DEPENDENT)


def test_out_of_memory_names_the_buffer(open_amd):
    """And the tier goes on."""
    tier = open_amd()
    device = tier._device
    capacity, device.capacity = device.capacity, device.held + PAGE
    with pytest.raises(OutOfMemory, match="out of memory for"):
        compare(tier, DEPENDENT)
    device.capacity = capacity
    assert compare(tier, DEPENDENT) == {}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"target": GpuTarget.GFX1100}, "target GFX1100, not GFX1201"),
        ({"subgroup_size": 64}, "waves of 64, not 32"),
        ({"scratch_bytes": 16}, "16 bytes of scratch"),
    ],
)
def test_a_kernel_that_cannot_be_launched_is_refused(change, problem):
    """A kernel of another GPU, of wide waves and with scratch memory; the shipped one is taken."""
    kernel = shipped("rope")
    assert checked(kernel, GpuTarget.GFX1201) is kernel
    with pytest.raises(CodecError, match=problem):
        checked(replace(kernel, **change), GpuTarget.GFX1201)


def test_a_fault_says_where(open_amd, name):
    """A buffer that is gone while packets still read it: the address, the launch, nothing kept."""
    kernel = FakeKernel()
    tier = open_amd(kernel, name)
    allocation = tier._device.allocate("gone", PAGE)
    at = allocation.address
    tier._device.free(allocation)
    queue = tier._runtime.queue
    with pytest.raises(DeviceLost, match=f"a fault at {at:#x} .*INDIRECT_BUFFER"):
        queue.wait(queue.submit(queue.indirect_buffer(at, 1)), PATIENCE_SECONDS)
    tier.close()
    assert kernel.leaked == []


def test_a_damaged_installation_is_said_to_be_one(monkeypatch, tmp_path):
    monkeypatch.setattr("accel.amd.program.folder_of", lambda gpu: tmp_path)
    kernel = FakeKernel()
    with pytest.raises(TierUnavailable, match="install zinc-rt again"):
        AmdTier(kernel=kernel)
    assert kernel.leaked == []


class Answering(ProbeCase):
    """A GPU that gets ``wrong`` wrong by itself, and in integers as well if ``always``."""

    wrong = ""
    always = False

    def answer(self, native: bool) -> Found:
        found = {key: value.copy() for key, value in samples().expected.items()}
        if native or self.always:
            found[self.wrong].view(np.int32)[0] ^= 1
        return found


@pytest.mark.parametrize("wrong", ["divide", "root"])
def test_what_the_gpu_gets_wrong_integers_do(tier, wrong):
    runtime = tier._runtime
    asked = Answering(runtime.device, runtime.queue, runtime.modules)
    Answering.wrong, Answering.always = wrong, False
    assert not divides_exactly(asked)
    Answering.always = True
    with pytest.raises(TierUnavailable, match=f"does not compute exactly: {wrong}"):
        divides_exactly(asked)


def test_what_has_no_remedy_refuses_the_gpu(tier):
    runtime = tier._runtime
    Answering.wrong, Answering.always = "contraction", False
    with pytest.raises(TierUnavailable, match="does not compute exactly: contraction"):
        divides_exactly(Answering(runtime.device, runtime.queue, runtime.modules))


def test_an_error_of_the_system_is_the_contracts(open_amd):
    kernel = FakeKernel()
    tier = open_amd(kernel)
    kernel.behaviour.errors["MAP_MEMORY_TO_GPU"] = errno.EINVAL
    with pytest.raises(Exception, match="MAP_MEMORY_TO_GPU") as caught:
        compare(tier, DEPENDENT)
    assert type(caught.value).__module__ == "contract.errors"
    kernel.behaviour.errors.clear()


LIMITS = Limits(64, 64, 256, step_tokens=128, step_rows=64)


@pytest.mark.parametrize(
    ("tokens", "product", "attention"),
    [
        (1, "matmul_row", "flash_attn_part"),
        (4, "matmul", "flash_attn_part"),
        (SPLIT_TOKENS, "matmul", "flash_attn_part"),
        (SPLIT_TOKENS + 1, "matmul_tiles", "flash_attn_batched"),
    ],
)
def test_kernels_by_tokens(tiny_model_path, tokens, product, attention):
    """Of quantized layers; without matrix instructions packed dots stay."""
    graph = open_model(tiny_model_path).graph(LIMITS)
    bucket = ShapeKey(tokens, min(tokens, 64))
    names = {op.name for op in step_of(graph, bucket, "t1", matrices=True).ops}
    assert {product, attention} <= names
    plain = {op.name for op in step_of(graph, bucket, "t1", matrices=False).ops}
    assert "matmul_tiles" not in plain


def test_a_form_for_every_choice():
    """So that a step of 16 slots is not one of many tokens."""
    assert [bucket.tokens for bucket in buckets_of(ShapeKey(128, 64))] == [1, 4, SPLIT_TOKENS, 128]
    assert [bucket.tokens for bucket in buckets_of(ShapeKey(2, 2))] == [1, 2]


@pytest.mark.parametrize("driver", ["amdkfd", pytest.param("user queues", marks=pytest.mark.soak)])
def test_steps_in_steady_state_make_no_system_call(open_amd, kernel, tiny_model_path, driver):
    """Decode without the host between the steps is ring writes and doorbells, once every form has
    been recorded; every launch saw what those before it wrote."""
    model = open_model(tiny_model_path)
    with CpuTier() as oracle:
        expected = tokens(model, oracle, None)
    tier = open_amd(kernel, DRIVERS[driver], native=True, matrices=True)
    assert tokens(model, tier, kernel) == expected


def tokens(model: Model, tier: Tier, kernel: FakeKernel | None) -> list[list[tuple[int, int]]]:
    """(request, token) of each event, of the same request twice; the second time ``kernel`` is not
    called."""
    found = []
    with ModelRunner(model, tier, Limits(2, 32, 8, step_tokens=16, step_rows=4)) as runner:
        for again in (False, True):
            calls = kernel.calls.total() if kernel is not None else 0
            engine = Engine(runner, EngineOptions(steps_ahead=3))
            engine.submit(FEW[1])
            found.append([(event.request_id, event.token) for event in engine.run()])
            if kernel is not None and again:
                assert kernel.calls.total() == calls
    return found
