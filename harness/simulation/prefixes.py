"""Clients that save what is cached of a request's tokens, load it later, and drop it."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from contract.arithmetic import PAGE_TOKENS
from contract.arrays import Ints
from harness.simulation.clients import Clients
from harness.simulation.device import Page, SavedState
from harness.simulation.history import histories_of
from harness.simulation.invariants import Invariant, require
from harness.simulation.machine import Machine
from harness.simulation.schedule import Prefix
from reference.engine import Engine

PAGES_AT_ONCE = 2
"""Most pages that one call saves."""


@dataclass(frozen=True, slots=True)
class SavedPrefix:
    """The ``pages`` of ``tokens``, and the recurrent ``state`` after them of a model with one."""

    tokens: Ints
    pages: list[Any]
    state: Any


class Prefixes:
    """Does the ``Prefix`` actions of a schedule. ``counts`` has how often each did something."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._saved: dict[int, SavedPrefix] = {}

    def act(self, action: Prefix, clients: Clients, machine: Machine) -> None:
        """Save, load or drop what is cached of a client's tokens. Raises Violation, and what the
        engine raises."""
        client = clients.by_id.get(action.request_id)
        served = None if client is None else machine.served.get(client.model)
        if client is None or served is None or client.request.tenant not in machine.tenants:
            return
        tenant = client.request.tenant
        tokens = np.array((*client.request.prompt, *client.tokens), np.int32)
        tokens = tokens[tokens >= 0]
        if action.operation == "save":
            self._save(machine, served.engine, tenant, action.request_id, tokens)
        elif action.operation == "load" and action.request_id in self._saved:
            scope = machine.scopes.number_of(tenant)
            self._load(machine, served.engine, tenant, self._saved[action.request_id], scope)
        elif action.operation == "drop":
            machine.call(lambda: served.engine.drop_prefix(tenant, tokens))

    def _save(
        self, machine: Machine, engine: Engine, tenant: int, request_id: int, tokens: Ints
    ) -> None:
        """As a server does: how much is cached, the state, then the pages in several calls."""
        interrupted = self._counts["interrupted calls"]
        tokens = tokens[: engine.cached_prefix(tenant, tokens)]
        state = engine.save_state(tenant, tokens)
        pages: list[Any] = []
        save = partial(engine.save_pages, tenant, tokens)
        while more := machine.call(partial(save, len(pages), PAGES_AT_ONCE)):
            pages += more
        whole = len(pages) * PAGE_TOKENS
        self._check(tokens, pages, state)
        if self._counts["interrupted calls"] > interrupted:
            # The engine has recovered, and forgotten what was cached.
            return
        require(
            whole == len(tokens) and (state is None or whole > 0),
            Invariant.HISTORY,
            lambda: f"{whole} of {len(tokens)} cached tokens of request {request_id} were saved",
        )
        if not pages:
            return
        self._counts["prefixes saved"] += 1
        self._saved[request_id] = SavedPrefix(tokens, pages, state)

    def _check(self, tokens: Ints, pages: list[Any], state: Any) -> None:
        """Check what was saved of a simulated model: a real one is checked by the answers of those
        that use it."""
        histories = histories_of(tokens.tolist())
        for number, page in enumerate(pages):
            first = number * PAGE_TOKENS
            right = Page(histories[first], histories[first + 1 : first + 1 + PAGE_TOKENS])
            require(
                not isinstance(page, Page) or replace(page, scope=right.scope) == right,
                Invariant.HISTORY,
                lambda: f"page {number} was saved with other tokens",  # noqa: B023
            )
        require(
            not isinstance(state, SavedState) or state.history == histories[-1],
            Invariant.HISTORY,
            lambda: "the state was saved of other tokens",
        )

    def _load(
        self, machine: Machine, engine: Engine, tenant: int, saved: SavedPrefix, scope: int
    ) -> None:
        """Load it for the tenant that has the id now."""
        memory, whole = engine.memory, len(saved.pages)
        room = memory.available(tenant) >= whole and engine.tenants.within_quota(tenant, whole)
        caches = engine.options.prefix_cache and engine.options.cached_pages is None
        pages: list[Any] = [
            replace(page, scope=scope) if isinstance(page, Page) else page for page in saved.pages
        ]
        count = machine.call(lambda: engine.load_prefix(tenant, saved.tokens, pages, saved.state))
        self._counts["prefixes loaded"] += count > 0
        full = room and caches and not engine.runner.recurrent.slot_bytes
        require(
            count <= len(saved.tokens) and (count == len(saved.tokens) or not full),
            Invariant.HISTORY,
            lambda: f"{count} of {len(saved.tokens)} tokens were loaded, and there was room",
        )
