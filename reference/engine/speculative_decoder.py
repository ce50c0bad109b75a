"""Carries guesses through the engine: written behind the known tokens, checked against what the
step sampled, taken back where they were wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from reference.engine.drafter import AcceptedTokens, Drafter, DraftRequest, SpeculationStatistics
from reference.engine.sequence import RunningSequence
from reference.engine.slot_manager import SlotManager
from reference.limits import Limits
from reference.runner import ModelRunner
from reference.sched.cost import Load, StepCost

FIRST_GUESSES = 3
"""Guesses of a step until they prove right: a wrong one costs its part of the step."""
UNKNOWN_COST = 1.5
"""How much longer a step with guesses is taken to be before there are measurements."""


class SpeculativeDecoder:
    """Guesses of at most ``most`` tokens a sequence, by ``drafter``, for an engine's residents.

    A sequence that is guessed for runs in lockstep: its next step is planned when the host knows
    the tokens of the one before. It does so only while guessing pays, by the measured cost of
    steps; what a guess needs beside it, a row a token, a place for the recurrent state, room among
    the recent tokens for the penalties, bounds the guesses.
    """

    def __init__(
        self,
        runner: ModelRunner,
        slot_manager: SlotManager,
        drafter: Drafter,
        most: int,
        cost: StepCost,
    ) -> None:
        self.statistics = SpeculationStatistics()
        self._runner = runner
        self._slot_manager = slot_manager
        self._drafter = drafter
        self._most = most
        self._cost = cost
        self._yields: dict[int, AcceptedTokens] = {}

    def consider(self, active: RunningSequence) -> bool:
        """Let a sequence that has a new token run in lockstep if there is something to guess;
        whether that changed."""
        table, slot, sequence = self._slot_manager.table, active.slot, active.sequence
        if table.lockstep[slot] or not self._may(active):
            return False
        tokens = sequence.tokens[: sequence.known]
        if sequence.known < self._yield(active).paused_until:
            return False
        if not self._drafter.ready(sequence.order, tokens):
            return False
        table.lockstep[slot] = True
        table.known[slot] = sequence.known
        return True

    def draft(self) -> None:
        """Guess for every sequence in lockstep whose tokens are all known."""
        table, running = self._slot_manager.table, self._slot_manager.running
        ready = [
            (slot, active)
            for slot, active in running.items()
            if table.lockstep[slot]
            and not table.stalled[slot]
            and not table.draft[slot]
            and table.computed[slot] == table.known[slot] - 1
        ]
        room = self._room(len(running))
        opened: list[DraftRequest] = []
        for slot, active in ready:
            sequence = active.sequence
            most = min(self._bound(active), room)
            if self._may(active) and most > 0:
                tokens = sequence.tokens[: sequence.known]
                opened.append(DraftRequest(sequence.order, slot, tokens, most))
                room -= most
        guesses = {one.slot: found for one, found in zip(opened, self._draft(opened), strict=True)}
        for slot, active in ready:
            self._write(active, guesses.get(slot))

    def before_step(self, actives: list[RunningSequence]) -> None:
        """Keep the recurrent states that wrong guesses would spoil; just before the submission."""
        if self._slot_manager.keeps_states:
            for active in actives:
                if self._slot_manager.table.draft[active.slot] and active.undo is not None:
                    self._runner.recurrent.save(active.slot, active.undo)

    def settle(self, active: RunningSequence, start: int, stop: int) -> None:
        """After a step over ``start`` to ``stop`` - 1 was read and the tokens it gave are known:
        forget the wrong guesses."""
        table, slot, known = self._slot_manager.table, active.slot, active.sequence.known
        drafted, gained = stop - start - 1, known - 1 - start
        table.draft[slot] = 0
        table.known[slot] = known
        table.computed[slot] = known - 1
        if gained <= drafted and active.undo is not None:
            self._runner.recurrent.load(active.undo, slot)
            table.computed[slot] = start
        so_far = self.statistics
        self.statistics = replace(
            so_far,
            drafted=so_far.drafted + drafted,
            accepted=so_far.accepted + gained - 1,
            steps=so_far.steps + 1,
        )
        measured = self._yield(active)
        measured.note(gained)
        if measured.steps >= 2 and measured.mean < self._worth(drafted):
            self._pause(active)

    def forget(self, active: RunningSequence) -> None:
        """A sequence lost its slot."""
        self._drafter.forget(active.sequence.order)
        self._yields.pop(active.sequence.order, None)

    def _draft(self, opened: list[DraftRequest]) -> list[np.ndarray]:
        return self._drafter.draft(opened) if opened else []

    def _write(self, active: RunningSequence, guess: np.ndarray | None) -> None:
        table, slot, sequence = self._slot_manager.table, active.slot, active.sequence
        if guess is None or not len(guess):
            table.lockstep[slot] = active.masked
            return
        sequence.tokens[sequence.known : sequence.known + len(guess)] = guess
        table.draft[slot] = len(guess)

    def _may(self, active: RunningSequence) -> bool:
        """Whether guessing for a sequence could ever be right to do."""
        sequence = active.sequence
        return sequence.samples and sequence.on_logits is None and not active.masked

    def _bound(self, active: RunningSequence) -> int:
        """The most guesses for one sequence now."""
        sequence, limits = active.sequence, self._runner.limits
        slot = active.slot
        measured = self._yield(active)
        most = self._most if measured.mean > FIRST_GUESSES else FIRST_GUESSES
        most = min(most, self._most, sequence.last - sequence.known)
        sampling = sequence.request.sampling
        if sampling.penalizes:
            most = min(most, limits.recent_tokens - sampling.repeat_last_n)
        if self._slot_manager.recurrent:
            if active.undo is None:
                active.undo = self._slot_manager.memory.save_state_slot()
            if active.undo is None:
                return 0
            table = self._slot_manager.table
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

    def _pause(self, active: RunningSequence) -> None:
        self._yield(active).pause(active.sequence.known)
        self._slot_manager.table.lockstep[active.slot] = active.masked
        self.statistics = replace(self.statistics, pauses=self.statistics.pauses + 1)

    def _yield(self, active: RunningSequence) -> AcceptedTokens:
        return self._yields.setdefault(active.sequence.order, AcceptedTokens())
