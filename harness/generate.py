"""A model on a tier for one user: opened, asked, closed.

A ``Session`` owns everything a single user needs; sharing an engine between users is the
scheduler's business.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.arithmetic import PAGE_TOKENS
from contract.context_manager import ContextManager
from contract.dtypes import BY_NAME, DEFAULT_KV
from contract.lazy_dataclass import dataclass
from contract.tier import PROMPT_TOKENS, Tier
from contract.types import Request, SamplingParams, TokenEvent
from harness.arranged_weights import needs_model_file
from harness.drafting import Drafting, load_drafter, open_draft_model, plan_drafting
from harness.generation import SILENT, TextGeneration
from harness.memory import (
    LimitsAt,
    budget_of,
    longest_context,
    pages_in,
    plan_steps,
    prompt_steps,
    room_for_prompts,
)
from harness.prefix_watch import PrefixWatch
from harness.progress import Progress
from harness.tiers import DEFAULT_OPTIONS, TierOptions, open_tier
from reference.engine import Engine, EngineOptions
from reference.engine.drafter import Drafter
from reference.engine.options import ENGINE_DEFAULTS
from reference.engine.sequence import LogitsSink
from reference.limits import Limits, whole_contexts
from reference.memory.planner import MemoryPlan
from reference.memory.recurrent import state_bytes
from reference.model.chat_template import ChatTemplate, load_chat_template
from reference.model.open import Model, open_model
from reference.observer import NOBODY, Observer
from reference.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Recording:
    """New files for what a session does: all that its tier is told, and a timeline of its engine
    (docs/tools.md)."""

    trace: Path | None = None
    timeline: Path | None = None


READ_ROWS = 16
"""Fewest rows of a step where every position of a text is read, for its vector or its
log-probabilities: with fewer such a text takes many steps."""
TOKENS_A_READ_ROW = 8
"""Prompt tokens of a step for each row there: more rows take memory, and make a step of others
late."""


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How a session is built.

    ``context`` None is the model's own, or the longest that ``memory_budget`` allows: bytes, None
    for what is available. ``chunk`` is the most prompt tokens of a step, None what ``chunks``
    finds; ``repeat_last_n`` is the longest reach a request's penalties may have. What was
    computed for a prompt is used again for one that begins alike: of the pages that no sequence
    holds, at most ``prefix_cache`` bytes are kept for that, None for all, 0 for none at all,
    and ``host_cache`` bytes more in memory of the host beside the budget. What recurrent layers
    remember at ends of pages has room in ``state_cache`` bytes of the budget, None for one
    state a slot where there are several.

    Logits of every position, as ``Session.logits`` gives them, need ``all_logits``. At most
    ``draft`` tokens are guessed ahead, from the prompt or by the model in the file ``draft_model``,
    whose memory is part of the budget. ``slots`` sequences of the whole context run at once, each
    with up to ``biases`` logit biases and ``top_log_probabilities`` tokens listed with theirs; with
    ``masks`` each may have one. With ``hidden_states`` the engine can hand over what logits are
    computed from, with ``scores`` the log-probabilities of prompts, with ``digests`` digests of
    rows of logits.
    """

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
    draft: int = 0
    draft_model: Path | None = None
    slots: int = 1
    masks: bool = False
    biases: int = 0
    top_log_probabilities: int = 0
    hidden_states: bool = False
    scores: bool = False
    digests: bool = False
    recording: Recording = Recording()

    def chunks(self, tier: Tier) -> Sequence[int]:
        """Prompt tokens of a step, best first: what is asked for, or what the tier reads fastest
        with, its half and so on, as far as memory goes. Where there are logits of all of them
        they take the memory."""
        if self.chunk is not None:
            return (self.chunk,)
        return prompt_steps(PROMPT_TOKENS if self.all_logits else tier.info.prompt_tokens)

    def limits(self, context: int) -> Limits:
        """The sizes of a session of so many positions."""
        chunk = room_for_prompts(self.chunk, context, self.slots)
        rows = self.slots * (1 + min(self.draft, chunk - 1))
        if self.hidden_states or self.scores:
            rows = max(rows, min(chunk, max(READ_ROWS, chunk // TOKENS_A_READ_ROW)))
        limits = whole_contexts(
            slots=self.slots,
            context=context,
            kv_dtype=BY_NAME[self.kv_dtype],
            step_tokens=chunk + self.slots,
            step_rows=max(self.slots, chunk) if self.all_logits else rows,
            recent_tokens=max(1, min(self.repeat_last_n, context)) + self.draft,
        )
        return replace(
            limits,
            saved_states=self.slots if self.slots > 1 else 0,
            masks=self.slots if self.masks else 0,
            biases=self.biases,
            top_log_probabilities=self.top_log_probabilities,
            hidden_states=self.hidden_states,
            scores=self.scores,
            digests=self.digests,
        )


def limits_at(model: Model, options: SessionOptions) -> LimitsAt:
    """``options.limits`` with as many saved states as there is room for."""
    if options.state_cache is None:
        return options.limits
    each = state_bytes(model.graph(options.limits(PAGE_TOKENS)))
    places = options.state_cache // each if each else 0
    return lambda context: replace(options.limits(context), saved_states=places)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a session is made of; its template's process runs if it has one and is for chat."""

    model: Model
    tier: Tier
    template: ChatTemplate | None
    plan: MemoryPlan
    limits: Limits
    drafting: Drafting | None = None


def prepare_session(path: Path, options: SessionOptions, owned: ExitStack) -> Prepared:
    """All that comes before a session takes memory; what is opened belongs to ``owned``.

    Raises what ``Session.open`` raises, apart from what only the weights show.
    """
    model = open_model(path)
    owned.callback(model.file.close)
    if needs_model_file(options.tier, path):
        model.file.read_ahead()
    longest_context(model, options.context)
    draft = None
    if options.draft_model is not None and options.draft:
        draft = open_draft_model(options.draft_model, model, owned)
        if needs_model_file(options.tier, options.draft_model):
            draft.file.read_ahead()
    template = _chat_template(model, owned) if options.chat else None
    if template is not None:
        template.start()
    tier = owned.enter_context(open_tier(options.tier, options.tier_options))
    budget = budget_of(tier.available_bytes, options.memory_budget)
    by_chunk = [limits_at(model, replace(options, chunk=n)) for n in options.chunks(tier)]
    plan, sizes = plan_steps(model, tier, by_chunk, options.context, budget)
    if draft is None:
        return Prepared(model, tier, template, plan, sizes(plan.context))
    # The draft model of the longest context leaves that much less; a shorter one needs no more.
    beside = plan_drafting(draft, tier, sizes(plan.context)).plan.budgeted
    plan, sizes = plan_steps(model, tier, by_chunk, options.context, budget - beside)
    limits = sizes(plan.context)
    return Prepared(model, tier, template, plan, limits, plan_drafting(draft, tier, limits))


class Session(ContextManager):
    """A model on a tier, ready to generate for one user. A context manager."""

    def __init__(
        self,
        model: Model,
        tier: Tier,
        runner: ModelRunner,
        engine: Engine,
        prefix_watch: PrefixWatch,
    ) -> None:
        self.model = model
        self.tier = tier
        self.runner = runner
        self.load_seconds = 0.0
        self._owned = ExitStack()
        self._requests = 0
        self._latest: TextGeneration | None = None
        self.engine = engine
        self._prefix_watch = prefix_watch

    @classmethod
    def open(cls, path: Path, options: SessionOptions, progress: Progress = SILENT) -> Session:
        """Load the model file at ``path``.

        Raises ModelFileError, UnsupportedModel, TierError, RequestError for a context the model
        does not have, DoesNotFit and, for files that cannot be recorded to, ConfigError before
        anything is uploaded.
        """
        started = time.perf_counter()
        with ExitStack() as owned:
            prepared = prepare_session(path, options, owned)
            model, tier = prepared.model, recorded_tier(prepared, options.recording, owned)
            runner = owned.enter_context(load_runner(model, tier, prepared.limits, progress))
            drafter = load_drafter(prepared.drafting, model, tier, options.draft, owned, progress)
            watch = PrefixWatch(_observed(options.recording, owned))
            engine = make_engine(
                runner,
                model,
                options,
                drafter=drafter,
                observer=watch,
                clock=time.perf_counter,
            )
            session = cls(model, tier, runner, engine, watch)
            session.load_seconds = time.perf_counter() - started
            session._owned = owned.pop_all()
            if prepared.template is not None:
                session.template = prepared.template
        return session

    @property
    def context(self) -> int:
        """The longest prompt plus answer, in tokens."""
        return self.runner.limits.context

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The file's chat template, None when it has none. Raises TemplateError."""
        return _chat_template(self.model, self._owned)

    def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        max_tokens: int,
        stop: Sequence[str] = (),
        progress: Progress = SILENT,
        on_logits: LogitsSink | None = None,
        output: str | None = None,
    ) -> TextGeneration:
        """The continuation of ``prompt``, at most ``max_tokens`` long, cut at a ``stop`` string.

        One generation at a time: an earlier one that is not finished is cancelled. ``progress``
        shows a prompt that takes several steps, ``on_logits`` receives the logits that tokens are
        sampled from, or ``output`` of them. Raises RequestError.
        """
        request = Request(self.next_id(), tuple(prompt), max_tokens, sampling, tuple(stop))
        self._latest = TextGeneration(self, request, progress, on_logits, output)
        return self._latest

    def step(self, request_id: int) -> list[TokenEvent]:
        """One step of the engine; what it produced for a request."""
        return [event for event in self.engine.step() if event.request_id == request_id]

    def reused(self, request_id: int) -> int:
        """Prompt tokens of a request that came from the prefix cache."""
        return self._prefix_watch.reused(request_id)

    def logits(self, tokens: Sequence[int], out: NDArray[np.float32]) -> None:
        """Write the logits of every position to ``out``, f32[len(tokens), vocab]; the session needs
        ``all_logits``. A generation that is not finished is cancelled. Raises RequestError."""
        if self.runner.limits.step_rows < self.engine.chunk_tokens:
            raise AssertionError("the session was opened without all_logits")

        def store(first: int, rows: NDArray[np.float32]) -> None:
            out[first : first + len(rows)] = rows

        unpenalized = SamplingParams(repeat_last_n=0)
        request = Request(self.next_id(), tuple(tokens), 0, unpenalized)
        self.engine.submit(request, store)
        try:
            for _ in self.engine.run():
                pass
        finally:
            self.engine.cancel(request.id)

    def next_id(self) -> int:
        """The id of a new request, for which whatever still runs makes room."""
        if self._latest is not None:
            self._latest.cancel()
        self._requests += 1
        return self._requests

    def close(self) -> None:
        """Free everything."""
        self._owned.close()


def _chat_template(model: Model, owned: ExitStack) -> ChatTemplate | None:
    if model.chat_template is None:
        return None
    template = load_chat_template(model.file.metadata, model.tokenizer, str(model.file.path))
    owned.callback(template.close)
    return template


def recorded_tier(
    prepared: Prepared, recording: Recording, owned: ExitStack, *, patient: bool = False
) -> Tier:
    """The session's tier, behind a recorder if there is to be a trace; a ``patient`` one waits for
    room on a full disk. Raises ConfigError."""
    if recording.trace is None:
        return prepared.tier
    from harness.trace.record import record_on

    return owned.enter_context(
        record_on(prepared.tier, recording.trace, prepared.model, prepared.limits, patient=patient)
    )


def _observed(recording: Recording, owned: ExitStack) -> Observer:
    """Who watches the engine."""
    if recording.timeline is None:
        return NOBODY
    from harness.trace.timeline import Timeline

    return owned.enter_context(Timeline(recording.timeline))


def load_runner(
    model: Model, tier: Tier, limits: Limits, progress: Progress = SILENT
) -> ModelRunner:
    """Upload a model, with progress. Raises OutOfMemory and UnsupportedOp."""
    weights = sum(tensor.nbytes for tensor in model.file.tensors.values())
    progress.start("loading", weights, "B")
    try:
        return ModelRunner(model, tier, limits, progress.advance)
    finally:
        progress.close()


def make_engine(
    runner: ModelRunner,
    model: Model,
    options: SessionOptions,
    *,
    drafter: Drafter | None = None,
    queue_depth: int = ENGINE_DEFAULTS.queue_depth,
    stall_steps: int = ENGINE_DEFAULTS.stall_steps,
    **more: Any,
) -> Engine:
    """The engine of a loaded model; ``more`` goes to ``Engine``."""
    cached = options.prefix_cache
    engine_options = EngineOptions(
        end_of_generation=model.tokenizer.eog_ids,
        chunk_tokens=options.chunk,
        chunk_while_decoding=PROMPT_TOKENS if options.chunk is None else None,
        queue_depth=queue_depth,
        prefix_cache=cached != 0,
        cached_pages=None if cached is None else pages_in(runner, cached),
        # Costs a page of memory and three lowered graphs, which one sequence would rarely repay.
        copy_pages=cached != 0 and options.slots > 1,
        host_pages=pages_in(runner, options.host_cache),
        stall_steps=stall_steps,
        draft_tokens=options.draft,
    )
    return Engine(runner, engine_options, drafter=drafter, **more)
