"""Waiting for steps that follow each other, where sleeps take longer than they were to."""

from dataclasses import dataclass, field

import pytest

from accel.packets import in_flight
from accel.packets.in_flight import CompletionWaiter, Pace

OVER = 80e-6
"""What a sleep takes beside the time it was to take."""


@dataclass
class Clock:
    """Stands in for the module ``time``. To be asked takes it ``asking`` seconds."""

    now: float = 1.0
    asking: float = 0.0
    asked: int = 0

    def monotonic(self) -> float:
        self.now += self.asking
        self.asked += 1
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + OVER


@dataclass
class Step:
    """Ends at ``end`` by a clock."""

    clock: Clock
    submitted: float
    end: float
    pace: Pace

    @property
    def done(self) -> bool:
        return self.clock.now >= self.end


@dataclass
class Device:
    """Runs steps of ``seconds`` one after the other."""

    clock: Clock
    seconds: float
    pace: Pace = field(default_factory=Pace)
    free_at: float = 0.0

    def submit(self) -> Step:
        submitted = self.clock.now
        self.free_at = max(submitted, self.free_at) + self.seconds
        return Step(self.clock, submitted, self.free_at, self.pace)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(in_flight, "time", made)
    return made


def run(device: Device, waiting: CompletionWaiter, steps: int, host: float) -> list[float]:
    """One step is submitted ahead of the one that is waited for, and ``host`` seconds go by for
    each: how late every end was seen."""
    clock, late = device.clock, []
    ahead = device.submit()
    for _ in range(steps):
        clock.now += host
        step, ahead = ahead, device.submit()
        assert waiting.until_done(step, 1.0)
        late.append(clock.now - step.end)
    return late


@pytest.mark.parametrize("seconds", [200e-6, 555e-6, 1.7e-3, 20e-3])
@pytest.mark.parametrize("busy", [0.1, 0.6])
def test_ends_are_seen_in_time(seconds, busy, clock):
    """However long a sleep takes: no later than that, but for what slow steps before it left."""
    late = run(Device(clock, seconds), CompletionWaiter(), 200, busy * seconds)
    assert max(late[50:]) < 1.5 * OVER + 0.05 * seconds


def test_the_device_is_never_without_a_step(clock):
    """Of short steps, of which the host needs more than half the time itself."""
    device = Device(clock, 555e-6)
    began = clock.now
    run(device, CompletionWaiter(), 400, 330e-6)
    assert device.free_at - began < 403 * device.seconds + 5e-3


def test_a_pace_that_was_slow_is_found_again(clock):
    """Steps become ten times as short."""
    waiting, device = CompletionWaiter(), Device(clock, 5e-3)
    run(device, waiting, 20, 1e-4)
    device.seconds = 5e-4
    assert max(run(device, waiting, 100, 1e-4)[60:]) < 1.5 * OVER + 0.05 * device.seconds


@pytest.mark.parametrize("slow", [3e-3, 30e-3])
def test_slow_first_steps_delay_no_later_one(slow, clock):
    """Steps of two kinds in turns; the first two of each take longer."""
    waiting, late = CompletionWaiter(), []
    devices = {usual: Device(clock, slow) for usual in (2e-4, 2.6e-3)}
    for number in range(8):
        for usual, device in devices.items():
            device.seconds = slow if number < 2 else usual
            clock.now += 1e-4
            step = device.submit()
            assert waiting.until_done(step, 1.0)
            late.append(clock.now - step.end)
    assert max(late[4:]) < 1.5 * OVER + 0.05 * 2.6e-3


def test_most_of_a_long_step_is_slept_through(clock):
    """The host asks a few times, not all the while."""
    asked = 0
    device = Device(clock, 20e-3)

    class Counted(Step):
        @property
        def done(self) -> bool:
            nonlocal asked
            asked += 1
            return super().done

    waiting = CompletionWaiter()
    for _ in range(20):
        step = device.submit()
        asked = 0
        assert waiting.until_done(Counted(clock, step.submitted, step.end, step.pace), 1.0)
    assert asked <= 2 + 0.1 * device.seconds / OVER


def test_a_step_that_does_not_end(clock):
    """It is given up after the time it has."""
    waiting = CompletionWaiter()
    assert not waiting.until_done(Step(clock, clock.now, clock.now + 2.0, Pace()), 1.0)
    assert clock.now < 2.1


@pytest.mark.parametrize("seconds", [1.2e-3, 2.6e-3, 4.5e-3])
def test_an_eager_host_sees_the_end_at_once(seconds, clock):
    """It sleeps through most of a step and then asks all the while, for ``EAGER_SECONDS``. A step
    that takes longer than usual is asked for as seldom as any other behind that."""
    waiting, device = CompletionWaiter(), Device(clock, seconds)
    clock.asking, late = 1e-6, []
    for _ in range(20):
        step = device.submit()
        assert waiting.until_done(step, 1.0, eager=True)
        late.append(clock.now - step.end)
    assert max(late[5:]) < 4 * clock.asking
    device.seconds, asked = 20e-3, clock.asked
    assert waiting.until_done(device.submit(), 1.0, eager=True)
    polls = in_flight.EAGER_SECONDS / clock.asking + device.seconds / OVER
    assert clock.asked - asked < 1.1 * polls
