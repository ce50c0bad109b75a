"""How much of the cores this process and others use."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class CpuUse:
    """How busy the cores this process may use have been so far, in seconds of core time."""

    wall: float
    busy: float
    own: float

    @classmethod
    def now(cls) -> CpuUse:
        """The counters at this moment; time a hypervisor gave to others counts as busy."""
        cores = psutil.cpu_times(percpu=True)
        allowed = getattr(psutil.Process(), "cpu_affinity", lambda: range(len(cores)))()
        busy = 0.0
        for core in allowed:
            times = cores[core]._asdict()
            # User time on Linux holds the time of guests already.
            for name in ("idle", "iowait", "guest", "guest_nice"):
                times.pop(name, None)
            busy += sum(times.values())
        own = psutil.Process().cpu_times()
        return cls(time.perf_counter() * len(allowed), busy, own.user + own.system)

    def others_since(self, earlier: CpuUse) -> float:
        """The share of the cores that other processes used between two moments, 0 to 1."""
        others = (self.busy - earlier.busy) - (self.own - earlier.own)
        wall = self.wall - earlier.wall
        return min(1.0, max(0.0, others / wall)) if wall > 0 else 0.0
