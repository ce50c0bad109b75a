"""Gives device memory back while other programs need it, and takes it again later.

When a model is opened, a margin of memory is left free. If less than half of it is free, other
programs need memory: the model is planned again with less, first with fewer pages, then with
weights in host memory. It is restored after enough memory has been free for a while."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from contract.amounts import format_bytes
from contract.errors import DoesNotFit, ModelFileError, OutOfMemory
from contract.tier import StreamsWeights
from contract.types import Clock
from harness.host.memory_state import MemoryState
from harness.host.open import LoadedModel
from harness.memory import budget_of
from harness.residency import Residency, refit_residency
from reference.engine import Engine
from reference.runner import ModelRunner

POLL_SECONDS = 1.0
"""Seconds between two checks of the free memory."""
SHORT_POLLS = 2
"""Consecutive checks with too little free memory before some is given back."""
FREE_SECONDS, MAX_FREE_SECONDS = 30.0, 600.0
"""How long memory must be free before it is taken again. The time doubles, up to the maximum, each
time other programs need it again soon."""
RETRY_SECONDS = (1.0, 2.0, 4.0)
"""Seconds between tries if another program took the memory between plan and allocation."""
log = logging.getLogger("zinc_rt.memory")


@dataclass(slots=True)
class LiveMemory:
    """Watches the free memory of a runner's device; ``look`` is called between steps. ``first`` is
    the plan the model was opened with, ``asked`` its budget in bytes or None. ``given_back``: bytes
    it currently does without. ``changes``: how often that changed. Only the engine's thread writes
    these fields."""

    runner: ModelRunner
    first: Residency
    asked: int | None = None
    clock: Clock = time.monotonic
    wait: Callable[[float], None] = time.sleep
    given_back: int = 0
    changes: int = 0
    now: Residency = field(init=False)
    _free: int = 0
    _looked: float = float("-inf")
    _short: int = 0
    _free_since: float | None = None
    _free_seconds: float = FREE_SECONDS
    _taken: float = float("-inf")

    def __post_init__(self) -> None:
        self.now = self.first
        self._free = min(self._free_and_margin())

    @property
    def state(self) -> MemoryState:
        """What is known now."""
        return MemoryState(self.now.plan, self.given_back, self.changes)

    def look(self, engine: Engine) -> None:
        """Give memory back or take it again, if it is time to. Raises OutOfMemory or DoesNotFit if
        even the smallest plan does not fit."""
        at = self.clock()
        if at - self._looked < POLL_SECONDS:
            return
        self._looked = at
        available, margin = self._free_and_margin()
        self._short = self._short + 1 if available < self._free // 2 else 0
        missing = self.first.plan.budgeted - self.now.plan.budgeted
        if available - margin < missing - missing // 2 or not missing:
            self._free_since = None
        elif self._free_since is None:
            self._free_since = at
        if self._short >= SHORT_POLLS and not self._least(engine):
            again = at - self._taken < MAX_FREE_SECONDS
            doubled = min(MAX_FREE_SECONDS, 2 * self._free_seconds)
            self._free_seconds = doubled if again else FREE_SECONDS
            self._reopen(engine)
        elif self._free_since is not None and at - self._free_since >= self._free_seconds:
            self._taken = at
            self._reopen(engine)

    def _free_and_margin(self) -> tuple[int, int]:
        """The free bytes, and the margin that a plan leaves free."""
        tier = self.runner.tier
        available = tier.available_bytes
        whole = available + min(tier.allocated_bytes, self.now.plan.allocated)
        return available, whole - budget_of(whole)

    def _least(self, engine: Engine) -> bool:
        """Whether nothing more can be given back."""
        now, streams = self.now, isinstance(self.runner.tier, StreamsWeights)
        resident = now.resident or now.cache if now.streamed else streams
        return now.limits.pages <= engine.min_pages and not resident

    def _reopen(self, engine: Engine) -> None:
        """Plan again within the free memory, and log what changed. If the model's file was changed,
        weights cannot be read again: then memory stays as it is for good."""
        before, tier = self.now, self.runner.tier
        self._short, self._free_since = 0, None
        try:
            self.runner.model.file.check_unchanged()
        except ModelFileError as error:
            self._looked = float("inf")
            log.warning("device memory stays as it is: %s", error)
            return
        engine.reopen(lambda: self._reopen_fitting(engine.min_pages))
        self.given_back = self.first.plan.budgeted - self.now.plan.budgeted
        self._free = min(self._free_and_margin())
        if self.now.plan.budgeted == before.plan.budgeted:
            return
        self.changes += 1
        log.warning(
            "%s on %s: %s %s of device memory; %d of %d pages and %s of weights on it now%s",
            self.runner.model.config.name,
            tier.info.device,
            "gave back" if self.now.plan.budgeted < before.plan.budgeted else "took again",
            format_bytes(abs(before.plan.budgeted - self.now.plan.budgeted)),
            self.now.limits.pages,
            self.first.limits.pages,
            format_bytes(sum(self.now.plan.weights.values())),
            "" if self.given_back == 0 else ", until other programs need less",
        )

    def _reopen_fitting(self, min_pages: int) -> None:
        """Open the runner with what fits now. Another program may take the memory first; then plan
        again, the last time without a margin."""
        for seconds in (*RETRY_SECONDS, None):
            try:
                self._open(min_pages, margin=seconds is not None)
                return
            except (OutOfMemory, DoesNotFit):
                if seconds is None:
                    raise
                self.wait(seconds)

    def _open(self, min_pages: int, *, margin: bool) -> None:
        runner = self.runner
        tier, model = runner.tier, runner.model
        runner.close()
        # Unreferenced lowered steps still hold device memory.
        gc.collect()
        if isinstance(tier, StreamsWeights):
            tier.stream(runner.graph, ())
        budget = budget_of(tier.available_bytes) if margin else tier.available_bytes
        if self.asked is not None:
            budget = min(budget, self.asked)
        found = refit_residency(model, tier, self.first, min_pages, budget)
        self.now = found.applied(model, tier, budget)
        runner.reopen(self.now.limits)
        runner.prepare()


def live_memory_of(loaded: LoadedModel) -> LiveMemory | None:
    """The watcher of the model's device memory. None if weights cannot stay in host memory, so that
    little could be given back, and if a trace or draft model refers to that memory."""
    prepared, options = loaded.prepared, loaded.options
    alone = loaded.traced is None and prepared.drafting is None
    if not alone or not isinstance(prepared.tier, StreamsWeights) or not prepared.tier.streams:
        return None
    return LiveMemory(loaded.runner, prepared.residency, options.memory_budget)
