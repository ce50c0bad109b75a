"""Loads a model: its files, its tier, sizes that fit, its weights, and its engine."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.errors import ConfigError
from contract.lazy_dataclass import dataclass
from contract.tier import PROMPT_TOKENS, AbandonsSteps, Tier
from harness.arranged_weights import needs_model_file
from harness.host.drafting import Drafting, load_drafter, open_draft_model, plan_drafting
from harness.host.options import Recording, SessionOptions, limits_at
from harness.memory import budget_of, device_pages_in, longest_context, pages_in, weight_bytes_of
from harness.progress import SILENT, Progress
from harness.residency import Residency, plan_residency
from harness.tiers import open_tier
from reference.engine import Engine, EngineOptions
from reference.engine.drafter import Drafter
from reference.limits import Limits
from reference.memory.planner import MemoryPlan
from reference.model.open import Model, open_model
from reference.observer import Observer
from reference.runner import ModelRunner

if TYPE_CHECKING:
    from harness.trace.record import TracedTier
    from reference.memory.disk.cache import DiskCache
    from reference.model.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class Prepared:
    """An open model, planned within ``budget`` bytes; its weights are not uploaded yet. If the
    options ask for chat, the process of its template runs."""

    model: Model
    tier: Tier
    template: ChatTemplate | None
    plan: MemoryPlan
    limits: Limits
    residency: Residency
    budget: int
    drafting: Drafting | None = None


def prepare_session(path: Path, options: SessionOptions, owned: ExitStack) -> Prepared:
    """Open a model's files and tier, and plan its memory; ``owned`` closes them. Raises
    ModelFileError, UnsupportedModel, TierError, DoesNotFit, and RequestError for a context the
    model does not have."""
    model = open_model(path, [adapter.path for adapter in options.lora])
    owned.callback(model.close)
    if needs_model_file(options.tier, path):
        model.file.read_ahead()
    longest_context(model, options.context)
    draft = None
    if options.draft_model is not None and options.draft:
        model, draft = open_draft_model(options.draft_model, model, owned)
        if draft is not None and needs_model_file(options.tier, options.draft_model):
            draft.file.read_ahead()
    template = chat_template_of(model, owned) if options.chat else None
    if template is not None:
        template.start()
    tier = owned.enter_context(open_tier(options.tier, options.tier_options))
    budget = budget_of(tier.available_bytes, options.memory_budget)
    by_chunk = [limits_at(model, replace(options, chunk=n)) for n in options.chunks(tier)]
    found = plan_residency(model, tier, by_chunk, options.context, budget)
    # Plan again with what the drafter leaves. A shorter context needs no larger drafter.
    drafting = plan_drafting(draft, model, tier, found.limits)
    if drafting is not None:
        budget -= drafting.plan.budgeted
        found = plan_residency(model, tier, by_chunk, options.context, budget)
        drafting = plan_drafting(draft, model, tier, found.limits)
    found = found.applied(model, tier, budget)
    if options.tier_options.note is not None:
        for line in found.lines(tier, model):
            options.tier_options.note(line)
    return Prepared(model, tier, template, found.plan, found.limits, found, budget, drafting)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in a tier's memory. ``traced`` is the tier that writes a trace, if any; ``disk`` is
    the disk cache, if any."""

    prepared: Prepared
    options: SessionOptions
    runner: ModelRunner
    drafter: Drafter | None
    traced: TracedTier | None
    disk: DiskCache | None = None

    def engine(self, *, observer: Observer, **more: Any) -> Engine:
        """An engine for the model; ``more`` are further arguments of ``Engine``."""
        options = self.options
        cached, plan = options.prefix_cache, self.prepared.plan
        engine_options = EngineOptions(
            end_of_generation=self.prepared.model.tokenizer.eog_ids,
            chunk_tokens=options.chunk,
            chunk_while_decoding=PROMPT_TOKENS if options.chunk is None else None,
            queue_depth=options.queue_depth,
            prefix_cache=cached != 0,
            cached_pages=None if cached is None else device_pages_in(plan, cached),
            # Costs a page of memory and three lowered graphs: too much for a single sequence.
            copy_pages=cached != 0 and options.slots > 1,
            host_pages=pages_in(self.runner, options.host_cache),
            stall_steps=options.stall_steps,
            draft_tokens=options.draft,
        )
        return Engine(
            self.runner,
            engine_options,
            drafter=self.drafter,
            observer=observer,
            disk=self.disk,
            **more,
        )


def load_model(
    path: Path,
    options: SessionOptions,
    owned: ExitStack,
    progress: Progress = SILENT,
    *,
    patient: bool = False,
) -> LoadedModel:
    """Open the model file ``path`` and upload it; ``owned`` frees it. A ``patient`` trace waits
    while the disk is full. Raises what ``prepare_session`` raises, OutOfMemory, UnsupportedOp, and
    ConfigError, before the upload, for files that cannot be recorded to."""
    prepared = prepare_session(path, options, owned)
    traced = _traced_tier(prepared, options.recording, owned, patient)
    tier: Tier = prepared.tier if traced is None else traced
    runner = owned.enter_context(load_runner(prepared.model, tier, prepared.limits, progress))
    drafter = load_drafter(prepared.drafting, runner, options.draft, owned, progress)
    if isinstance(tier, AbandonsSteps):
        # A step of a long prompt may take seconds; disk writes are still waited for.
        owned.callback(tier.abandon)
    disk = None
    if options.disk_cache is not None and options.prefix_cache != 0:
        # Imported here because most starts have no disk cache.
        from harness.host.disk import open_disk_cache

        disk = open_disk_cache(
            options.disk_cache, options.disk_cache_size, prepared.model, prepared.limits
        )
        owned.callback(disk.close)
    return LoadedModel(prepared, options, runner, drafter, traced, disk)


def load_runner(model: Model, tier: Tier, limits: Limits, progress: Progress) -> ModelRunner:
    """Upload a model, with progress. Raises OutOfMemory and UnsupportedOp."""
    progress.start("loading", weight_bytes_of(model.graph(limits)), "B")
    try:
        return ModelRunner(model, tier, limits, progress.advance)
    finally:
        progress.close()


def chat_template_of(model: Model, owned: ExitStack) -> ChatTemplate | None:
    """The chat template in the model's file; None if it has none. Raises TemplateError."""
    if model.chat_template is None:
        return None
    # Imported here, because not every start is for a chat.
    from reference.model.chat_template import load_chat_template

    template = load_chat_template(model.file.metadata, model.tokenizer, str(model.file.path))
    owned.callback(template.close)
    return template


def _traced_tier(
    prepared: Prepared, recording: Recording, owned: ExitStack, patient: bool
) -> TracedTier | None:
    """The tier with a recorder in front; None if no trace is requested. Raises ConfigError."""
    if recording.trace is None:
        return None
    if prepared.model.adapters.opened:
        raise ConfigError("a trace holds no adapters; leave out --lora or the trace")
    if prepared.model.head is not None:
        raise ConfigError("a trace holds no head; leave out --draft-model or the trace")
    from harness.trace.record import record_on

    return owned.enter_context(
        record_on(prepared.tier, recording.trace, prepared.model, prepared.limits, patient=patient)
    )
