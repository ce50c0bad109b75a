"""The engine's calls about its memory: cached prefixes are copied to host memory and back or
dropped, and the runner gets other memory while requests run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from contract.arithmetic import PAGE_TOKENS
from contract.arrays import Ints
from reference.engine.disk_step import flush_disk_cache
from reference.engine.options import EngineOptions
from reference.engine.pipeline import Pipeline
from reference.engine.slot_manager import copies_of
from reference.memory.kv import KvMemory
from reference.memory.prefix import Node, Scope, scope_of
from reference.memory.row_copies import HostBytes
from reference.runner import ModelRunner
from reference.sched.tenants import Tenants

if TYPE_CHECKING:
    from contract.arrays import Bytes
    from reference.engine.disk_pages import DiskPages

SLOT = 0
"""The slot recorded for pages while they are loaded; nothing of the slot uses them."""


class MemoryCalls:
    """A base class of ``Engine`` for calls about its memory. ``_change`` is a context whose change
    is made completely or undone. ``_repair`` first removes what an interrupted call left, which
    could otherwise be found in the cache."""

    runner: ModelRunner
    options: EngineOptions
    memory: KvMemory
    tenants: Tenants
    _pipeline: Pipeline
    _disk: DiskPages | None
    _consistent: bool
    _change: Callable[[], AbstractContextManager[None]]
    _repair: Callable[[], None]
    _recover: Callable[..., None]

    @property
    def min_pages(self) -> int:
        """The fewest pages with which every accepted request can still run: those of the longest
        context, and all reserved pages."""
        return self.runner.limits.slot_pages + self.memory.reservations.pages

    def reopen(self, reopen_runner: Callable[[], None]) -> None:
        """Let all sequences wait, call ``reopen_runner``, which closes the runner and opens it
        again, and continue. The new runner has at least ``min_pages`` and at most its first
        number of pages.

        Sequences are computed again from their tokens, so no answer changes. Cached pages are lost,
        except those on disk. Raises what ``reopen_runner`` raises."""
        if self._disk is None:
            self._pipeline.drain()
        else:
            flush_disk_cache(self._disk, self._pipeline, waits=False)
        self._consistent = False
        self._pipeline.clear()
        reopen_runner()
        copies = copies_of(self.runner, self.options, self._disk)
        self.memory.resize(self.runner.limits.pages, copies)
        if self._disk is not None:
            self._disk.reopened(self.runner)
        self._recover(fault=False)

    def cached_prefix(self, tenant: int, tokens: Ints) -> int:
        """How many of a tenant's ``tokens``, int32[n], could be saved now: whole pages, and in a
        model with recurrent layers up to the last saved state."""
        return len(self._path(tenant, tokens)) * PAGE_TOKENS

    def save_pages(self, tenant: int, tokens: Ints, first: int, count: int) -> list[Bytes]:
        """The keys and values of at most ``count`` pages of ``tokens`` from page ``first`` on,
        uint8[page_bytes] each; fewer if later pages are not cached. Waits for the steps in
        flight."""
        copies = self.runner.page_copies()
        path = self._path(tenant, tokens)[first : first + count]
        if copies is None or not path:
            return []
        with self._change():
            self._pipeline.wait()
            saved = [node.saved if node.page is None else copies.save(node.page) for node in path]
            return [each.bytes() for each in saved]

    def save_state(self, tenant: int, tokens: Ints) -> Bytes | None:
        """The recurrent state after exactly ``tokens``, None if it is not cached."""
        path = self._path(tenant, tokens)
        state = path[-1].state if len(path) * PAGE_TOKENS == len(tokens) and path else None
        if state is None:
            return None
        with self._change():
            self._pipeline.wait()
            return self.runner.recurrent.read(state).bytes()

    def load_prefix(
        self, tenant: int, tokens: Ints, pages: Sequence[Bytes], state: Bytes | None
    ) -> int:
        """Cache the ``pages`` of a tenant's ``tokens``, and the recurrent ``state`` after the last
        of them. Returns how many tokens are cached then: fewer if room or quota is short, and 0
        then for a model with states."""
        self._repair()
        copies, memory, scope = self.runner.page_copies(), self.memory, self._scope(tenant)
        whole = min(len(pages), memory.available(tenant))
        short = whole < len(pages) and self.runner.recurrent.slot_bytes > 0
        if copies is None or short or not self.tenants.within_quota(tenant, whole):
            return 0
        tokens = tokens[: whole * PAGE_TOKENS]
        with self._change():
            slot = None if state is None else memory.save_state_slot()
            taken = memory.take(whole, tenant, SLOT)
            assert taken is not None, "they are available"
            copies.load_all([HostBytes(data) for data in pages[:whole]], taken)
            memory.publish(scope, tokens, taken, None, tenant)
            if slot is not None and state is not None:
                self.runner.recurrent.write(slot, HostBytes(state), len(tokens))
                memory.attach_state(scope, tokens, slot)
            memory.release(taken, tenant)
        return self.cached_prefix(tenant, tokens)

    def drop_prefix(self, tenant: int, tokens: Ints) -> None:
        """Drop the cached pages of a tenant's ``tokens``, on disk too, except those that other
        prompts share or sequences hold."""
        self._repair()
        scope = self._scope(tenant)
        with self._change():
            dropped = self.memory.forget(scope, tokens, tenant)
            if self._disk is not None:
                self._disk.erase(scope, dropped)

    def _path(self, tenant: int, tokens: Ints) -> list[Node]:
        """The cached pages of a prefix of a tenant's ``tokens``."""
        self._repair()
        return self.memory.path(self._scope(tenant), tokens, len(tokens))

    def _scope(self, tenant: int) -> Scope:
        return scope_of(self.tenants[tenant])
