"""Every object Metal makes is refused once: the error is the contract's, nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from accel.metal.sim.fake_metal import FakeMetal
from accel.metal.tier import MetalTier
from contract.dtypes import Q4_K, Q8_0
from contract.errors import OutOfMemory, TierError, TierUnavailable
from contract.ir.nodes import BufferDecl, BufferKind
from harness.parity.cases import Case, all_cases
from harness.parity.execute import compare
from tests.doubling import Doubling, inputs_of, run_doubling, values_of
from tests.metal.conftest import MakeMac
from tests.quant.samples import random_blocks

WEIGHTS = next(c for c in all_cases(1) if c.opcode.name == "MATMUL" and c.dtype == Q4_K)


class Refusing:
    """Refuses the object ``number`` from now on; ``refused`` is the selector."""

    def __init__(self, mac: FakeMetal, number: int) -> None:
        self.number = number
        self.refused = ""
        mac.behaviour.refuse = self

    def __call__(self, selector: str) -> bool:
        self.number -= 1
        if self.number == -1:
            self.refused = selector
        return self.number == -1


def opened(mac: FakeMetal) -> None:
    MetalTier(metal=mac.metal).close()


def stepped(tier: MetalTier) -> None:
    """Lowered, run twice at a time and forgotten."""
    lowered = Doubling(tier)
    try:
        fences = [tier.submit(lowered.batch, inputs_of(values_of(n)), ("y",)) for n in range(2)]
        for fence in fences:
            tier.wait(fence)
    finally:
        tier.free(lowered.y)


def refused(call: Callable[..., None], *arguments: object) -> TierError | None:
    """The error of a call, if it has one."""
    try:
        call(*arguments)
    except TierError as error:
        # Its frames hold what was lowered.
        return error.with_traceback(None)
    return None


def in_use(tier: MetalTier) -> int:
    """Bytes of all allocations."""
    return sum(arena.nbytes - arena.ranges.free_bytes for arena in tier._memory._arenas)


def test_opening(make_mac: MakeMac) -> None:
    """Whatever is not made while a tier opens, the tier is not available, and says why."""
    met = set()
    for number in count():
        mac = make_mac()
        refusing = Refusing(mac, number)
        error = refused(opened, mac)
        assert (mac.problems, mac.leaked, mac.taken) == ([], [], 0), refusing.refused
        if not refusing.refused:
            break
        assert isinstance(error, TierUnavailable)
        assert "Apple M1 (simulated)" in error.reason or "made no object" in error.reason
        met.add(refusing.refused)
    assert {
        *("newCommandQueue", "newSharedEvent", "newBufferWithLength:options:", "commandBuffer"),
        *("newLibraryWithSource:options:error:", "newFunctionWithName:", "computeCommandEncoder"),
        "newComputePipelineStateWithDescriptor:options:reflection:error:",
    } <= met


BY_STEPS = {
    *("newIndirectCommandBufferWithDescriptor:maxCommandCount:options:", "commandBuffer"),
    *("indirectComputeCommandAtIndex:", "computeCommandEncoder", "blitCommandEncoder"),
}
BY_WEIGHTS = {
    *("newBufferWithLength:options:", "newLibraryWithSource:options:error:", "new"),
    *("commandBuffer", "computeCommandEncoder"),
}


@pytest.mark.parametrize(
    ("what", "requested"), [("steps", BY_STEPS), ("weights", BY_WEIGHTS)], ids=["steps", "weights"]
)
def test_steps_and_weights(make_mac: MakeMac, what: str, requested: set[str]) -> None:
    """An error of the contract, and the tier goes on as if nothing had been asked of it."""
    met = set()
    for number in count():
        mac = make_mac()
        with MetalTier(metal=mac.metal) as tier:
            refusing = Refusing(mac, number)
            error = refused(done, tier, what, WEIGHTS)
            if not refusing.refused:
                break
            assert isinstance(error, OutOfMemory) or "Apple M1 (simulated)" in str(error)
            met.add(refusing.refused)
            done(tier, what, WEIGHTS)
            run_doubling(tier)
        assert (mac.problems, mac.leaked, mac.taken) == ([], [], 0), refusing.refused
    assert requested <= met


@pytest.mark.parametrize("selector", ["commandBuffer", "blitCommandEncoder"])
def test_steps_that_were_not_committed_leave_nothing(make_mac: MakeMac, selector: str) -> None:
    """Neither recordings nor the memory of outputs pile up."""
    mac = make_mac()
    with MetalTier(metal=mac.metal) as tier:
        lowered = Doubling(tier)
        lowered.run()
        held = [arena.ranges.free_bytes for arena in tier._memory._arenas]
        mac.behaviour.refuse = lambda asked: asked == selector
        for _ in range(3):
            with pytest.raises(OutOfMemory, match="a step"):
                tier.submit(lowered.batch, inputs_of(values_of(0)), ("y",))
        mac.behaviour.refuse = lambda asked: False
        assert len(lowered.batch.launch.made) == 1
        assert [arena.ranges.free_bytes for arena in tier._memory._arenas] == held
        lowered.run(2)
        tier.free(lowered.y)
    assert (mac.problems, mac.leaked) == ([], [])


COMMANDS = "newIndirectCommandBufferWithDescriptor:maxCommandCount:options:"


@pytest.mark.parametrize("selector", [COMMANDS, "indirectComputeCommandAtIndex:"])
def test_commands_that_cannot_be_made_leave_nothing(make_mac: MakeMac, selector: str) -> None:
    """The memory of their arguments is free again."""
    mac = make_mac()
    with MetalTier(metal=mac.metal) as tier:
        lowered = Doubling(tier)
        before = in_use(tier)
        mac.behaviour.refuse = lambda asked: asked == selector
        with pytest.raises(OutOfMemory, match="a step"):
            tier.submit(lowered.batch, inputs_of(values_of(0)))
        assert in_use(tier) == before
        mac.behaviour.refuse = lambda asked: False
        lowered.run(2)
        tier.free(lowered.y)
    assert (mac.problems, mac.leaked) == ([], [])


@pytest.mark.parametrize("selector", ["commandBuffer", "newFunctionWithName:"])
def test_weights_that_cannot_be_arranged_leave_nothing(make_mac: MakeMac, selector: str) -> None:
    """Neither the stored bytes nor the arranged ones."""
    mac = make_mac()
    decl = BufferDecl("w", BufferKind.WEIGHT, Q8_0, (64, 256), "w")
    with MetalTier(metal=mac.metal) as tier:
        before = in_use(tier)
        mac.behaviour.refuse = lambda asked: asked == selector
        with pytest.raises(OutOfMemory, match="w "):
            tier.upload(decl, random_blocks(Q8_0, 64, 256, 5))
        assert in_use(tier) == before
        mac.behaviour.refuse = lambda asked: False
    assert (mac.problems, mac.leaked) == ([], [])


def done(tier: MetalTier, what: str, case: Case) -> None:
    """A step, or a matrix uploaded and multiplied by."""
    if what == "steps":
        stepped(tier)
    else:
        assert compare(tier, case) == {}
