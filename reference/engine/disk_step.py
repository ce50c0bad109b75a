"""The work of an engine for its disk cache after every step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from reference.engine.pipeline import Pipeline
from reference.runner import ModelRunner
from reference.sched.tenants import Tenants

if TYPE_CHECKING:
    from reference.engine.disk_pages import DiskPages
    from reference.memory.disk.cache import DiskCache

WAIT_SECONDS = 0.002
"""Longest wait for the disk while there is nothing to compute."""


def disk_pages_of(
    cache: DiskCache | None, runner: ModelRunner, tenants: Tenants
) -> DiskPages | None:
    """The reader and writer of ``cache``; None without a cache or without KV pages."""
    copies = None if cache is None else runner.page_copies()
    if cache is None or copies is None:
        return None
    # Imported here, because most engines have no disk cache.
    from reference.engine.disk_pages import DiskPages

    return DiskPages(cache, copies, runner.recurrent, tenants)


def flush_disk_cache(disk: DiskPages, pipeline: Pipeline, *, waits: bool = True) -> None:
    """Write everything computed so far to the disk cache: with ``waits`` as much as the time
    allows, else as much as there is room for. If a step in flight or a copy fails, what was
    computed is unknown: nothing more is written, and the error is reported once."""
    try:
        pipeline.drain()
        (disk.finish if waits else disk.save_all)(pipeline.steps_read)
    except Exception as error:
        disk.cache.report(f"is not given the last pages, since the device failed: {error!r}")
        disk.clear()


def update_disk_cache(disk: DiskPages, pipeline: Pipeline, idle: bool, blocked: bool) -> bool:
    """Write what was computed, and everything once the cache closes. Load what was read for
    sequences with slots, and let the scheduler look again at waiting sequences whose pages were
    read. If the engine is ``blocked`` but not ``idle``, wait for pages. Returns whether it is still
    blocked: there is nothing new to compute."""
    disk.cache.before_close = partial(flush_disk_cache, disk, pipeline)
    if idle:
        pipeline.drain()
        disk.save_all(pipeline.steps_read)
        return blocked
    disk.save(pipeline.steps_read)
    if blocked and disk.reading:
        disk.cache.wait(WAIT_SECONDS)
    loaded, arrived = pipeline.load_more(), disk.arrived()
    if arrived:
        pipeline.recheck_waiting()
    return blocked and not (loaded or arrived)
