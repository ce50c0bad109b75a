"""Steps on every tier: each has inputs and outputs of its own, however many are in flight."""

from typing import Any

import numpy as np
import pytest

from accel.packets.footprint import MAPPED_OUTPUT_BYTES
from accel.packets.rules import RULES
from contract.errors import UnsupportedOp
from contract.ir.inputs import InputCopy, input_layout, pack_inputs
from contract.ir.scratch import buffer_bytes
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from reference.cpu.tier import CpuTier
from tests.doubling import GRAPH, KEY, LAYOUT, WIDTH, Doubling, inputs_of, run_doubling, values_of
from tests.tiers.chained import LARGEST, Lowered, same, step_block
from tests.tiers.conftest import each
from tests.tiers.ways import DEVICES, MODELS, OTHERS, WAYS

devices = pytest.mark.parametrize("way", each(*DEVICES), indirect=True, scope="module")
kernels = pytest.mark.parametrize("way", each(*MODELS), indirect=True, scope="module")
DEPTH = 8
"""Steps in flight at once."""


@pytest.mark.parametrize("way", each(*WAYS, *OTHERS), indirect=True, scope="module")
def test_replays_read_new_inputs(tier):
    """One batch, many submissions: what the host writes is seen by the next one."""
    run_doubling(tier, rounds=6)


def test_steps_in_flight_keep_inputs_and_outputs_apart(tier):
    """Inputs are overwritten as soon as they were submitted; the last step is read first."""
    lowered = Doubling(tier)
    steps = []
    for number in range(DEPTH):
        values = values_of(number)
        inputs = inputs_of(values)
        steps.append((values, tier.submit(lowered.batch, inputs, ("y",))))
        inputs[:] = 0xFF
    for values, fence in reversed(steps):
        tier.wait(fence)
        assert fence.done
        lowered.check(fence.outputs["y"], values)
    tier.free(lowered.y)


@kernels
def test_steps_that_depend_on_each_other(tier):
    """Outputs and states are those of the CPU tier, which runs one step after the other."""
    late, exact = Lowered(tier), Lowered(CpuTier())
    for first in range(3):
        in_flight, expected = [], []
        for number, tokens in enumerate((LARGEST.tokens, 5, 1, 17)):
            block = step_block(tokens, seed=4 * first + number)
            in_flight.append(late.submit(block, "product", "folded"))
            expected.append(exact.outputs(block))
            block[:] = 0xFF
        for fence, outputs in zip(reversed(in_flight), reversed(expected), strict=True):
            tier.wait(fence)
            assert same(fence.outputs, outputs)
    for got, requested in zip(late.states(), exact.states(), strict=True):
        assert np.array_equal(got, requested)
    late.free()


@devices
def test_inputs_that_are_not_copied_are_noticed(tier, monkeypatch):
    """The negative control: a step whose snapshot is left as it was computes the step before."""
    lowered, values = Doubling(tier), values_of(0)
    lowered.run()
    monkeypatch.setattr(InputCopy, "update", lambda self, inputs, rows=None: None)
    fence = tier.submit(lowered.batch, inputs_of(values + 1), ("y",))
    tier.wait(fence)
    lowered.check(fence.outputs["y"], values)
    with pytest.raises(AssertionError):
        lowered.check(fence.outputs["y"], values + 1)
    tier.free(lowered.y)


def test_outputs_outlive_later_steps(tier):
    """What a fence holds is its own; the buffer itself shows the last step when it is mapped."""
    lowered, values = Doubling(tier), values_of(0)
    fence = tier.submit(lowered.batch, inputs_of(values), ("y",))
    tier.wait(fence)
    for number in (1, 2):
        later = values_of(number)
        tier.wait(tier.submit(lowered.batch, inputs_of(later)))
        lowered.check(tier.map(lowered.y)[: later.nbytes], later)
    lowered.check(fence.outputs["y"], values)
    tier.free(lowered.y)


@kernels
def test_large_outputs_outlive_later_steps(tier):
    """The same of an output that is brought to the host only when a step wants it."""
    lowered, exact = Lowered(tier), Lowered(CpuTier())
    assert lowered.buffers["product"].nbytes > MAPPED_OUTPUT_BYTES
    block = step_block(3, seed=1)
    fence = lowered.submit(block, "product")
    tier.wait(fence)
    first = exact.outputs(block)["product"]
    for seed in (2, 3):
        block = step_block(4, seed)
        tier.wait(lowered.submit(block))
        expected = exact.outputs(block)["product"]
        mapped = tier.map(lowered.buffers["product"])
        assert np.array_equal(mapped[: expected.size], expected)
    assert np.array_equal(fence.outputs["product"], first)
    lowered.free()


def test_a_step_of_nothing_has_empty_outputs(tier):
    """Without a token no op has anything to do."""
    lowered = Doubling(tier)
    fence = tier.submit(lowered.batch, pack_inputs(LAYOUT, ShapeKey(0, 0), {}), ("y",))
    tier.wait(fence)
    assert fence.outputs["y"].size == 0
    tier.free(lowered.y)


def test_a_step_beyond_the_bucket_is_refused(tier):
    """Its scratch memory would be overrun."""
    lowered = Doubling(tier)
    block = inputs_of(values_of(0))
    block[:4].view(np.int32)[0] = KEY.tokens + 1
    with pytest.raises(ValueError, match="at most"):
        tier.submit(lowered.batch, block)
    lowered.run()
    tier.free(lowered.y)


@devices
def test_slots_are_used_again(tier):
    """There is memory for the inputs of as many steps as were ever in flight together."""
    lowered, submissions = Doubling(tier), tier._submissions
    made = []
    new_slot = submissions._new_slot
    submissions._new_slot = lambda batch: made.append(batch) or new_slot(batch)
    for _ in range(4):
        for fence in [tier.submit(lowered.batch, inputs_of(values_of(n))) for n in range(3)]:
            tier.wait(fence)
    del submissions._new_slot
    assert len(made) <= 3
    tier.free(lowered.y)


def test_batches_follow_a_growing_scratch(tier):
    """A batch lowered for a small step still runs after a large one moved what all share."""
    first, largest = Doubling(tier), ShapeKey(2000, 0)
    first.run()
    y = tier.alloc(GRAPH.buffers["y"], largest.tokens * WIDTH * 4)
    large = tier.lower(GRAPH, {"y": y}, largest, input_layout(GRAPH, largest))
    first.run(4)
    assert large.bucket == largest
    assert buffer_bytes(GRAPH.buffers["y"], largest) == y.nbytes
    tier.free(y)
    tier.free(first.y)


@devices
def test_opcodes_without_a_rule_are_named(tier, monkeypatch):
    """Lowering refuses what there is no rule for before anything runs."""
    absent = next(iter(GRAPH.nodes)).opcode
    rules: dict[Opcode, Any] = {op: rule for op, rule in RULES.items() if op is not absent}
    monkeypatch.setattr("accel.packets.rules.RULES", rules)
    with pytest.raises(UnsupportedOp, match=absent.name):
        tier.lower(GRAPH, {}, KEY, LAYOUT)
