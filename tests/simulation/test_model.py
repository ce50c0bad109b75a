"""Schedules on a real model: tokens and logits are the bits of each request's solo run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.simulation.generate import MEMORY, SCHEDULER, Profile
from harness.simulation.invariants import Invariant
from harness.simulation.model import MODEL_VOCAB
from harness.simulation.run import run_schedules
from reference.memory.page_copies import PageCopies
from reference.memory.recurrent import RecurrentMemory
from tests.simulation.controls import Break

SMALL = {"context": 64, "requests": 8, "vocab": MODEL_VOCAB, "model": True}
ON_MODEL = replace(SCHEDULER, **SMALL)
MEMORY_ON_MODEL = replace(MEMORY, **SMALL)


@pytest.mark.parametrize("profile", [ON_MODEL, MEMORY_ON_MODEL], ids=["sched", "mem"])
def test_every_request_gets_its_solo_run(profile: Profile) -> None:
    report = run_schedules(profile, 1, 12)
    assert report.failure is None, report.failure
    for what in ("tokens", "logits", "preemptions", "faults", "prefix tokens_hit"):
        assert report.counts[what] > 0, f"{what} never happens"


@pytest.mark.soak
@pytest.mark.parametrize("profile", [ON_MODEL, MEMORY_ON_MODEL], ids=["sched", "mem"])
def test_every_request_gets_its_solo_run_for_long(profile: Profile) -> None:
    report = run_schedules(profile, 1000, 250, jobs=2)
    assert report.failure is None, report.failure


def _no_restored_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageCopies, "load", lambda self, saved, page: None)


def _no_restored_states(patch: pytest.MonkeyPatch) -> None:
    load = RecurrentMemory.load

    def broken(self: RecurrentMemory, place: int, slot: int) -> None:
        load(self, place, slot)
        for name in self._buffers:
            self._write(name, slot, self._read(name, slot)[::-1].copy())

    patch.setattr(RecurrentMemory, "load", broken)


@pytest.mark.parametrize("broken", [_no_restored_pages, _no_restored_states])
def test_wrong_bits_are_noticed(broken: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: as other tokens or logits than alone."""
    broken(monkeypatch)
    report = run_schedules(replace(MEMORY_ON_MODEL, recurrent=0.5), 0, 60)
    assert report.failure is not None
    assert Invariant.TOKENS.name in report.failure[1]
