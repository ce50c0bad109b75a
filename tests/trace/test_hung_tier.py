"""What a trace holds of a process that ends without closing it."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from contract.tier import Tier
from harness.trace.framing import TraceWriter
from harness.trace.record import record_on
from reference.cpu.tier import CpuTier
from tests.trace import recordings
from tests.trace.recordings import TIERS, record_recurrent

HANGING = (
    "reserve",
    "alloc",
    "upload",
    "free",
    "read",
    "write",
    "lower",
    "submit",
    "wait",
    "close",
)


class Watched:
    """A tier that looks into the file of its trace before anything that may hang."""

    def __init__(self, tier: Tier, path: Path, recorded: list[int]) -> None:
        self.missing: dict[str, int] = {}
        """The bytes of records that the file lacked, by method."""
        self._tier = tier
        self._path = path
        self._recorded = recorded

    def __getattr__(self, name: str) -> Any:
        if name in HANGING:
            lacks = sum(self._recorded) - self._path.stat().st_size
            self.missing[name] = max(lacks, self.missing.get(name, 0))
        return getattr(self._tier, name)


@pytest.mark.parametrize("patient", [False, True])
def test_what_was_recorded_is_in_the_file_before_a_tier_may_hang(
    synthetic_model, tmp_path, monkeypatch, patient
):
    """A process whose engine hangs ends without its recorder."""
    recorded: list[int] = []
    put = TraceWriter._put

    def counted(writer: TraceWriter, *parts: bytes | memoryview) -> None:
        recorded.append(sum(map(len, parts)))
        put(writer, *parts)

    monkeypatch.setattr(TraceWriter, "_put", counted)
    monkeypatch.setattr(recordings, "record_on", partial(record_on, patient=patient))
    tier = Watched(CpuTier(), tmp_path / "a.trace", recorded)
    monkeypatch.setitem(TIERS, "watched", lambda: tier)
    record_recurrent(synthetic_model(architecture="qwen35"), tmp_path / "a.trace", "watched")
    assert tier.missing == dict.fromkeys(HANGING, 0)
