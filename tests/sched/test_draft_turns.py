"""Turns of sessions that may draft, by simulated costs: never slower than plain steps by more than
a fiftieth and a few steps, and nine tenths of what the best fixed number of drafts gains."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from reference.sched.drafts import DraftPolicy
from tests.sched.simulated_drafts import Costs, Session, fixed

COSTS = {
    "two cores": Costs(20.0, 3.9, 3.9, 0.4, 3.0, 0.6, late=0.5, max_drafts=4),
    "H200": Costs(2.07, 0.15, 0.19, 0.5, 0.25, 0.03, late=0.01, max_drafts=5),
    "H200 mixture": Costs(1.66, 0.3, 0.43, 0.5, 0.19, 0.02, late=0.01),
    "H200 hybrid": Costs(2.12, 0.14, 0.19, 0.5, 0.21, 0.03, late=0.01),
    "draft model": Costs(2.1, 0.14, 0.1, 0.6, 0.9, 0.1, late=0.02, max_drafts=4, ring=1 << 30),
    "built late": Costs(2.07, 0.15, 0.19, 0.5, 0.25, 0.03, begin=1.0, longer=0.3, built=15.0),
}
SEQUENCES = (1, 4, 16)
LENGTHS = (8, 32, 128)
LONG_LENGTH = 1000
TOKENS = 256
"""Tokens of each sequence over all turns."""
LOST_STEPS = 8.0
"""The constant: how many plain steps may be lost besides."""
LONG_LOST_STEPS = 28.0
"""The same in turns of a thousand tokens: the first trial may come late, and drafts then read all
tokens before it."""
LEARNING_STEPS = 24.0
"""The constant: how many plain steps of the gain may be missed until it is found."""
SEEDS = range(3)

IN_EVERY_RUN = ("two cores", "H200", "draft model", "built late")
of_costs = pytest.mark.parametrize("costs", [COSTS[n] for n in IN_EVERY_RUN], ids=IN_EVERY_RUN)

Right = Callable[[int], float]
RIGHT: dict[str, Callable[[int], Right]] = {
    "never": lambda tokens: lambda at: 0.0,
    "0.2": lambda tokens: lambda at: 0.2,
    "0.5": lambda tokens: lambda at: 0.5,
    "0.8": lambda tokens: lambda at: 0.8,
    "more": lambda tokens: lambda at: 0.8 if at >= tokens // 2 else 0.2,
    "less": lambda tokens: lambda at: 0.2 if at >= tokens // 2 else 0.8,
}


def check_losses(costs: Costs, together: int, length: int, tokens: int) -> None:
    for name, right in RIGHT.items():
        session = Session(costs, together, length, right(tokens), DraftPolicy, len(name))
        session.run(tokens // length)
        lost = session.now - 1.02 * session.plain - costs.built * len(session.sizes)
        constant = LONG_LOST_STEPS if length == LONG_LENGTH else LOST_STEPS
        assert lost <= constant * costs.step(together, 0, 0), (name, session.drafted)


def check_gains(
    costs: Costs, together: int, length: int, tokens: int,
    checked: type[DraftPolicy] = DraftPolicy, seeds: Sequence[int] = SEEDS,
) -> None:  # fmt: skip
    """Of the fixed numbers those two are played with every seed that are best with the first."""
    turns = tokens // length
    for name in ("0.5", "0.8", "more", "less"):
        right = RIGHT[name](tokens)

        def of(
            policy: type[DraftPolicy], seeds: Sequence[int] = seeds, right: Right = right
        ) -> float:
            taken = []
            for seed in seeds:
                session = Session(costs, together, length, right, policy, seed)
                session.run(turns)
                taken.append(session.now)
            return mean(taken)

        plain = Session(costs, together, length, right).usual * turns
        policies = [fixed(drafts) for drafts in range(1, costs.max_drafts + 1)]
        likely = sorted(policies, key=lambda policy: of(policy, seeds[:1]))[:2]
        best = min(plain, *map(of, likely))
        missed = of(checked) - best / 0.9
        assert missed <= LEARNING_STEPS * costs.step(together, 0, 0), name


@pytest.mark.parametrize("together", SEQUENCES)
@of_costs
def test_little_is_lost_whatever_is_right(costs: Costs, together: int) -> None:
    for length in LENGTHS:
        check_losses(costs, together, length, TOKENS if together <= 4 else TOKENS // 2)


@pytest.mark.parametrize("seed", range(2))
def test_rounds_behind_a_short_prompt_are_not_compared_with_steps_behind_a_long_answer(
    seed: int,
) -> None:
    """Steps behind a thousand tokens take 1.3 times as long, a fifth of the drafts are right."""
    session = Session(COSTS["built late"], 1, LONG_LENGTH, lambda at: 0.2, DraftPolicy, seed)
    assert session.run(2) >= 0.98


@pytest.mark.parametrize("together", [1, 4])
@of_costs
def test_the_gain_of_the_best_fixed_number_is_found(costs: Costs, together: int) -> None:
    for length in LENGTHS:
        check_gains(costs, together, length, TOKENS)


@pytest.mark.parametrize("drafts", [0, 1])
def test_gains_that_a_fixed_number_misses_are_noticed(drafts: int) -> None:
    """The control: four drafts are faster, and nobody finds them."""
    costs = replace(COSTS["H200"], row=0.02)
    with pytest.raises(AssertionError, match=r"0\.[58]"):
        check_gains(costs, 1, 128, 4 * TOKENS, fixed(drafts))


@pytest.mark.long
@pytest.mark.parametrize("length", [32, LONG_LENGTH])
@pytest.mark.parametrize("together", [1, 4, 64])
@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_of_many_tokens_too(costs: Costs, together: int, length: int) -> None:
    check_losses(costs, together, length, 2 * LONG_LENGTH)
    if together <= 4:
        check_gains(costs, together, length, 2 * LONG_LENGTH, seeds=[0])


@pytest.mark.parametrize(("name", "together"), [("H200", 1), ("two cores", 1), ("H200 hybrid", 4)])
def test_an_agreement_of_four_fifths_is_used_in_the_first_or_second_turn(
    name: str, together: int
) -> None:
    for seed in range(6):
        session = Session(COSTS[name], together, 32, lambda at: 0.8, DraftPolicy, seed)
        session.run(2)
        assert sum(session.drafted) >= 16 * together


def test_sixty_four_sequences_draft_nothing() -> None:
    for costs in COSTS.values():
        session = Session(costs, 64, 32, lambda at: 0.8)
        session.run(1)
        assert session.drafted == [0]


class Uncharged(DraftPolicy):
    """Trials cost nothing."""

    def _earn(self, seconds: float, running: int) -> None:
        super()._earn(max(0.0, seconds), running)


def test_without_an_account_more_is_lost() -> None:
    """The control."""
    assert Session(COSTS["H200"], 1, 32, lambda at: 0.2, Uncharged).run(24) < 0.95


PROSE = Costs(3.0, 0.6, 1.2, 0.3, 0.0, built=15.0, max_drafts=11, guess=0.2)
COPY = replace(PROSE, guess=0.9)


def test_drafts_from_the_prompt_lose_nothing_of_the_first_answer_and_gain_where_it_repeats() -> (
    None
):
    """By costs of a small model on a processor, whose first step of each size is lowered."""
    prose = [Session(PROSE, 1, 213, lambda at: 0.7, DraftPolicy, seed).run(1) for seed in range(12)]
    assert min(prose) >= 0.98
    copies = [Session(COPY, 1, 213, lambda at: 0.97, DraftPolicy, seed).run(4) for seed in SEEDS]
    assert mean(copies) > 1.3
    device = replace(COPY, plain=2.0, sequence=0.14, row=0.1, built=0.0)
    for together, least in ((4, 2.0), (16, 1.3)):
        copies = [
            Session(device, together, 128, lambda at: 0.97, DraftPolicy, seed).run(4)
            for seed in SEEDS
        ]
        assert mean(copies) > least


@pytest.mark.parametrize("together", [1, 4, 16])
def test_drafts_from_the_prompt_lose_little_in_many_turns(together: int) -> None:
    for guess, right in ((0.2, 0.7), (0.5, 0.9), (0.9, 0.5)):
        for length in LENGTHS:
            costs = replace(PROSE, guess=guess)
            session = Session(costs, together, length, lambda at, part=right: part)
            session.run(TOKENS // length)
            assert session.now <= 1.02 * session.plain + LOST_STEPS * costs.step(together, 0, 0)


LONG_RUN = 4096
"""Tokens of a sequence over which what trials lose at the beginning is little."""


@st.composite
def any_sessions(draw: st.DrawFn) -> Session:
    """Any costs, in plain steps of a millisecond: more rows that take nothing and such that take
    four steps for each draft of all sequences. Drafts are always, sometimes and never right, and in
    stretches."""
    together = draw(st.sampled_from((1, 1, 4, 16)))
    costs = Costs(
        plain=1.0, sequence=draw(st.sampled_from((0.0, 0.1))),
        row=draw(st.floats(0, 4)) / together, host=draw(st.floats(0, 3)),
        draft=draw(st.floats(0, 3)), begin=draw(st.floats(0, 3)),
        longer=draw(st.sampled_from((0.0, 0.3))), built=draw(st.sampled_from((0.0, 5.0))),
        guess=draw(st.sampled_from((None, 0.1, 0.5, 1.0))),
    )  # fmt: skip
    often, seldom = draw(st.floats(0, 1)), draw(st.floats(0, 1))
    stretch, length = draw(st.integers(10, 1000)), draw(st.sampled_from((32, 128, LONG_RUN)))

    def right(at: int) -> float:
        return often if at // stretch % 2 else seldom

    return Session(costs, together, length, right, DraftPolicy, draw(st.integers(0, 99)))


@settings(
    max_examples=12, deadline=None, derandomize=True,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)  # fmt: skip
@given(session=any_sessions())
def test_never_much_slower_than_plain_steps(session: Session) -> None:
    """Whatever steps, rows and drafts take and how many are right, trials included."""
    assert session.run(LONG_RUN // session.length) >= 0.98
