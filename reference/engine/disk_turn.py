"""What an engine does for its disk cache after every step."""

from __future__ import annotations

from reference.engine.disk_pages import DiskPages
from reference.engine.pipeline import Pipeline

WAIT_SECONDS = 0.002
"""Longest wait for the disk where there is nothing to compute."""


def use_disk(disk: DiskPages, pipeline: Pipeline, idle: bool, blocked: bool) -> None:
    """Write what was computed. Where a sequence's pages were read, have it looked at again. Where
    an engine that is not ``idle`` is ``blocked``, it waits for them."""
    if idle:
        pipeline.settle()
        disk.save_all(pipeline.steps_read)
        return
    disk.save(pipeline.steps_read)
    if blocked and disk.reading:
        disk.cache.wait(WAIT_SECONDS)
    if disk.arrived():
        pipeline.look_again()
