"""Steps that are left before they end: by a word that packets look at, by a timeout, by a reset."""

from itertools import pairwise

import pytest

from accel.amd import launcher, pm4
from accel.amd.sim.fake_kernel import FakeKernel
from accel.amd.sim.fake_machine import Behaviour
from accel.amd.tier import AmdFence, AmdTier
from contract.errors import DeviceLost
from harness.parity.execute import compare
from tests.amd.test_tier import DEPENDENT


class Left(Exception):
    """The caller went away."""


class Slow:
    """A tier whose queue does a packet at a time once a step was submitted."""

    def __init__(self, tier: AmdTier, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tier = tier
        self._kernel = kernel
        self._patch = monkeypatch
        (self.queue,) = kernel.machine.gpu.queues.values()

    @property
    def launches(self) -> int:
        """That have begun."""
        return self.queue.processor.launches

    def interrupted(self, looks: int) -> tuple[int, int]:
        """Launches of a step before and after it was cancelled; it had gone ``looks`` packets."""
        submit, launches = AmdTier.submit, []

        def slow(tier: AmdTier, *args: object) -> AmdFence:
            self._kernel.behaviour.packets = 1
            launches.append(self.launches)
            return submit(tier, *args)  # type: ignore[arg-type]

        def leave(tier: AmdTier, fence: AmdFence, timeout: float | None = None) -> None:
            for _ in range(looks):
                self._kernel.idle()
            launches.append(self.launches)
            assert tier._runtime.queue.cancel(60)
            assert fence.done
            raise Left

        with self._patch.context() as patch:
            patch.setattr(AmdTier, "submit", slow)
            patch.setattr(AmdTier, "wait", leave)
            with pytest.raises(Left):
                compare(self.tier, DEPENDENT)
        self._kernel.behaviour.packets = None
        before, at, after = *launches, self.launches
        return at - before, after - before


@pytest.fixture
def slow(open_amd, name, monkeypatch) -> Slow:
    """Looks at the word before every level."""
    monkeypatch.setattr(launcher, "GUARDED_LEVELS", 1)
    kernel = FakeKernel(Behaviour(checked=True))
    return Slow(open_amd(kernel, name), kernel, monkeypatch)


def test_a_step_is_cancelled_at_any_point(slow):
    """The launches of the level that was begun still run, the others do not; the fence comes, and
    the next step is whole and right."""
    assert compare(slow.tier, DEPENDENT) == {}
    found = [slow.interrupted(looks) for looks in range(0, 80, 8)]
    whole = max(after for _, after in found)
    assert all(at <= after for at, after in found)
    assert all(earlier <= later for (_, earlier), (_, later) in pairwise(found))
    assert {after for _, after in found} >= {0, 1, whole}
    assert compare(slow.tier, DEPENDENT) == {}


def test_long_levels_are_looked_into(open_amd, monkeypatch):
    """COND_EXEC leaves out 2^14 words at most; shorter here."""
    tier = open_amd(FakeKernel(Behaviour(checked=True)))
    guarded: list[int] = []
    guard = pm4.Writer.guard

    def noted(self: pm4.Writer, first: int, address: int) -> int:
        guarded.append(len(self.words) - first)
        return guard(self, first, address)

    monkeypatch.setattr(pm4.Writer, "guard", noted)
    monkeypatch.setattr(launcher, "GUARDED_WORDS", 8)
    assert compare(tier, DEPENDENT) == {}
    launches = len(guarded) // 2
    assert launches > 1
    assert max(guarded) < 100


def test_without_a_look_everything_runs(slow, monkeypatch):
    """Negative control."""
    whole = slow.interrupted(80)[1]
    monkeypatch.setattr(pm4.Writer, "guard", lambda self, first, address: len(self.words))
    assert slow.interrupted(8) != (whole, whole)
    assert slow.interrupted(8)[1] == whole


def test_a_tier_closed_in_the_midst_of_a_step(slow, monkeypatch):
    """It does not wait for what nobody wants, and gives all back."""
    launches = slow.launches
    free = AmdTier.free

    def leave(tier: AmdTier, fence: AmdFence, timeout: float | None = None) -> None:
        raise Left

    monkeypatch.setattr(AmdTier, "wait", leave)
    monkeypatch.setattr(AmdTier, "free", lambda tier, buffer: None)
    slow._kernel.behaviour.packets = 1
    with pytest.raises(Left):
        compare(slow.tier, DEPENDENT)
    slow.tier.close()
    monkeypatch.setattr(AmdTier, "free", free)
    assert slow.launches - launches < 4


@pytest.mark.parametrize("hangs", [False, True])
def test_a_step_that_takes_too_long(open_amd, name, monkeypatch, hangs):
    """What had not begun is left out, or the queue does not move at all: the device is lost either
    way, everything comes back, and the next one works."""
    kernel = FakeKernel()
    tier = open_amd(kernel, name)
    monkeypatch.setattr("accel.amd.queue.GRACE_SECONDS", 0.05)
    wait = AmdTier.wait

    def impatient(tier: AmdTier, fence: AmdFence, timeout: float | None = None) -> None:
        kernel.behaviour.packets = 0 if hangs else 1
        wait(tier, fence, 0)

    submit = AmdTier.submit

    def held(tier: AmdTier, *args: object) -> AmdFence:
        kernel.behaviour.packets = 0
        return submit(tier, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(AmdTier, "wait", impatient)
        patch.setattr(AmdTier, "submit", held)
        with pytest.raises(DeviceLost, match="did not end within 0 s"):
            compare(tier, DEPENDENT)
    with pytest.raises(DeviceLost, match="did not end"):
        compare(tier, DEPENDENT)
    assert kernel.machine.gpu.queues == {}
    tier.close()
    assert kernel.leaked == []
    kernel.behaviour.packets = None
    with AmdTier(kernel=kernel, tier=name) as another:
        assert compare(another, DEPENDENT) == {}
