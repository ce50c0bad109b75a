"""No token of an agent's session is computed twice, on dense, hybrid and sliding-window models.

Counted is what the prefix cache could have given: the tokens that a prompt has in common with the
latest sequence of its session. The last token of a prompt is always computed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from contract.arithmetic import PAGE_TOKENS
from contract.dtypes import I12
from contract.tier import Tier
from harness.tiers import open_tier
from reference.engine import Engine, EngineOptions
from reference.limits import Limits, pages_for
from reference.memory.state_slots import StateSlots
from reference.model.open import open_model
from reference.runner import ModelRunner
from tests.engine.agent_sessions import Reuse, Session, ask
from tests.families_table import GEMMAS, HYBRIDS
from tests.named_tiers import quick_tier
from tests.needs import need_device

SHAPES: dict[str, dict[str, Any]] = {
    "dense": {"architecture": "qwen3", "quant": "q4_k_m"},
    "hybrid": HYBRIDS["qwen35"] | {"quant": "q8_0"},
    "sliding-window": GEMMAS["gemma3"] | {"quant": "q8_0"},
}
INTERVAL = 64
SYSTEM, RESULT, ANSWER, TURNS = 700, 40, 24, 8
SHARED_PAGE = PAGE_TOKENS + 1
"""Most tokens computed twice in a turn that only adds to a session: those of the page that the
answer did not fill, and the last token of the answer but one where the state was saved before."""


@contextmanager
def opened(
    path: Path, *, states: int = 64, cache: bool = True, context: int = 2048,
    interval: int = INTERVAL, step: int = 256, tier: Callable[[], Tier] = quick_tier,
) -> Iterator[tuple[Engine, Reuse]]:  # fmt: skip
    """An engine on a model, and what tells of its cache."""
    model = open_model(path)
    slots = 2
    limits = Limits(
        slots, context, slots * pages_for(context), kv_dtype=I12, step_tokens=step + slots,
        step_rows=step, saved_states=states, state_interval=interval,
    )  # fmt: skip
    reuse = Reuse()
    with model.file, tier() as opened_tier, ModelRunner(model, opened_tier, limits) as runner:
        options = EngineOptions(prefix_cache=cache, copy_pages=cache)
        yield Engine(runner, options, observer=reuse), reuse


@pytest.fixture(params=SHAPES)
def path(request, synthetic_model) -> Path:
    return synthetic_model(**SHAPES[request.param])


@pytest.fixture
def hybrid(synthetic_model) -> Path:
    return synthetic_model(**SHAPES["hybrid"])


def grown(engine: Engine, reuse: Reuse, number: int = 1, turns: int = TURNS) -> Session:
    session = Session(engine, reuse, number, seed=number)
    session.read(SYSTEM)
    for _ in range(turns):
        session.read(RESULT)
        session.answer(ANSWER)
    return session


def check_cold(path: Path, session: Session, answers: Callable[[int], bool] = bool) -> None:
    """The logits of answers are those of an engine that caches nothing."""
    with opened(path, cache=False) as (engine, _):
        for number, prompt in enumerate(session.prompts):
            if answers(number):
                _, digest = ask(engine, prompt, ANSWER, id=number)
                assert digest == session.digests[number], f"turn {number}"


def test_a_session_that_grows(path):
    with opened(path) as (engine, reuse):
        session = grown(engine, reuse)
    assert max(session.twice) <= SHARED_PAGE
    assert sum(session.twice) <= sum(session.lengths) // 100
    assert session.twice[0] == 0
    check_cold(path, session, lambda number: number in (1, TURNS - 1))


@pytest.mark.parametrize("at", [100, 350, SYSTEM + 90])
def test_an_edit_in_the_middle_costs_one_interval(path, at):
    """What follows the edited token has to be computed; before it, at most one interval is."""
    with opened(path) as (engine, reuse):
        session = grown(engine, reuse, turns=3)
        session.tokens[at] = (session.tokens[at] + 1) % 256
        session.answer(ANSWER)
        assert session.twice[-1] <= INTERVAL
        session.tokens[at] = (session.tokens[at] + 2) % 256
        session.answer(ANSWER)
        # What the two edited sessions share ends where they differ: a state is saved there.
        assert session.twice[-1] <= PAGE_TOKENS
    check_cold(path, session, lambda number: number >= 3)


def test_a_system_prompt_that_sessions_share(path):
    """The second session finds out where the system prompt ends, the third one starts there."""
    with opened(path, interval=0) as (engine, reuse):
        twice = []
        for number in (1, 2, 3):
            session = Session(engine, reuse, number, seed=0)
            session.read(SYSTEM)
            session.tokens += [number] * RESULT
            session.computed = list(session.tokens[:SYSTEM]) if number > 1 else []
            session.answer(4)
            twice += session.twice
            check_cold(path, session)
    assert twice[0] == 0
    assert twice[2] <= PAGE_TOKENS


def test_a_turn_whose_end_is_rewritten(hybrid):
    """A template that drops thoughts rewrites the turn: the state before the turn is there."""
    with opened(hybrid, interval=0) as (engine, reuse):
        session = Session(engine, reuse, 1, seed=1)
        session.read(SYSTEM)
        for _ in range(3):
            session.read(RESULT)
            turn = len(session.tokens)
            session.read(2 * PAGE_TOKENS)
            session.answer(ANSWER, turn)
            del session.tokens[turn:]
            session.read(5)
        assert max(session.twice[1:]) <= PAGE_TOKENS
        without = Session(engine, reuse, 2, seed=2)
        without.read(SYSTEM)
        for _ in range(2):
            without.read(RESULT)
            turn = len(without.tokens)
            without.read(2 * PAGE_TOKENS)
            without.answer(ANSWER)
            del without.tokens[turn:]
            without.read(5)
        assert without.twice[1] >= SYSTEM - PAGE_TOKENS
    check_cold(hybrid, session)


def test_few_states_are_spread_over_a_prompt(hybrid):
    """With room for fewer states than a prompt has intervals, an edit still costs a part of it, and
    sessions that grow lose nothing."""
    with opened(hybrid, states=6) as (engine, reuse):
        first = grown(engine, reuse, 1, turns=2)
        second = grown(engine, reuse, 2, turns=2)
        for session in (first, second, first, second):
            session.read(RESULT)
            session.answer(ANSWER)
        assert max(first.twice[1:2] + second.twice[1:]) <= 3 * INTERVAL
        assert first.twice[-1] <= SHARED_PAGE


class LatestOnly(StateSlots):
    """A negative control: whatever is oldest makes room, however much it saves."""

    def _value(self, node: Any, below: int) -> int:
        return 0


def test_a_cache_that_forgets_what_is_oldest_reads_prompts_again(hybrid, monkeypatch):
    with opened(hybrid, states=6) as (engine, reuse):
        monkeypatch.setattr(StateSlots, "_value", LatestOnly._value)
        first = grown(engine, reuse, 1, turns=1)
        grown(engine, reuse, 2, turns=1)
        first.read(RESULT)
        first.answer(ANSWER)
    assert first.twice[-1] > SYSTEM // 2


FULL_CONTEXT, FULL_INTERVAL, FULL_TURNS = 40960, 1024, 30


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shape", SHAPES)
def test_thirty_turns_and_forty_thousand_tokens(synthetic_model, shape, capsys):
    """A session as agents have them, then an edit in its middle. The last answers are those of an
    engine that caches nothing."""
    path = synthetic_model(**SHAPES[shape] | {"context": FULL_CONTEXT})
    sizes: dict[str, Any] = {"context": FULL_CONTEXT, "interval": FULL_INTERVAL, "step": 512}
    native = partial(need_device, partial(open_tier, "native"))
    with opened(path, tier=native, **sizes) as (engine, reuse):
        session = Session(engine, reuse, 1, seed=1)
        session.read(20_000)
        for _ in range(FULL_TURNS):
            session.read(600)
            session.answer(60)
        grew = sum(session.twice)
        session.tokens[25_000] = (session.tokens[25_000] + 1) % 256
        session.answer(60)
    with capsys.disabled():
        print(
            f"\n{shape}: {session.lengths[-1]} tokens in {FULL_TURNS} turns, {grew} computed twice"
            f" while it grew, {session.twice[-1]} after an edit"
        )
    assert grew <= session.lengths[-1] // 100
    assert session.twice[-1] <= FULL_INTERVAL
    with opened(path, cache=False, tier=native, **sizes) as (engine, _):
        for number in (FULL_TURNS - 1, FULL_TURNS):
            _, digest = ask(engine, session.prompts[number], 60, id=number)
            assert digest == session.digests[number], f"turn {number}"
