"""Keeps Python's garbage collector away from objects that live as long as a model.

A full collection visits 76,000 containers in a loaded server, 52 ms of CPU time on a two-core EPYC,
and no step is planned meanwhile."""

from __future__ import annotations

import gc

_frozen = False


def freeze_heap() -> None:
    """Collect, and exclude all current objects from later collections. Only for a process that does
    nothing else."""
    global _frozen
    _frozen = True
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def refreeze_heap() -> None:
    """Freeze the heap again if it is frozen: to be called after a model was loaded or unloaded."""
    if _frozen:
        freeze_heap()
