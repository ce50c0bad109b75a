"""Speculative decoding in the engine. Drafted tokens are written after the known ones, compared
with the tokens that the step sampled, and dropped from the first difference on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from contract.types import Clock
from reference.engine.constraining import allowed_draft
from reference.engine.dflash import DFlashDrafter
from reference.engine.draft_block import DraftBlock
from reference.engine.draft_round import DraftRound
from reference.engine.drafter import (
    Drafter,
    DraftRequest,
    PromptLookup,
    ReadsTokens,
    SpeculationStatistics,
    nothing_unread,
)
from reference.engine.next_round import NextRound
from reference.engine.options import EngineOptions
from reference.engine.sequence import Sequence
from reference.engine.slot_manager import SlotManager
from reference.limits import Limits, mask_words
from reference.runner import ModelRunner, StepOutput, Submission
from reference.sched.cost import StepCost
from reference.sched.draft_history import DraftHistory
from reference.sched.drafts import FIRST_DRAFTS, DraftPolicy
from reference.sched.planner import Chunk


class SpeculativeDecoder:
    """Adds tokens drafted by ``drafter`` to each running sequence, at most
    ``options.draft_tokens``.

    A sequence with drafts runs in lockstep: its next step is planned once the host knows the tokens
    of the step before. It does so only while drafts are worth the measured cost of their steps.
    Each draft needs an output row, in a recurrent model one of the slot's states, and a free entry
    among the recent tokens that penalties use; these bound the number of drafts."""

    def __init__(
        self,
        runner: ModelRunner,
        slot_manager: SlotManager,
        drafter: Drafter,
        options: EngineOptions,
        cost: StepCost,
        clock: Clock,
    ) -> None:
        self.statistics = SpeculationStatistics()
        self._runner = runner
        self._slot_manager = slot_manager
        self._drafter = drafter
        self._block = drafter if isinstance(drafter, DraftBlock) else None
        self._follower = drafter if isinstance(drafter, DraftBlock | DFlashDrafter) else None
        self._lookup = drafter if isinstance(drafter, PromptLookup) else None
        self._unread = drafter.unread if isinstance(drafter, ReadsTokens) else nothing_unread
        if self._follower is not None:
            self._follower.attach(slot_manager.table, self._follows)
        self._draft_limit = min(options.draft_tokens, runner.limits.draft_tokens)
        if not self._draft_limit:
            raise ValueError("a drafter needs limits and options with draft_tokens of at least 1")
        self._clock = clock
        self._ends = options.end_of_generation
        self._mask_words = mask_words(runner.model.config.vocab)
        self._began = self._settled = self._waited = 0.0
        self._rounds: dict[int, DraftRound] = {}
        self._followed: dict[int, tuple[DraftRound | None, float]] = {}
        self._settled_counts: dict[tuple[int, int], int] = {}
        self._lost: tuple[Sequence, DraftHistory] | None = None
        self.next_round: NextRound | None = None
        if self._block is not None:
            self.next_round = NextRound(self._block, runner.tier, self._ends)
        self._policy = DraftPolicy(cost)
        self._histories: dict[int, DraftHistory] = {}

    def consider(self, sequence: Sequence) -> bool:
        """Let a sequence that has a new token run in lockstep if there is something to draft. True
        if it was not in lockstep before."""
        table, slot = self._slot_manager.table, sequence.slot
        # This runs for every token, so the cheap test comes first. Shadow rounds never pause.
        paused = self._lookup is None and sequence.known < self._history_of(sequence).next_trial_at
        if table.lockstep[slot] or paused:
            return False
        self._settled_counts.clear()
        if not self._can_draft(sequence) or not self._is_worth_it(sequence):
            return False
        table.lockstep[slot] = True
        table.known[slot] = sequence.known
        return True

    def _is_worth_it(self, sequence: Sequence) -> bool:
        """Whether there is something to draft for a sequence, and drafts are expected to gain. A
        lookup, which costs nothing, is tried before a step waits for it."""
        history, running = self._history_of(sequence), len(self._slot_manager.running)
        limit = self._draft_limit_of(sequence)
        if self._lookup is not None and not history.rounds:
            tokens = sequence.tokens[: sequence.known]
            asked = DraftRequest(sequence.order, sequence.slot, tokens, min(limit, FIRST_DRAFTS))
            draft = self._lookup.draft([asked])[0].tolist()
            if not self._policy.compare_shadow_drafts(history, tokens, draft, running) or not draft:
                return False
        unread = self._unread(sequence.order, sequence.known)
        if not self._policy.should_begin(history, sequence.known, running, limit, unread):
            self._stop_following(sequence)
            return False
        return self._drafter.ready(sequence.order, sequence.tokens[: sequence.known])

    def next_positions(self) -> list[Chunk]:
        """The positions of each sequence that waits for drafts at which the drafter writes keys, to
        the pages of the sequence: the last known token's, and a DFlash head's of all drafts."""
        if self._follower is None:
            return []
        whole = self._block is None
        return [Chunk(n, s.known - 1, 1 + whole * self._drafts_now(s)) for n, s in self._ready()]

    def _ready(self) -> list[tuple[int, Sequence]]:
        """The sequences in lockstep whose tokens are all known."""
        table = self._slot_manager.table
        return [
            (slot, sequence)
            for slot, sequence in self._slot_manager.running.items()
            if table.lockstep[slot]
            and not table.stalled[slot]
            and not table.draft[slot]
            and table.computed[slot] == table.known[slot] - 1
        ]

    def draft(self) -> None:
        """Draft tokens for every sequence in lockstep whose tokens are all known."""
        running, ready = self._slot_manager.running, self._ready()
        self._forget_lost()
        if not ready:
            return
        # Between two rounds the device waits for the host, which is part of the cost of drafts.
        self._began = self._settled or self._clock()
        self._settled = 0.0
        room = self._step_room(len(running))
        mask_room = self._runner.limits.masks - sum([s.masked for s in running.values()])
        opened: list[DraftRequest] = []
        for slot, sequence in ready:
            if not self._can_draft(sequence) or (
                sequence.masked and not self._is_worth_it(sequence)
            ):
                continue
            limit = min(self._drafts_now(sequence), room, mask_room if sequence.masked else room)
            if limit > 0:
                tokens = sequence.tokens[: sequence.known]
                opened.append(DraftRequest(sequence.order, slot, tokens, limit))
                room -= limit
                mask_room -= limit * sequence.masked
        first = [one for one in opened if not self._histories[one.key].rounds]
        read = sum([self._unread(one.key, len(one.tokens)) for one in first])
        found = self._draft([running[one.slot] for one in opened], opened)
        drafts = {one.slot: draft for one, draft in zip(opened, found, strict=True)}
        for slot, sequence in ready:
            if sequence.running:
                self._write(sequence, drafts.get(slot))
        self._begin_round([s for _, s in ready if s.running], len(running), read)

    def _begin_round(self, sequences: list[Sequence], running: int, read: int) -> None:
        table = self._slot_manager.table
        drafting = [sequence for sequence in sequences if table.draft[sequence.slot]]
        limit = max([table.draft[sequence.slot] for sequence in drafting], default=0)
        first = any(not self._history_of(sequence).rounds for sequence in drafting)
        round_ = DraftRound(self._began, running, len(drafting), limit, first, read)
        self._rounds.update((sequence.order, round_) for sequence in drafting)

    def before_step(self, sequences: list[Sequence], chunks: list[Chunk]) -> int | None:
        """Let a draft block read the hidden states that the next step would overwrite. Returns
        their number; None if no block or head reads that step as well."""
        return None if self._follower is None else self._follower.before_step(sequences, chunks)

    def after_step(self, step: Submission, sequences: list[Sequence], chunks: list[Chunk]) -> None:
        """Continue after a ``step`` over ``chunks`` was submitted."""
        if self._waited:
            seconds = self._clock() - self._waited
            self._policy.note_no_drafts(len(self._slot_manager.running), seconds)
            self._waited = 0.0
        if self._block is not None and self.next_round is not None:
            prompts = self._block.after_step(sequences, chunks)
            self._policy.note_prompt(len(self._slot_manager.running), prompts)
            self.next_round.interrupt()
            self._note_next_round(step, sequences, self.next_round)
        self._settled_counts.clear()

    def _note_next_round(
        self, step: Submission, sequences: list[Sequence], next_round: NextRound
    ) -> None:
        """Let the next round begin early behind a step with drafts of every sequence that runs."""
        running, draft = len(self._slot_manager.running), self._slot_manager.table.draft
        drafted = [draft[s.slot] if s.running and not s.masked else 0 for s in sequences]
        if running != len(sequences) or not all(drafted):
            return
        counts = [self._count_of(sequence) for sequence in sequences]
        if running == 1 or sum(counts) <= self._step_room(running):
            next_round.after_step(step, sequences, drafted, counts)

    def after_result(
        self, sequences: list[Sequence], admissions: list[int], output: StepOutput, follows: bool
    ) -> list[int]:
        """See ``NextRound.after_result``. The first round of a sequence is settled first, since it
        counts differently."""
        if self.next_round is None or not self.next_round.expected:
            return []
        first = any(not self._history_of(one).rounds for one in sequences)
        if first:
            return []
        return self.next_round.after_result(sequences, admissions, output, follows)

    def drop_wrong(self, sequence: Sequence, start: int) -> None:
        """Drop the wrong drafts of a step from position ``start`` on that was read and whose tokens
        are known. A recurrent model still has its states before them."""
        table, slot, known = self._slot_manager.table, sequence.slot, sequence.known
        table.draft[slot] = 0
        table.known[slot] = known
        table.computed[slot] = known - 1
        if start < table.cut[slot] < known:
            self._slot_manager.save_state(sequence, table.cut[slot])

    def follow(self, sequence: Sequence, start: int, now: float) -> None:
        """As ``drop_wrong``, before the tokens are taken and ``settle`` is called: the next round
        begins ``now``, when the step was read."""
        self.drop_wrong(sequence, start)
        self._followed[sequence.order] = self._rounds.pop(sequence.order, None), now
        self._settled = now

    def settle(self, sequence: Sequence, start: int, stop: int) -> None:
        """Record a step with drafts, over positions ``start`` to ``stop`` - 1, whose tokens were
        taken. Its wrong drafts are dropped, unless its next round was begun."""
        drafted, gained = stop - start - 1, sequence.known - 1 - start
        followed = self._followed.pop(sequence.order, None)
        begun = followed is not None
        if followed is None:
            self.drop_wrong(sequence, start)
            self._settled = self._clock()
            followed = self._rounds.pop(sequence.order, None), self._settled
        so_far = self.statistics
        self.statistics = replace(
            so_far,
            drafted=so_far.drafted + drafted,
            accepted=so_far.accepted + gained - 1,
            steps=so_far.steps + 1,
        )
        history, running = self._history_of(sequence), len(self._slot_manager.running)
        self._note_round(*followed, history, gained, drafted)
        drafts = self._policy.draft_count(history, running, self._draft_limit_of(sequence))
        self._settled_counts[sequence.order, running] = drafts
        if begun and self.next_round is not None:
            self.next_round.expect(sequence, drafts)
        elif not drafts:
            self._pause(sequence)

    def ended(self, sequence: Sequence, gained: int, drafted: int) -> None:
        """Record the last round of a sequence: ``drafted`` drafts were compared and gave ``gained``
        tokens, which ended the sequence; 0 if a row was not finite."""
        self._settled_counts.clear()
        if gained and self._lost is not None and self._lost[0] is sequence:
            round_ = self._rounds.pop(sequence.order, None)
            self._note_round(round_, self._clock(), self._lost[1], gained, drafted)
        self._forget_lost()

    def _note_round(
        self, round_: DraftRound | None, now: float, own: DraftHistory, gained: int, drafted: int
    ) -> None:
        if round_ is not None:
            self._measure_length()
            round_.note(self._policy, own, now, gained, drafted)

    def note_plain(self, sequences: list[Sequence], seconds: float, read: int | None) -> None:
        """Record a step without drafts that took ``seconds``, a token for each sequence. ``read``
        is what ``before_step`` returned."""
        lockstep, running = self._slot_manager.table.lockstep, len(self._slot_manager.running)
        waits = [s.running and lockstep[s.slot] and not s.masked for s in sequences]
        self._settled_counts.clear()
        if len(sequences) == running and True not in waits:
            self._measure_length()
            self._policy.note_plain(running, seconds, read)

    def forget(self, sequence: Sequence) -> None:
        """Drop the drafts of a sequence that lost its slot, and what is measured of its step."""
        self._settled = self._waited = 0.0
        self._followed.pop(sequence.order, None)
        self._settled_counts.clear()
        self._drafter.forget(sequence.order)
        self._forget_lost()
        history = self._histories.pop(sequence.order, None)
        # The step that ended it is recorded after this.
        self._lost = None if history is None else (sequence, history)

    def _forget_lost(self) -> None:
        if self._lost is not None:
            sequence, history = self._lost
            self._rounds.pop(sequence.order, None)
            self._policy.forget(history)
            self._lost = None

    def _draft(self, sequences: list[Sequence], opened: list[DraftRequest]) -> list[np.ndarray]:
        """The drafts of ``sequences``, or placeholders for drafts that stay on the device until
        they are verified. Masks need the tokens themselves."""
        if not opened:
            return []
        if self._block is None or any(s.masked for s in sequences):
            return self._drafter.draft(opened)
        return self._block.begin(opened)

    def _write(self, sequence: Sequence, draft: np.ndarray | None) -> None:
        table, slot = self._slot_manager.table, sequence.slot
        if draft is not None and sequence.masked:
            draft = self._allowed(sequence, draft)
        if not sequence.running:
            # The mask provider has cancelled it.
            return
        if draft is None or not len(draft):
            if draft is not None or not sequence.masked:
                self._waited = self._began
            table.lockstep[slot] = sequence.masked
            self._history_of(sequence).interrupt()
            return
        sequence.tokens[sequence.known : sequence.known + len(draft)] = draft
        table.draft[slot] = len(draft)

    def _allowed(self, sequence: Sequence, draft: np.ndarray) -> np.ndarray:
        """The part of a draft that the masks of a sequence allow."""
        ends = () if sequence.request.ignore_end else self._ends
        allowed = allowed_draft(sequence, draft, ends, self._mask_words)
        measured = self._history_of(sequence)
        measured.forbidden = len(allowed) < len(draft)
        if len(draft) and not len(allowed):
            measured.note(1, 1)
        return allowed

    def _can_draft(self, sequence: Sequence) -> bool:
        """Whether tokens can be drafted for a sequence at all."""
        read = sequence.on_logits is not None or sequence.on_experts is not None
        return sequence.samples and not read

    def _draft_limit_of(self, sequence: Sequence) -> int:
        """The most drafts of a sequence in any round."""
        limits, limit = self._runner.limits, self._draft_limit
        sampling = sequence.request.sampling
        if sampling.penalizes:
            limit = min(limit, limits.recent_tokens - sampling.repeat_last_n)
        if self._slot_manager.recurrent:
            limit = min(limit, limits.slot_states - 1)
        return limit

    def _count_of(self, sequence: Sequence) -> int:
        """The number of drafts that the policy chooses for a sequence. It is known if its latest
        round was settled and no other step was computed since."""
        running = len(self._slot_manager.running)
        settled = self._settled_counts.get((sequence.order, running))
        if settled is not None:
            return settled
        history, limit = self._history_of(sequence), self._draft_limit_of(sequence)
        return self._policy.draft_count(history, running, limit)

    def _drafts_now(self, sequence: Sequence) -> int:
        """The most drafts of a sequence in the next round."""
        return min(self._count_of(sequence), sequence.last_position - sequence.known)

    def _step_room(self, running: int) -> int:
        """The drafts that fit in a step beside a token and a row of every running sequence."""
        limits: Limits = self._runner.limits
        return min(limits.step_rows, limits.step_tokens - 1) - running

    def _pause(self, sequence: Sequence) -> None:
        self._settled = 0.0
        history = self._history_of(sequence)
        self._policy.give_up(history, sequence.known)
        self._stop_following(sequence)
        self._slot_manager.table.lockstep[sequence.slot] = sequence.masked
        self.statistics = replace(self.statistics, pauses=self.statistics.pauses + 1)

    def _stop_following(self, sequence: Sequence) -> None:
        """Let the draft block stop following a sequence if drafting was given up for it."""
        if self._block and self._policy.given_up(self._history_of(sequence)):
            self._block.leave(sequence.order)

    def _follows(self, sequence: Sequence) -> bool:
        running = len(self._slot_manager.running)
        limit, tokens = self._draft_limit_of(sequence), sequence.known if self._block else 0
        return self._policy.should_follow(sequence.tenant, running, limit, tokens)

    def _history_of(self, sequence: Sequence) -> DraftHistory:
        history = self._histories.get(sequence.order)
        if history is None:
            history = self._histories[sequence.order] = self._policy.new_history(sequence.tenant)
            self._measure_length()
        return history

    def _measure_length(self) -> None:
        """Tell the policy how long the sequences are."""
        running = self._slot_manager.running.values()
        self._policy.length = sum([one.known for one in running]) / max(1, len(running))
