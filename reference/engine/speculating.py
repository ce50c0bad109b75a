"""Carries guesses through the engine: written behind the known tokens, checked against what the
step sampled, taken back where they were wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from reference.engine.residents import Residents
from reference.engine.sequence import Placement
from reference.engine.speculation import Drafter, Open, SpeculationStatistics, Yield
from reference.limits import Limits
from reference.runner import ModelRunner
from reference.sched.cost import Load, StepCost

FIRST_GUESSES = 3
"""Guesses of a step until they prove right: a wrong one costs its part of the step."""
UNKNOWN_COST = 1.5
"""How much longer a step with guesses is taken to be before there are measurements."""


class Speculating:
    """Guesses of at most ``most`` tokens a sequence, by ``drafter``, for an engine's residents.

    A sequence that is guessed for runs in lockstep: its next step is planned when the host knows
    the tokens of the one before. It does so only while guessing pays, by the measured cost of
    steps; what a guess needs beside it, a row a token, a place for the recurrent state, room among
    the recent tokens for the penalties, bounds the guesses.
    """

    def __init__(
        self,
        runner: ModelRunner,
        residents: Residents,
        drafter: Drafter,
        most: int,
        cost: StepCost,
    ) -> None:
        self.statistics = SpeculationStatistics()
        self._runner = runner
        self._residents = residents
        self._drafter = drafter
        self._most = most
        self._cost = cost
        self._yields: dict[int, Yield] = {}

    def consider(self, placement: Placement) -> bool:
        """Let a sequence that has a new token run in lockstep if there is something to guess;
        whether that changed."""
        table, slot, sequence = self._residents.table, placement.slot, placement.sequence
        if table.lockstep[slot] or not self._may(placement):
            return False
        tokens = sequence.tokens[: sequence.known]
        if sequence.known < self._yield(placement).paused_until:
            return False
        if not self._drafter.ready(sequence.order, tokens):
            return False
        table.lockstep[slot] = True
        table.known[slot] = sequence.known
        return True

    def draft(self) -> None:
        """Guess for every sequence in lockstep whose tokens are all known."""
        table, running = self._residents.table, self._residents.running
        ready = [
            (slot, placement)
            for slot, placement in running.items()
            if table.lockstep[slot]
            and not table.stalled[slot]
            and not table.draft[slot]
            and table.computed[slot] == table.known[slot] - 1
        ]
        room = self._room(len(running))
        opened: list[Open] = []
        for slot, placement in ready:
            sequence = placement.sequence
            most = min(self._bound(placement), room)
            if self._may(placement) and most > 0:
                tokens = sequence.tokens[: sequence.known]
                opened.append(Open(sequence.order, slot, tokens, most))
                room -= most
        guesses = {one.slot: found for one, found in zip(opened, self._draft(opened), strict=True)}
        for slot, placement in ready:
            self._write(placement, guesses.get(slot))

    def before_step(self, placements: list[Placement]) -> None:
        """Keep the recurrent states that wrong guesses would spoil; just before the submission."""
        if self._residents.keeps_states:
            for placement in placements:
                if self._residents.table.draft[placement.slot] and placement.undo is not None:
                    self._runner.recurrent.save(placement.slot, placement.undo)

    def settle(self, placement: Placement, start: int, stop: int) -> None:
        """After a step over ``start`` to ``stop`` - 1 was read and the tokens it gave are known:
        forget the wrong guesses."""
        table, slot, known = self._residents.table, placement.slot, placement.sequence.known
        drafted, gained = stop - start - 1, known - 1 - start
        table.draft[slot] = 0
        table.known[slot] = known
        table.computed[slot] = known - 1
        if gained <= drafted and placement.undo is not None:
            self._runner.recurrent.load(placement.undo, slot)
            table.computed[slot] = start
        so_far = self.statistics
        self.statistics = replace(
            so_far,
            drafted=so_far.drafted + drafted,
            accepted=so_far.accepted + gained - 1,
            steps=so_far.steps + 1,
        )
        measured = self._yield(placement)
        measured.note(gained)
        if measured.steps >= 2 and measured.mean < self._worth(drafted):
            self._pause(placement)

    def forget(self, placement: Placement) -> None:
        """A sequence lost its slot."""
        self._drafter.forget(placement.sequence.order)
        self._yields.pop(placement.sequence.order, None)

    def _draft(self, opened: list[Open]) -> list[np.ndarray]:
        return self._drafter.draft(opened) if opened else []

    def _write(self, placement: Placement, guess: np.ndarray | None) -> None:
        table, slot, sequence = self._residents.table, placement.slot, placement.sequence
        if guess is None or not len(guess):
            table.lockstep[slot] = placement.masked
            return
        sequence.tokens[sequence.known : sequence.known + len(guess)] = guess
        table.draft[slot] = len(guess)

    def _may(self, placement: Placement) -> bool:
        """Whether guessing for a sequence could ever be right to do."""
        sequence = placement.sequence
        return sequence.samples and sequence.on_logits is None and not placement.masked

    def _bound(self, placement: Placement) -> int:
        """The most guesses for one sequence now."""
        sequence, limits = placement.sequence, self._runner.limits
        slot = placement.slot
        measured = self._yield(placement)
        most = self._most if measured.mean > FIRST_GUESSES else FIRST_GUESSES
        most = min(most, self._most, sequence.last - sequence.known)
        sampling = sequence.request.sampling
        if sampling.penalizes:
            most = min(most, limits.recent_tokens - sampling.repeat_last_n)
        if self._residents.recurrent:
            if placement.undo is None:
                placement.undo = self._residents.memory.save_place()
            if placement.undo is None:
                return 0
            table = self._residents.table
            most = min(most, table.cut[slot] - table.computed[slot] - 2)
        return most

    def _room(self, running: int) -> int:
        """Guesses that fit a step beside a token and a row of every running sequence."""
        limits: Limits = self._runner.limits
        return min(limits.step_rows, limits.step_tokens - 1) - running

    def _worth(self, drafted: int) -> float:
        """How many tokens a step with guesses must give to be worth its time."""
        alone, more = (self._cost.predict(Load(n, 0)) for n in (1, 1 + drafted))
        if alone is None or more is None or alone <= 0:
            return UNKNOWN_COST
        return more / alone

    def _pause(self, placement: Placement) -> None:
        self._yield(placement).pause(placement.sequence.known)
        self._residents.table.lockstep[placement.slot] = placement.masked
        self.statistics = replace(self.statistics, pauses=self.statistics.pauses + 1)

    def _yield(self, placement: Placement) -> Yield:
        return self._yields.setdefault(placement.sequence.order, Yield())
