"""Options for opening a model: its tier, its sizes, and the abilities of its engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from contract.arithmetic import PAGE_TOKENS
from contract.dtypes import BY_NAME, DEFAULT_KV
from contract.lazy_dataclass import dataclass
from contract.tier import PROMPT_TOKENS, Tier
from harness.memory import LimitsAt, prompt_steps, room_for_prompts
from harness.named_adapters import NamedAdapter
from harness.setting_kinds import DISK_CACHE_BYTES, QUEUE_DEPTH
from harness.tiers import DEFAULT_OPTIONS, TierOptions
from reference.engine.drafters import drafting_limits
from reference.engine.options import ENGINE_DEFAULTS
from reference.limits import DRAFT_STATES, Limits, whole_contexts, with_drafts
from reference.memory.recurrent import state_bytes
from reference.model.adapters import MAX_COMBINED
from reference.model.open import Model


@dataclass(frozen=True, slots=True)
class Recording:
    """Files that record a session: a trace of its tier's work, and a timeline of its engine
    (docs/tools.md)."""

    trace: Path | None = None
    timeline: Path | None = None


SINGLE_SLOT_STATES = 2
"""Saved recurrent states of a single slot, for the disk cache."""
MIN_READING_ROWS = 16
"""Least output rows of a step if embeddings or scores need a row for every position of a text: with
fewer rows such a text takes many steps."""
TOKENS_PER_READING_ROW = 8
"""Prompt tokens of a step for each such row. More rows take memory and delay other requests."""


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Options of a session.

    Sizes: ``slots`` sequences run at once. ``context``: positions of each; None for the model's
    own, or the longest within ``memory_budget`` bytes (None: the available memory). ``chunk``: most
    prompt tokens of a step, None for the tier's best. ``repeat_last_n``: longest window of
    penalties. ``biases``: logit biases of a request. ``top_log_probabilities``: likely tokens
    listed with log-probabilities. ``queue_depth``: most waiting requests. A request ends after
    ``stall_steps`` steps in which its events were not read.

    Caches, in bytes: ``prefix_cache`` limits pages of prompts that no sequence holds (None: no
    limit, 0: no cache). ``host_cache`` is additional room in host memory, outside the budget.
    ``state_cache``: saved states of recurrent layers (None: one for each slot if there are several;
    ``saves_slots``: also for a single slot). ``disk_cache``: folder of a cache on disk, up to
    ``disk_cache_size`` bytes, which later processes use too.

    Drafts: at most ``draft`` tokens at a time, by prompt lookup, the model's draft block, or the
    model in the file ``draft_model``, whose memory is part of the budget.

    Abilities: ``masks``: grammars. ``all_logits``: logits of every position, as ``Session.logits``
    needs. ``hidden_states``, ``scores`` (log-probabilities of prompts), ``digests`` (of rows of
    logits), ``experts`` (chosen by mixtures). ``lora``: adapters."""

    tier: str = "auto"
    tier_options: TierOptions = DEFAULT_OPTIONS
    context: int | None = None
    kv_dtype: str = DEFAULT_KV.name
    chunk: int | None = None
    repeat_last_n: int = 64
    all_logits: bool = False
    memory_budget: int | None = None
    host_cache: int = 0
    chat: bool = False
    prefix_cache: int | None = None
    state_cache: int | None = None
    disk_cache: Path | None = None
    disk_cache_size: int = DISK_CACHE_BYTES
    saves_slots: bool = False
    draft: int = 0
    draft_model: Path | None = None
    slots: int = 1
    masks: bool = False
    biases: int = 0
    top_log_probabilities: int = 0
    hidden_states: bool = False
    scores: bool = False
    digests: bool = False
    experts: bool = False
    queue_depth: int = QUEUE_DEPTH
    stall_steps: int = ENGINE_DEFAULTS.stall_steps
    recording: Recording = Recording()
    lora: tuple[NamedAdapter, ...] = ()

    def chunks(self, tier: Tier) -> Sequence[int]:
        """Prompt tokens of a step to try, best first: ``chunk`` if set, else the tier's best, its
        half and so on, as far as memory allows. With ``all_logits`` they are few, since logits take
        the memory."""
        if self.chunk is not None:
            return (self.chunk,)
        return prompt_steps(PROMPT_TOKENS if self.all_logits else tier.info.prompt_tokens)

    @property
    def _saved_states(self) -> int:
        """Number of saved recurrent states if ``state_cache`` is None."""
        if self.slots == 1:
            return SINGLE_SLOT_STATES if self.disk_cache or self.saves_slots else 0
        return self.slots

    def penalty_window(self, context: int) -> int:
        """Most tokens that penalties look back at. More tokens are stored for drafts, but answers
        must not depend on drafts."""
        return min(self.repeat_last_n, context)

    def limits(self, context: int) -> Limits:
        """The engine's sizes for ``context`` positions."""
        chunk = room_for_prompts(self.chunk, context, self.slots)
        rows = self.slots * (1 + min(self.draft, chunk - 1))
        if self.hidden_states or self.scores:
            rows = max(rows, min(chunk, max(MIN_READING_ROWS, chunk // TOKENS_PER_READING_ROW)))
        limits = whole_contexts(
            slots=self.slots,
            context=context,
            kv_dtype=BY_NAME[self.kv_dtype],
            step_tokens=chunk + self.slots,
            step_rows=max(self.slots, chunk) if self.all_logits else rows,
            recent_tokens=max(1, self.penalty_window(context)) + self.draft,
        )
        return replace(
            limits,
            saved_states=self._saved_states,
            masks=min(limits.step_rows, self.slots + self.draft) if self.masks else 0,
            biases=self.biases,
            top_log_probabilities=self.top_log_probabilities,
            hidden_states=self.hidden_states,
            scores=self.scores,
            digests=self.digests,
            experts=self.experts,
            adapters=min(len(self.lora), MAX_COMBINED),
        )


def limits_at(model: Model, options: SessionOptions) -> LimitsAt:
    """``options.limits``, with as many saved states as ``state_cache`` holds, and with the hidden
    states that a draft block needs. A recurrent model has no rows for more drafts than states."""
    if model.config.recurrent is not None:
        options = replace(options, draft=min(options.draft, DRAFT_STATES - 1))
    sizes: LimitsAt = options.limits
    if options.draft:
        sizes = partial(_drafting_limits, model, options)
    if options.state_cache is None:
        return sizes
    each = state_bytes(model.graph(sizes(PAGE_TOKENS)))
    states = options.state_cache // each if each else 0
    return lambda context: replace(sizes(context), saved_states=states)


def _drafting_limits(model: Model, options: SessionOptions, context: int) -> Limits:
    limits = options.limits(context)
    block = options.draft_model is None and model.draft_problem is None
    if block or model.head is not None:
        return drafting_limits(limits, options.draft, model.head)
    return with_drafts(limits, options.draft)
