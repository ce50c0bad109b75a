"""Schedules on a real model: tokens and logits are the bits of each request's solo run."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import count, islice

import pytest

from harness.simulation import model
from harness.simulation.generate import MEMORY, SCHEDULER, Profile
from harness.simulation.invariants import Invariant
from harness.simulation.model import MODEL_VOCAB
from harness.simulation.run import play_seed, run_schedules
from reference.memory.page_copies import PageCopies
from reference.memory.recurrent import RecurrentMemory
from tests.named_tiers import quick_tier

ON_MODEL = replace(SCHEDULER, context=96, requests=12, vocab=MODEL_VOCAB, model=True)
MEMORY_ON_MODEL = replace(ON_MODEL, name="mem", features=MEMORY.features, recurrent=0.5)
WANTED = {"preemptions", "prefix tokens_hit", "prefix restored", "faults", "guesses right"}


@pytest.fixture(autouse=True)
def steps_are_quick() -> Iterator[None]:
    """They have the bits of the CPU tier."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "CpuTier", lambda threads: quick_tier())
        yield


def seeds_with(profile: Profile, *requested: str) -> Iterator[int]:
    """Seeds of schedules in which all of it happens: without a model, which is fast and nearly the
    same; only sampled tokens differ."""
    return (seed for seed in count(1) if all(times(profile, what, seed) for what in requested))


def times(profile: Profile, what: str, seed: int) -> int:
    """How often it happens."""
    return counts(profile, seed)[what]


@cache
def counts(profile: Profile, seed: int) -> Counter[str]:
    """How often everything happens, without a model."""
    return play_seed(replace(profile, model=False), seed).counts


@pytest.mark.parametrize(
    ("profile", "seeds"),
    [(ON_MODEL, (8, 255)), (MEMORY_ON_MODEL, (255, 363))],
    ids=["sched", "mem"],
)
def test_every_request_gets_its_solo_run(profile, seeds):
    """In schedules during which everything happens that could change a bit."""
    happened: Counter[str] = Counter()
    for seed in seeds:
        outcome = play_seed(profile, seed)
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}"
        happened += outcome.counts
    assert happened.keys() >= WANTED, "these seeds no longer do: choose others"


@pytest.mark.soak
@pytest.mark.parametrize("profile", [ON_MODEL, MEMORY_ON_MODEL], ids=["sched", "mem"])
def test_every_request_gets_its_solo_run_for_long(profile):
    report = run_schedules(profile, 1000, 250, jobs=2)
    assert report.failure is None, report.failure


def _no_restored_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageCopies, "load", lambda self, saved, page: None)


def _no_restored_states(patch: pytest.MonkeyPatch) -> None:
    """A slot goes on from the state that another sequence left there."""

    def load(self: RecurrentMemory, state_slot: int, slot: int) -> None:
        self._positions[slot] = self._earliest[slot] = self._saved_positions[state_slot]

    patch.setattr(RecurrentMemory, "load", load)


@pytest.mark.parametrize(
    ("broken", "what", "recurrent"),
    [(_no_restored_pages, "prefix restored", 0.0), (_no_restored_states, "prefix tokens_hit", 1.0)],
)
def test_wrong_bits_are_noticed(broken, what, recurrent, monkeypatch):
    """Negative control: as other tokens or logits than alone, where nothing is wrong with what is
    not broken. What happens most often is played first."""
    profile = replace(MEMORY_ON_MODEL, recurrent=recurrent)
    seeds = sorted(islice(seeds_with(profile, what), 6), key=partial(times, profile, what))
    seeds.reverse()
    broken(monkeypatch)
    outcomes = ((seed, play_seed(profile, seed).violation) for seed in seeds)
    seed, found = next(((seed, found) for seed, found in outcomes if found is not None), (0, None))
    assert found is not None
    assert found.invariant is Invariant.TOKENS
    monkeypatch.undo()
    assert play_seed(profile, seed).violation is None
