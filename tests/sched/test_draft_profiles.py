"""The policy finds the gain of drafts, and loses little where there is none, by simulated costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from statistics import mean

import pytest

from reference.sched.cost import Load, StepCost
from reference.sched.drafts import AcceptedTokens, DraftPolicy

ANSWERS, TOKENS, PROMPT, MOST = 8, 128, 32, 3
SEEDS = range(5)


@dataclass(frozen=True)
class Profile:
    """Milliseconds of a plain step, of each row that a step has more, of the host between two
    rounds, of a draft, and of the first round after a plain step in addition. ``right`` is the
    chance of a draft at a position to be right."""

    plain: float
    row: float
    host: float
    draft: float
    begin: float
    right: Callable[[int], float]
    together: int = 1

    def step(self, rows: int) -> float:
        return self.plain + self.row * (rows - self.together)


H200 = Profile(2.07, 0.21, 1.15, 0.32, 1.0, lambda position: 0.8)
MIXTURE = Profile(1.73, 0.41, 1.3, 0.25, 1.0, lambda position: 0.75)
DRAFT_MODEL = Profile(2.1, 0.1, 0.6, 0.9, 1.0, lambda position: 0.7)
NATIVE = Profile(20.0, 3.9, 0.4, 3.0, 2.0, lambda position: 0.8)
PROFILES = {
    "H200": H200,
    "H200, four sequences": replace(H200, together=4),
    "H200, rarely right": replace(H200, right=lambda position: 0.5),
    "H200, never right": replace(H200, right=lambda position: 0.0),
    "H200, right in stretches": replace(H200, right=lambda at: 0.95 * (at // 200 % 2)),
    "mixture": MIXTURE,
    "draft model": DRAFT_MODEL,
    "draft model, never right": replace(DRAFT_MODEL, right=lambda position: 0.0),
    "native": NATIVE,
    "native, never right": replace(NATIVE, right=lambda position: 0.0),
}


class Forced(DraftPolicy):
    """Always drafts as many as there may be."""

    def count(self, own: AcceptedTokens, running: int, most: int) -> int:
        return most


class Simulation:
    """Answers of a profile, by a policy, as the engine asks it."""

    def __init__(self, profile: Profile, policy: type[DraftPolicy], length: int, seed: int) -> None:
        self.profile, self.length = profile, length
        self.cost = StepCost()
        self.policy = policy(self.cost)
        self.random = Random(seed)
        self.now = 0.0

    def run(self) -> float:
        """Milliseconds of all answers."""
        for answer in range(ANSWERS * TOKENS // self.length):
            self.answer(answer * self.length)
        return self.now

    def noisy(self, milliseconds: float) -> float:
        held_up = 5.0 if self.random.random() < 0.01 else 1.0
        return milliseconds * self.random.uniform(0.95, 1.1) * held_up

    def answer(self, begin: int) -> None:
        profile, policy, together = self.profile, self.policy, self.profile.together
        # Kernels are built for the first prompt and the first round.
        built = 0.0 if begin else 35 * profile.plain
        prefill = self.noisy(2.5 * profile.plain) + built
        self.cost.observe(Load(PROMPT * together, 0), prefill / 1e3)
        own = [AcceptedTokens() for _ in range(together)]
        known, lockstep = [PROMPT] * together, [False] * together
        follows = policy.follows(together, MOST)
        while sum(known) < together * (PROMPT + self.length):
            counts = [0] * together
            for n, sequence in enumerate(own):
                lockstep[n] = lockstep[n] or (
                    follows and policy.begins(sequence, known[n], together, MOST)
                )
                counts[n] = policy.count(sequence, together, MOST) if lockstep[n] else 0
                if lockstep[n] and not counts[n]:
                    sequence.interrupt()
                    lockstep[n] = False
            rows = together + sum(counts)
            step = profile.step(rows)
            seconds = self.noisy(step) / 1e3
            self.cost.observe(Load(rows, 0), seconds)
            if not any(counts):
                self.now += step
                policy.note_plain(together, seconds)
                known = [one + 1 for one in known]
                continue
            others = profile.host + profile.draft * max(counts)
            first = [not one.rounds for one, count in zip(own, counts, strict=True) if count]
            others += profile.begin * any(first)
            self.now += step + others
            noisy, built = self.noisy(others) + built, 0.0
            drafting = sum(count > 0 for count in counts)
            for n, (sequence, count) in enumerate(zip(own, counts, strict=True)):
                if not count:
                    known[n] += 1
                    continue
                right = 0
                while right < count and self.random.random() < profile.right(begin + known[n]):
                    right += 1
                known[n] += right + 1
                sequence.note(right + 1, count)
                policy.note(sequence, count, right + 1, together, seconds + noisy / 1e3, drafting)
                if not policy.count(sequence, together, MOST):
                    policy.give_up(sequence, known[n])
                    lockstep[n] = False


def speed(profile: Profile, policy: type[DraftPolicy], length: int, seed: int) -> float:
    """The speed against plain steps, of answers of ``length`` tokens."""
    run = Simulation(profile, policy, length, seed).run()
    return ANSWERS * TOKENS * profile.plain / run


@pytest.mark.parametrize("length", [TOKENS, ANSWERS * TOKENS])
@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_the_gain_of_drafts_is_found_and_little_lost(profile: Profile, length: int) -> None:
    found = [speed(profile, DraftPolicy, length, seed) for seed in SEEDS]
    assert min(found) >= 0.98
    assert mean(found) >= 0.95 * mean(speed(profile, Forced, length, seed) for seed in SEEDS)


@pytest.mark.parametrize("name", ["H200, never right", "draft model, never right"])
def test_trials_without_bounds_lose_more(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr("reference.sched.drafts.CREDIT_STEPS", 1e9)
    assert speed(PROFILES[name], DraftPolicy, TOKENS, 7) < 0.97
