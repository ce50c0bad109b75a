"""Drafts by a DFlash head: all of a round in one step of the head."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np

from contract.arithmetic import PAGE_TOKENS
from contract.records import QUERY_TOKEN
from reference.engine.block_limits import block_limits
from reference.engine.drafter import DraftRequest, Tokens, are_frequent, sound_drafts
from reference.engine.sequence import Sequence
from reference.limits import Limits, with_drafts
from reference.model.dflash import DFlashHead
from reference.runner import ModelRunner, StepInput
from reference.sched.planner import Chunk
from reference.sched.slots import SlotTable


def drafting_limits(limits: Limits, drafts: int, head: DFlashHead) -> Limits:
    """``limits`` of a model whose head drafts at most ``drafts`` tokens of a sequence at a time.
    Its graph writes the head's keys; no hidden states are kept, so that a ring has one row."""
    return replace(with_drafts(limits, min(drafts, head.block_size - 1)), hidden_rows=1)


def head_limits(target: Limits) -> Limits:
    """The limits of the head's runner for a model with the limits ``target``."""
    return replace(block_limits(target), step_rows=target.step_rows, recent_tokens=1)


class DFlashDrafter:
    """Drafts by the DFlash head ``head``, whose graph ``runner`` executes.

    The model's steps write the head's keys of all their tokens, in the pages of the sequences, so
    prefix hits, preemption and wrong drafts need nothing of the head. A round is one step: a block
    of the last token and a mask token for each draft. Its keys lie behind those of known tokens,
    where the model's next step writes others. The host reads the drafts before they are verified.
    """

    def __init__(self, runner: ModelRunner, head: DFlashHead) -> None:
        self._runner = runner
        self._head = head
        self._table: SlotTable | None = None
        self._follows: Callable[[Sequence], bool] = lambda sequence: True
        # Whether a sequence that has its slot is followed.
        self._decided: dict[int, bool] = {}

    def attach(self, table: SlotTable, follows: Callable[[Sequence], bool]) -> None:
        """Use the pages of ``table``, the slot table of the engine. ``follows`` decides whether the
        head follows a new sequence: from its first step on, or not at all."""
        self._table, self._follows = table, follows
        self._decided.clear()

    def forget(self, key: int) -> None:
        """Forget a sequence that lost its slot."""
        self._decided.pop(key, None)

    def ready(self, key: int, tokens: Tokens) -> bool:
        """Whether the head follows the sequence."""
        return self._decided.get(key, False)

    def before_step(self, sequences: Items[Sequence], chunks: Items[Chunk]) -> int | None:
        """0 if the head follows a sequence of the next step, whose graph then writes its keys; else
        None."""
        for sequence in sequences:
            if sequence.order not in self._decided and sequence.running:
                self._decided[sequence.order] = sequence.samples and self._follows(sequence)
        followed = [self._decided.get(sequence.order, False) for sequence in sequences]
        return 0 if any(followed) else None

    def draft(self, sequences: Items[DraftRequest]) -> list[Tokens]:
        """The head's continuations of all sequences by one step, each with its own sampling."""
        bounded = [self._bounded(one) for one in sequences]
        active = [one for one in bounded if one.limit]
        if not active:
            return [sound_drafts([]) for _ in bounded]
        tokens = self._runner.step(self._input(active)).token.tolist()
        found = []
        for one in bounded:
            found.append(sound_drafts(tokens[: one.limit]))
            tokens = tokens[one.limit :]
        return found

    def _bounded(self, one: DraftRequest) -> DraftRequest:
        """The request with no more drafts than a block has rows and its sequence has pages for."""
        assert self._table is not None
        room = self._table.page_count[one.slot] * PAGE_TOKENS - len(one.tokens)
        room = min(room, self._head.block_size - 1) if self._decided.get(one.key) else 0
        return one if 0 <= one.limit <= room else replace(one, limit=max(0, min(one.limit, room)))

    def _input(self, active: list[DraftRequest]) -> StepInput:
        """The step over a block of each sequence, which samples every row but the first."""
        assert self._table is not None
        sizes = [one.limit + 1 for one in active]
        query = np.zeros(sum(sizes), QUERY_TOKEN)
        query["token"] = self._head.mask
        firsts = np.cumsum([0, *sizes[:-1]])
        query["token"][firsts] = [one.tokens[-1] for one in active]
        query["slot"] = np.repeat([one.slot for one in active], sizes)
        last = np.repeat([len(one.tokens) - 1 for one in active], sizes)
        inside = np.arange(len(query)) - np.repeat(firsts, sizes)
        query["position"] = last + inside
        ends = query.copy()
        ends["position"] = last + np.repeat(sizes, sizes) - 1
        rows = np.flatnonzero(inside).astype(np.int32)
        slots, positions = query["slot"][rows].tolist(), query["position"][rows].tolist()
        return StepInput(
            query,
            rows,
            self._table.plain_sampling(slots, positions),
            self._table.page_table,
            page_versions=self._table.page_versions,
            block_ends=ends,
            frequent=are_frequent(active, self._runner.frequent_tokens),
        )
