"""A loaded model that answers requests of many threads, with an engine stepped by its own
thread."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol, Self

from harness.host.engine_thread import EngineThread
from harness.host.live_memory import live_memory_of
from harness.host.open import Prepared, load_model
from harness.host.options import SessionOptions
from harness.host.stream_driver import BUFFERED_EVENTS, SharedDriver
from harness.host.structured.grammars import Grammars
from harness.progress import SILENT, Progress
from reference.engine import Engine
from reference.limits import Limits
from reference.memory.planner import MemoryPlan
from reference.model.chat_template import ChatTemplate
from reference.model.open import Model
from reference.model.tokenizer import Tokenizer
from reference.observer import Observer


class Trace(Protocol):
    """What records a model."""

    @property
    def problem(self) -> str | None:
        """Why it cannot be written; None while it can."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a model is: its sizes, planned within ``budget`` bytes, its tier and the device."""

    limits: Limits
    plan: MemoryPlan
    budget: int
    tier: str
    device: str

    @classmethod
    def of(cls, prepared: Prepared) -> Self:
        """The placement of a prepared model."""
        return cls(
            limits=prepared.limits,
            plan=prepared.plan,
            budget=prepared.budget,
            tier=prepared.tier.info.name,
            device=prepared.tier.info.device,
        )


@dataclass(frozen=True, kw_only=True)
class HostedModel(Placement):
    """A loaded model. ``driver`` accepts its requests, ``grammars`` makes token masks. Penalties of
    a request may look back at ``penalty_window`` tokens. ``traced`` is what records it, if
    anything."""

    model: Model
    template: ChatTemplate | None
    driver: SharedDriver
    grammars: Grammars
    penalty_window: int
    traced: Trace | None = None

    @classmethod
    def behind(
        cls,
        driver: SharedDriver,
        model: Model,
        template: ChatTemplate | None,
        placed: Placement,
        options: SessionOptions,
        owned: ExitStack,
        traced: Trace | None = None,
    ) -> HostedModel:
        """The model behind ``driver``; ``owned`` closes the driver."""
        owned.callback(driver.close)
        grammars = Grammars(model.tokenizer, model.config.vocab)
        owned.callback(grammars.close)
        return cls(
            **{one.name: getattr(placed, one.name) for one in fields(Placement)},
            model=model,
            template=template,
            driver=driver,
            grammars=grammars,
            penalty_window=options.penalty_window(placed.limits.context),
            traced=traced,
        )

    @property
    def placement(self) -> Placement:
        """Where it is."""
        return Placement(**{one.name: getattr(self, one.name) for one in fields(Placement)})

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
    found = loaded.prepared
    return HostedModel.behind(
        driver, found.model, found.template, Placement.of(found), options, owned, loaded.traced
    )
