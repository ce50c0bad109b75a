"""Drafts by a smaller model with the same vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import field, replace

import numpy as np
from numpy.typing import NDArray

from contract.errors import RequestError
from contract.lazy_dataclass import dataclass
from contract.records import LAST_TOKEN, QUERY_TOKEN
from contract.types import SamplingParams
from reference.engine.drafter import ChainedDrafts, ChainedStep, DraftRequest, Tokens, are_frequent
from reference.limits import Limits, whole_contexts
from reference.model.gguf.strings import StringArray
from reference.model.open import Model
from reference.runner import ModelRunner, StepInput
from reference.sched.slots import sampling_record

GREEDY = SamplingParams(repeat_last_n=0)
MAX_PADDING = 1024
"""The most tokens by which the sizes of the two vocabularies may differ."""


def draft_limits(target: Limits) -> Limits:
    """The limits of a draft model's runner for a target with the limits ``target``. Every slot has
    pages for its whole context, so a draft never waits for memory."""
    return whole_contexts(
        slots=target.slots,
        context=target.context,
        kv_dtype=target.kv_dtype,
        step_tokens=target.step_tokens,
        step_rows=target.slots,
        recent_tokens=1,
    )


@dataclass(slots=True)
class _Followed:
    """The slot of a sequence in the draft model, and the tokens computed in it."""

    slot: int
    tokens: Tokens = field(default_factory=lambda: np.zeros(0, np.int32))


def check_vocabularies(draft: Model, target: Model) -> None:
    """Raise RequestError unless ``draft`` can draft for ``target``: ids that both have stand for
    the same tokens, and the draft model has no recurrent layers.

    The sizes may differ by padding, which varies among the files of a family."""
    if draft.config.recurrent is not None:
        raise RequestError(
            "draft_model", "has recurrent layers, which cannot take guesses back; take one without"
        )
    pair = zip(_tokens_of(draft), _tokens_of(target), strict=False)
    different = next((n for n, (ours, theirs) in enumerate(pair) if ours != theirs), None)
    if different is not None:
        ours, theirs = (model.tokenizer.token_text(different) for model in (draft, target))
        raise RequestError(
            "draft_model",
            f"has another vocabulary: token {different} is {ours!r}, in the model {theirs!r}; take "
            "one of the same family",
        )
    fewer, more = sorted((draft.config.vocab, target.config.vocab))
    if more - fewer > MAX_PADDING:
        raise RequestError(
            "draft_model",
            f"has {draft.config.vocab} tokens, the model {target.config.vocab}; take one of the "
            "same family",
        )


def _tokens_of(model: Model) -> list[bytes]:
    stored = model.file.require("tokenizer.ggml.tokens", StringArray)
    return stored.to_list()


class DraftModel:
    """Drafts the greedy continuation by the model of ``runner``. Each sequence has a slot in it, in
    which only tokens after the common prefix with the target's are computed. Beyond the draft
    model's own context it drafts nothing.

    The drafts of one call are consecutive queued steps; their tokens stay on the device until all
    are computed. Raises RequestError for a model with another vocabulary or with recurrent layers,
    whose states cannot be cut back to the last accepted draft."""

    def __init__(self, runner: ModelRunner, target: Model) -> None:
        check_vocabularies(runner.model, target)
        limits = runner.limits
        self._runner = runner
        self._vocab = min(runner.model.config.vocab, target.config.vocab)
        self._lacks_tokens = self._vocab < target.config.vocab
        pages = np.arange(limits.slots * limits.slot_pages, dtype=np.int32)
        self._page_table = pages.reshape(limits.slots, limits.slot_pages)
        self._followed: dict[int, _Followed] = {}

    def ready(self, key: int, tokens: Tokens) -> bool:
        """Whether the sequence is within the model's context and vocabulary."""
        within = len(tokens) < self._runner.limits.context
        return within and not (self._lacks_tokens and int(tokens.max()) >= self._vocab)

    def unread(self, key: int, known: int) -> int:
        """How many of the ``known`` tokens of a sequence the model has not computed."""
        own = self._followed.get(key)
        return known if own is None else max(0, known - len(own.tokens))

    def draft(self, sequences: Items[DraftRequest]) -> list[Tokens]:
        """The model's own continuations, computed for all sequences in one batch."""
        sequences = [self._bounded(one) for one in sequences]
        followed = [self._follow(one) for one in sequences]
        self._catch_up(sequences, followed)
        steps = self._steps(sequences, followed)
        drafts = ChainedDrafts(self._runner, steps, len(sequences)).read()
        found = []
        for one, own, draft in zip(sequences, followed, drafts, strict=True):
            # A row whose logits are not finite yields -1. The target's vocabulary may be smaller.
            unknown = (n for n, token in enumerate(draft) if not 0 <= token < self._vocab)
            sound = draft[: next(unknown, len(draft))]
            own.tokens = np.array([*one.tokens.tolist(), *sound[:-1]], np.int32)
            found.append(np.array(sound, np.int32))
        return found

    def _bounded(self, one: DraftRequest) -> DraftRequest:
        """The request with no more drafts than the draft model has positions and tokens for."""
        room = self._runner.limits.context - len(one.tokens)
        limit = min(one.limit, room) if self.ready(one.key, one.tokens) else 0
        return replace(one, limit=max(0, limit))

    def forget(self, key: int) -> None:
        """Free the slot of a sequence."""
        self._followed.pop(key, None)

    def _steps(
        self, sequences: Items[DraftRequest], followed: Items[_Followed]
    ) -> Iterator[ChainedStep]:
        """The steps that draft ``limit`` tokens of each sequence, one in each step."""
        limit = [one.limit for one in sequences]
        frequent = are_frequent(sequences, self._runner.frequent_tokens)
        for number in range(max(limit, default=0)):
            active = [i for i, count in enumerate(limit) if number < count]
            chunks = [(followed[i].slot, len(sequences[i].tokens) - 1 + number) for i in active]
            first = [int(sequences[i].tokens[-1]) for i in active]
            tokens = first if number == 0 else [LAST_TOKEN] * len(active)
            yield ChainedStep(replace(self._step(chunks, tokens), frequent=frequent), active)

    def _follow(self, one: DraftRequest) -> _Followed:
        own = self._followed.get(one.key)
        if own is None:
            taken = {other.slot for other in self._followed.values()}
            free = next(slot for slot in range(self._runner.limits.slots) if slot not in taken)
            own = self._followed[one.key] = _Followed(free)
        return own

    def _catch_up(self, sequences: Items[DraftRequest], followed: Items[_Followed]) -> None:
        """Compute the tokens that the target has read since, except the last of each sequence."""
        chunk = self._runner.limits.step_tokens
        for one, own in zip(sequences, followed, strict=True):
            known = one.tokens[:-1] if one.limit else one.tokens[:0]
            for start in range(_common(own.tokens, known), len(known), chunk):
                self._runner.step(self._prefill(own.slot, start, known[start : start + chunk]))

    def _prefill(self, slot: int, start: int, tokens: Tokens) -> StepInput:
        query = np.zeros(len(tokens), QUERY_TOKEN)
        query["token"], query["slot"] = tokens, slot
        query["position"] = start + np.arange(len(tokens))
        none = np.zeros(0, np.int32)
        sampling = sampling_record(GREEDY, slot)[None][:0]
        return StepInput(query, none, sampling, self._page_table, frequent=True)

    def _step(self, chunks: list[tuple[int, int]], tokens: list[int]) -> StepInput:
        """A step that computes one token for each (slot, position) and samples the next."""
        query = np.zeros(len(chunks), QUERY_TOKEN)
        query["token"] = tokens
        query["slot"], query["position"] = zip(*chunks, strict=True)
        sampling = np.array([sampling_record(GREEDY, slot, at + 1) for slot, at in chunks])
        rows = np.arange(len(chunks), dtype=np.int32)
        return StepInput(query, rows, sampling, self._page_table)


def _common(computed: Tokens, known: Tokens) -> int:
    """The length of the common prefix."""
    length = min(len(computed), len(known))
    different: NDArray[np.intp] = np.flatnonzero(computed[:length] != known[:length])
    return int(different[0]) if len(different) else length
