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
from reference.engine.draft_block import drafting_limits
from reference.engine.options import ENGINE_DEFAULTS
from reference.limits import Limits, whole_contexts, with_drafts
from reference.memory.recurrent import state_bytes
from reference.model.adapters import MAX_COMBINED
from reference.model.open import Model


@dataclass(frozen=True, slots=True)
class Recording:
    """New files that record a session: a trace of its tier's work, and a timeline of its engine
    (docs/tools.md)."""

    trace: Path | None = None
    timeline: Path | None = None


SINGLE_SLOT_STATES = 2
"""Recurrent states that a single slot saves for the disk cache."""
MIN_READING_ROWS = 16
"""Fewest rows of a step where every position of a text is read, for its vector or its
log-probabilities: with fewer such a text takes many steps."""
TOKENS_PER_READING_ROW = 8
"""Prompt tokens of a step for each row there: more rows take memory, and make a step of others
late."""


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Options of a session.

    ``context`` None is the model's own, or the longest that ``memory_budget`` allows: bytes, None
    for what is available. ``chunk`` is the most prompt tokens of a step, None what ``chunks``
    finds; ``repeat_last_n`` is the longest reach a request's penalties may have. What was
    computed for a prompt is used again for one that begins alike: of the pages that no sequence
    holds, at most ``prefix_cache`` bytes stay for that, None for all, 0 for none at all,
    and ``host_cache`` bytes more in memory of the host besides the budget. What recurrent layers
    remember at ends of pages has room in ``state_cache`` bytes of the budget, None for one
    state a slot where there are several; it ``saves_slots`` where single slots need such room, too.
    All of it also goes to the folder ``disk_cache``, up to
    ``disk_cache_size`` bytes, where a later process finds it; None for no folder.

    Logits of every position, as ``Session.logits`` gives them, need ``all_logits``. At most
    ``draft`` tokens are guessed ahead, from the prompt or by the model in the file ``draft_model``,
    whose memory is part of the budget. ``slots`` sequences of the whole context run at once, each
    with up to ``biases`` logit biases and ``top_log_probabilities`` tokens listed with theirs; with
    ``masks`` each may have one. With ``hidden_states`` the engine can hand over what logits are
    computed from, with ``scores`` the log-probabilities of prompts, with ``digests`` digests of
    rows of logits, with ``experts`` those that a mixture's tokens use. At most ``queue_depth``
    requests wait for a slot, and a request ends after ``stall_steps`` steps in which nobody takes
    its events. Requests may use the adapters ``lora``."""

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
        """Prompt tokens of a step, best first: what is asked for, or what the tier reads fastest
        with, its half and so on, as far as memory goes. Where there are logits of all of them
        they take the memory."""
        if self.chunk is not None:
            return (self.chunk,)
        return prompt_steps(PROMPT_TOKENS if self.all_logits else tier.info.prompt_tokens)

    @property
    def _saved_states(self) -> int:
        """Number of recurrent states that are saved unless ``state_cache`` says it."""
        if self.slots == 1:
            return SINGLE_SLOT_STATES if self.disk_cache or self.saves_slots else 0
        return self.slots

    def penalty_window(self, context: int) -> int:
        """Most tokens that penalties look back at. Not what is stored for them: drafts need more of
        that, and change no answer."""
        return min(self.repeat_last_n, context)

    def limits(self, context: int) -> Limits:
        """The sizes of a session of so many positions."""
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
    """``options.limits`` with as many saved states as there is room for, and with the hidden states
    that the model's draft block reads if it drafts."""
    sizes: LimitsAt = options.limits
    if options.draft:
        block = options.draft_model is None and model.draft_problem is None
        block = block or model.head is not None
        sizes = partial(_drafting_limits, options, block)
    if options.state_cache is None:
        return sizes
    each = state_bytes(model.graph(sizes(PAGE_TOKENS)))
    states = options.state_cache // each if each else 0
    return lambda context: replace(sizes(context), saved_states=states)


def _drafting_limits(options: SessionOptions, block: bool, context: int) -> Limits:
    limits = options.limits(context)
    return (drafting_limits if block else with_drafts)(limits, options.draft)
