"""Engines that are opened one after the other on one folder, as a server that is restarted."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from contract.dtypes import I12, DType
from contract.types import LOCAL_TENANT, Clock, Request, Tenant
from harness.file_digests import file_digests
from harness.host.disk import function_name
from reference.cpu.tier import CpuTier
from reference.engine import Engine, EngineOptions
from reference.engine.engine import no_clock
from reference.limits import Limits
from reference.memory.disk.cache import DiskCache, DiskCacheOptions
from reference.memory.disk.folder import SUBFOLDER
from reference.memory.disk.statistics import DiskStatistics
from reference.model.open import open_model
from reference.observer import Observer
from reference.runner import ModelRunner
from reference.sched.tenants import Tenants
from tests.engine.agent_sessions import GREEDY, ask
from tests.engine.small_engine import ALL_TIERS as TIERS

CONTEXT = 192
PLENTY = 1 << 30
PROMPT = tuple(np.random.default_rng(5).integers(0, 256, 100).tolist())
WHOLE = len(PROMPT) // 16 * 16
"""Tokens of the whole pages of the prompt."""
ANSWER = 8


class Loads(Observer):
    """Notes how many tokens of each request came from the cache, and how many of them from disk."""

    def __init__(self) -> None:
        self.reused: dict[int, int] = {}
        self.from_disk: dict[int, int] = {}

    def loaded(self, at: float, request_id: int, tokens: int) -> None:
        """See ``Observer``."""
        self.from_disk[request_id] = tokens

    def admitted(self, at: float, request_id: int, slot: int, known: int, reused: int) -> None:
        """See ``Observer``."""
        self.reused.setdefault(request_id, reused)


@dataclass
class Life:
    """One life of a server: its engine, what it noted, and what was logged."""

    engine: Engine
    loads: Loads
    lines: list[str] = field(default_factory=list)
    asked: int = 0

    def ask(self, prompt: Sequence[int] = PROMPT, most: int = ANSWER, tenant: int = 0) -> str:
        """The digest of all logits of an answer to ``prompt``."""
        self.asked += 1
        return ask(self.engine, prompt, most, id=self.asked, tenant=tenant)[1]

    @property
    def from_disk(self) -> int:
        """Tokens of the latest request that came from disk."""
        return self.loads.from_disk.get(self.asked, 0)

    @property
    def counts(self) -> DiskStatistics:
        """The counts of the disk cache."""
        assert self.engine.disk is not None
        return self.engine.disk.statistics

    def flush(self) -> None:
        """Write what waits to be written."""
        assert self.engine.disk is not None
        self.engine.disk.flush()


@contextmanager
def life(
    path: Path, folder: Path | None, *, tier: str = "quick", kv_dtype: DType = I12,
    max_bytes: int = PLENTY, tenants: Sequence[Tenant] | Tenants = (LOCAL_TENANT,),
    pages: int = 36, slots: int = 2, steps_ahead: int | None = None,
    clock: Clock = no_clock, **options: Any,
) -> Iterator[Life]:  # fmt: skip
    """A server's life with a disk cache in ``folder``; None is a cold one without a cache."""
    model = open_model(path)
    limits = Limits(
        slots, CONTEXT, pages, kv_dtype, step_tokens=24 + slots, step_rows=24,
        saved_states=6, state_interval=32,
    )  # fmt: skip
    opening = CpuTier if tier == "cpu" else TIERS[tier]
    with model.file, opening() as opened, ModelRunner(model, opened, limits) as runner:
        lines: list[str] = []
        disk = None
        if folder is not None:
            function = function_name(
                model, limits, file_digests(model, folder.parent / "digests.json")
            )
            chosen = DiskCacheOptions(
                folder, max_bytes, function,
                **{"patience": 600.0, "flush_seconds": 600.0, **options},
            )  # fmt: skip
            disk = DiskCache(chosen, lines.append, clock)
        loads = Loads()
        engine = Engine(
            runner, EngineOptions(prefix_cache=folder is not None, steps_ahead=steps_ahead),
            tenants=tenants if isinstance(tenants, Tenants) else Tenants(tenants, clock=no_clock),
            observer=loads, disk=disk,
        )  # fmt: skip
        try:
            yield Life(engine, loads, lines)
        finally:
            if disk is not None:
                disk.close()


def request(id: int, tenant: int = 0) -> Request:
    """A request for an answer to the prompt."""
    return Request(id, PROMPT, ANSWER, GREEDY, tenant=tenant, ignore_end=True)


def lived(model: Path, folder: Path) -> str:
    """The answer of a first life that fills the folder."""
    with life(model, folder) as first:
        return first.ask()


def files(folder: Path, ending: str = ".page") -> list[Path]:
    """The files of the prompt's pages, or of states after them, in the order of the prompt."""
    ids = np.array(PROMPT, np.int32).tobytes()
    pages = [ids[start : start + 64] for start in range(0, WHOLE * 4, 64)]
    found = {}
    for path in (folder / SUBFOLDER).glob(f"*/*{ending}"):
        tokens = path.read_bytes()[64:128]
        if tokens in pages:
            found[pages.index(tokens)] = path
    return [found[number] for number in sorted(found)]
