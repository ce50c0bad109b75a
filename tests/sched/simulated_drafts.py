"""Sessions that may draft, by costs that are given: the policy is asked as the engine asks it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np

from reference.sched.cost import Load, StepCost
from reference.sched.draft_history import DraftHistory
from reference.sched.drafts import FIRST_DRAFTS, DraftPolicy

PROMPT = 32


@dataclass(frozen=True)
class Costs:
    """Milliseconds of a step of one token, of each further sequence, of each row that verifies a
    draft, of the host between two rounds, of a draft, of each further sequence that has one, of
    each token that drafts read late, and of the first round after a plain step in addition. Steps
    take ``longer`` of their time more behind a thousand tokens, and the first round of each size (a
    power of two of rows) ``built`` more. ``max_drafts`` drafts fit a round. A block reads what is
    ``ring`` tokens old beside plain steps, which take ``kept`` of their time more if it follows a
    sequence; prompts that it follows take as much more as reading them. Drafts from the prompt have
    a ``guess`` at this part of the positions, in stretches; None for drafts that are computed."""

    plain: float
    sequence: float
    row: float
    host: float
    draft: float
    drafts: float = 0.0
    late: float = 0.0
    begin: float = 0.0
    longer: float = 0.0
    built: float = 0.0
    max_drafts: int = 3
    ring: int = 128
    kept: float = 0.01
    guess: float | None = None

    def step(self, running: int, drafted: int, at: float) -> float:
        usual = self.plain + self.sequence * (running - 1)
        return usual * (1 + self.longer * at / 1000) + self.row * drafted

    def drafting(self, sequences: int, most: int) -> float:
        each = self.draft + self.drafts * (sequences - 1)
        return self.host + each * most


def fixed(drafts: int) -> type[DraftPolicy]:
    """A policy that always drafts as many, whatever is noted."""

    def nothing(self: DraftPolicy, *noted: object, **named: object) -> None:
        pass

    class Fixed(DraftPolicy):
        note_plain = note_round = note_gain = nothing  # type: ignore[assignment]

        def draft_count(self, own: DraftHistory, running: int, limit: int, unread: int = 0) -> int:
            return min(limit, drafts)

        def should_begin(self, *asked: object, **named: object) -> bool:
            return drafts > 0

    return Fixed


@dataclass(eq=False)
class Answer:
    """A sequence of ``left`` tokens more, of which the drafter has not read ``late``. It
    ``follows`` the sequence, and can draft once ``waits`` more steps have kept hidden states."""

    own: DraftHistory
    known: int
    left: int
    follows: bool
    lockstep: bool = False
    late: int = PROMPT
    waits: int = 0
    right: list[bool] = field(default_factory=list)


class Session:
    """Turns of ``together`` answers of ``length`` tokens. A draft of position n, counted
    over all turns, is right with the chance ``right(n)``. Measured times differ by ``noise`` from
    those that are usual. ``usual`` are the milliseconds of a turn without drafts, ``plain`` those
    of all, ``drafted`` are the drafts of each turn."""

    def __init__(
        self, costs: Costs, together: int, length: int, right: Callable[[int], float],
        policy: type[DraftPolicy] = DraftPolicy, seed: int = 0, noise: float = 0.03,
    ) -> None:  # fmt: skip
        self.costs, self.together, self.length, self.right = costs, together, length, right
        self.cost = StepCost()
        self.policy = policy(self.cost)
        self.random = Random(seed)
        self.noise = noise
        self.now = self.plain = 0.0
        self.waits = False
        self.reads = costs.guess is None and costs.late > 0
        self.drafted: list[int] = []
        self.sizes: set[int] = set()
        self.prompt = 2.5 * costs.plain * together
        self.usual = self.prompt + sum(costs.step(together, 0, PROMPT + at) for at in range(length))

    def run(self, turns: int) -> float:
        """The speed against plain steps."""
        for _ in range(turns):
            self.turn()
        return self.plain / self.now

    def noisy(self, milliseconds: float) -> float:
        held_up = 5.0 if self.random.random() < 0.01 else 1.0
        return milliseconds * self.random.uniform(1 - self.noise, 1 + self.noise) * held_up

    def turn(self) -> None:
        costs, policy, together = self.costs, self.policy, self.together
        policy.length = PROMPT
        self.begin = len(self.drafted) * self.length
        self.cost.observe(Load(PROMPT * together, 0), self.prompt / 1e3)
        self.plain += self.usual
        self.now += self.prompt
        self.drafted.append(0)
        answers = [
            Answer(
                policy.new_history(0),
                PROMPT,
                self.length,
                self.reads and policy.should_follow(0, together, costs.max_drafts, PROMPT),
            )
            for _ in range(together)
        ]
        read = PROMPT * sum(one.follows for one in answers)
        if read:
            self.now += costs.late * read
            policy.note_prompt(together, read)
        while answers:
            self.step(answers)
            for one in answers:
                if one.left <= 0:
                    policy.forget(one.own)
            answers = [one for one in answers if one.left > 0]

    def count(self, one: Answer, running: int) -> int:
        """How many drafts an answer gets in the next step."""
        policy, most = self.policy, self.costs.max_drafts
        there = not one.lockstep or self.has_draft(one)
        self.waits = self.waits or not there
        one.lockstep = there and (one.lockstep or self.begins(one, running))
        count = min(policy.draft_count(one.own, running, most), one.left - 1) if one.lockstep else 0
        if not count:
            one.own.interrupt()
            one.lockstep = False
        return count

    def begins(self, one: Answer, running: int) -> bool:
        policy = self.policy
        if self.costs.guess is not None:
            tokens = np.arange(one.known, dtype=np.int32)
            draft = self.draft(one)[:FIRST_DRAFTS]
            if not policy.compare_shadow_drafts(one.own, tokens, draft, running) or not draft:
                return False
        unread = 0 if one.follows or not self.reads else one.late
        worth = policy.should_begin(one.own, one.known, running, self.costs.max_drafts, unread)
        if not self.reads:
            return worth
        if not worth:
            one.follows = one.follows and not policy.given_up(one.own)
        elif not one.follows:
            one.follows, one.waits = True, 2
        return worth and not one.waits

    def has_draft(self, one: Answer) -> bool:
        guess = self.costs.guess
        return guess is None or one.known % 40 < 40 * guess

    def draft(self, one: Answer) -> list[int]:
        """Drafts of an answer, whose token at each position is the position itself."""
        if not self.has_draft(one):
            return []
        return [
            at if self.is_right(one, at) else -1
            for at in range(one.known, one.known + self.costs.max_drafts)
        ]

    def is_right(self, one: Answer, at: int) -> bool:
        """Whether the draft of an answer for a position is right: always the same."""
        while len(one.right) <= at - PROMPT:
            one.right.append(self.random.random() < self.right(self.begin + len(one.right)))
        return one.right[at - PROMPT]

    def read(self, answers: list[Answer]) -> int | None:
        """The tokens that the block reads beside a plain step; None if it follows no answer."""
        followed = [one for one in answers if self.reads and one.follows]
        late = [one for one in followed if one.late >= self.costs.ring]
        read = sum(one.late for one in late)
        for one in late:
            one.late = 0
        return read if followed else None

    def step(self, answers: list[Answer]) -> None:
        costs, policy, running = self.costs, self.policy, len(answers)
        at = policy.length = sum(one.known for one in answers) / running
        self.waits = False
        counts = [self.count(one, running) for one in answers]
        if self.waits:
            self.now += costs.host
            policy.note_no_drafts(running, costs.host / 1e3)
        usual = costs.step(running, sum(counts), at)
        read = None if any(counts) else self.read(answers)
        if read is not None:
            usual += costs.kept * usual + costs.late * read
        self.now += usual
        step = self.noisy(usual) / 1e3
        self.cost.observe(Load(running + sum(counts), 0), step)
        if not any(counts):
            policy.note_plain(running, step, read)
            for one in answers:
                one.known, one.left, one.late = one.known + 1, one.left - 1, one.late + 1
                one.waits = max(0, one.waits - 1)
            return
        drafting = [one for one, count in zip(answers, counts, strict=True) if count]
        others = costs.drafting(len(drafting), max(counts)) if costs.guess is None else costs.host
        others += costs.late * sum(one.late for one in drafting)
        unread = sum(one.late for one in drafting if self.reads and not one.own.rounds)
        others += costs.begin * any(not one.own.rounds for one in drafting)
        size = (running + sum(counts)).bit_length()
        if size not in self.sizes:
            self.sizes.add(size)
            others += costs.built
        self.now += others
        self.drafted[-1] += sum(counts)
        seconds = step + self.noisy(others) / 1e3
        first = any(not one.own.rounds for one in drafting)
        policy.note_round(max(counts), len(drafting), running, seconds, first=first, read=unread)
        for one, count in zip(answers, counts, strict=True):
            gained = 1
            while gained <= count and self.is_right(one, one.known + gained - 1):
                gained += 1
            one.known, one.left = one.known + gained, one.left - gained
            if not count:
                one.late += 1
                one.waits = max(0, one.waits - 1)
                continue
            one.late = 0
            one.own.note(gained, count, len(drafting))
            policy.note_gain(one.own, gained, running)
            if one.left > 0 and not policy.draft_count(one.own, running, costs.max_drafts):
                policy.give_up(one.own, one.known)
                one.lockstep = False
