"""A loaded model that answers requests of many threads, with an engine stepped by its own
thread."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from harness.host.driver import BUFFERED_EVENTS
from harness.host.engine_thread import EngineThread, ThreadedDriver
from harness.host.live_memory import live_memory_of
from harness.host.open import Prepared, load_model
from harness.host.options import SessionOptions
from harness.host.structured.grammars import Grammars
from harness.progress import SILENT, Progress
from harness.trace.record import TracedTier
from reference.engine import Engine
from reference.limits import Limits
from reference.memory.planner import MemoryPlan
from reference.model.chat_template import ChatTemplate
from reference.model.open import Model
from reference.model.tokenizer import Tokenizer
from reference.observer import Observer


@dataclass(frozen=True, kw_only=True)
class HostedModel:
    """A loaded model, planned within ``budget`` bytes. ``driver`` accepts its requests,
    ``grammars`` makes token masks. Penalties of a request may look back at ``penalty_window``
    tokens. ``traced`` is the tier that writes a trace, if any."""

    model: Model
    template: ChatTemplate | None
    driver: ThreadedDriver
    grammars: Grammars
    limits: Limits
    penalty_window: int
    plan: MemoryPlan
    budget: int
    tier: str
    device: str
    traced: TracedTier | None = None

    @classmethod
    def of(
        cls,
        prepared: Prepared,
        driver: ThreadedDriver,
        options: SessionOptions,
        owned: ExitStack,
        traced: TracedTier | None = None,
    ) -> HostedModel:
        """The model behind ``driver``; ``owned`` closes the driver."""
        owned.callback(driver.close)
        model, info = prepared.model, prepared.tier.info
        grammars = Grammars(model.tokenizer, model.config.vocab)
        owned.callback(grammars.close)
        return cls(
            model=model,
            template=prepared.template,
            driver=driver,
            grammars=grammars,
            limits=prepared.limits,
            penalty_window=options.penalty_window(prepared.limits.context),
            plan=prepared.plan,
            budget=prepared.budget,
            tier=info.name,
            device=info.device,
            traced=traced,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.model.tokenizer

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer."""
        return self.limits.context


def host_model(
    path: Path,
    options: SessionOptions,
    thread: EngineThread,
    owned: ExitStack,
    progress: Progress = SILENT,
    *,
    buffered_events: int = BUFFERED_EVENTS,
    prepare: bool = True,
) -> HostedModel:
    """Load the model file ``path`` and let ``thread`` step its engine until ``owned`` closes. With
    ``prepare`` everything is compiled now, not at the first request. Raises what ``load_model``
    raises."""
    loaded = load_model(path, options, owned, progress, patient=True)
    if prepare:
        loaded.runner.prepare()

    def engine(observer: Observer) -> Engine:
        return loaded.engine(observer=observer, tenants=thread.tenants, clock=time.monotonic)

    driver = thread.add(engine, buffered_events, live_memory_of(loaded))
    return HostedModel.of(loaded.prepared, driver, options, owned, loaded.traced)
