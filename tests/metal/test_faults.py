"""Every object Metal makes is refused once: the error is the contract's, nothing is left behind."""

from collections.abc import Callable
from functools import partial
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


def test_opening(make_mac):
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
def test_steps_and_weights(make_mac, what, requested):
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


@pytest.mark.parametrize(
    ("what", "selector"),
    [
        *(("steps", selector) for selector in sorted(BY_STEPS - {"computeCommandEncoder"})),
        *(("weights", selector) for selector in ("commandBuffer", "newFunctionWithName:")),
    ],
)
def test_what_is_refused_over_and_over_leaves_nothing(make_mac, what, selector):
    """Neither recordings, arguments and outputs of steps nor stored or arranged bytes pile up."""
    mac, decl = make_mac(), BufferDecl("w", BufferKind.WEIGHT, Q8_0, (64, 256), "w")
    with MetalTier(metal=mac.metal) as tier:
        lowered, held = Doubling(tier), []
        upload = partial(tier.upload, decl, random_blocks(Q8_0, 64, 256, 5))
        submit = partial(tier.submit, lowered.batch, inputs_of(values_of(0)), ("y",))
        attempt = upload if what == "weights" else submit
        mac.behaviour.refuse = lambda asked: asked == selector
        for _ in range(3):
            with pytest.raises(OutOfMemory, match="a step" if what == "steps" else "w "):
                attempt()
            held.append(in_use(tier))
        assert held[0] == held[1] == held[2]
        mac.behaviour.refuse = lambda asked: False
        lowered.run(2)
        tier.free(lowered.y)
    assert (mac.problems, mac.leaked) == ([], [])


def done(tier: MetalTier, what: str, case: Case) -> None:
    """A step, or a matrix uploaded and multiplied by."""
    if what == "steps":
        stepped(tier)
    else:
        assert compare(tier, case) == {}
