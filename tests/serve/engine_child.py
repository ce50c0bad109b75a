"""``python -m tests.serve.engine_child FD``: the process of a server's engines, with what tests
add."""

from __future__ import annotations

import sys
from functools import partial

from contract.types import Tenant
from harness import tiers
from harness.host import disk
from harness.host.remote.server import main
from reference.engine import Engine
from reference.engine.statistics import EngineStatistics
from reference.memory.disk.cache import DiskCacheOptions
from tests.named_tiers import quick_tier
from tests.null_tier import NullTier
from tests.patience import PATIENCE_SECONDS

NULL_TOKEN = 65
QUICK = "quick"
ADDED = {QUICK: lambda options: quick_tier(), "null": lambda options: NullTier(NULL_TOKEN)}
"""Functions that open a tier that only tests have, by its name."""
PATIENT = partial(DiskCacheOptions, patience=PATIENCE_SECONDS, flush_seconds=PATIENCE_SECONDS)
"""A busy machine's disk is waited for."""


def rests(engine: Engine) -> bool:
    """Whether an engine has nothing to do."""
    return engine.idle


def statistics_of(engine: Engine) -> EngineStatistics:
    """The engine's statistics now."""
    return engine.statistics


def tenant_of(engine: Engine, number: int) -> Tenant | None:
    """The tenant that an engine has by this id."""
    return next((one for one in engine.tenants if one.id == number), None)


def never_too_slow(engine: Engine) -> None:
    """Let requests wait for ever whose events nobody reads."""
    engine._stall_steps = 10**6


def check_memory(engine: Engine) -> None:
    """Check the engine's memory."""
    engine.memory.check()


def flush_disk(engine: Engine) -> int:
    """Write what the disk cache has; returns how many pages it wrote in all."""
    assert engine.disk is not None
    engine.disk.flush()
    return engine.disk.statistics.written


if __name__ == "__main__":
    tiers.TIERS = {**tiers.TIERS, **ADDED}
    disk.DiskCacheOptions = PATIENT  # type: ignore[misc, assignment]
    main(int(sys.argv[1]))
