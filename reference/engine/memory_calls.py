"""The engine's call that gives its runner other memory while requests run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from reference.engine.disk_step import flush_disk_cache
from reference.engine.options import EngineOptions
from reference.engine.pipeline import Pipeline
from reference.engine.slot_manager import copies_of
from reference.memory.kv import KvMemory
from reference.runner import ModelRunner

if TYPE_CHECKING:
    from reference.engine.disk_pages import DiskPages


class MemoryCalls:
    """A base class of ``Engine`` for changes of the runner's memory."""

    runner: ModelRunner
    options: EngineOptions
    memory: KvMemory
    _pipeline: Pipeline
    _disk: DiskPages | None
    _consistent: bool
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
