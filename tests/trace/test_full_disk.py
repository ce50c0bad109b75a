"""A trace or a timeline that its disk has no room for is named."""

from pathlib import Path

import pytest

from contract.errors import ZincError
from contract.types import Request
from harness.trace.framing import RecordKind, TraceWriter
from harness.trace.timeline import Timeline
from tests.full_disk import largest_file

LARGE = bytes(1 << 17)
"""More than a file keeps in memory before it writes."""


def write_trace(path: Path, payload: bytes) -> None:
    with TraceWriter(path, {}) as writer:
        writer.write(RecordKind.END, payload)
        if payload:
            writer.flush()


def write_timeline(path: Path, requests: int) -> None:
    with Timeline(path) as timeline:
        for number in range(requests):
            timeline.submitted(0.0, Request(number, 0, (1,), 1))


@pytest.mark.parametrize("payload", [b"", bytes(4096), LARGE], ids=["close", "flushed", "write"])
def test_a_trace_names_its_file(tmp_path, payload):
    """At its end, too, and when what ends it is the same disk."""
    path = tmp_path / "a.trace"
    with (
        largest_file(16),
        pytest.raises(ZincError, match=f"^{path}: cannot be written: File too large"),
    ):
        write_trace(path, payload)


@pytest.mark.parametrize("requests", [1, 4000])
def test_a_timeline_names_its_file(tmp_path, requests):
    path = tmp_path / "a.json"
    with (
        largest_file(16),
        pytest.raises(ZincError, match=f"^{path}: cannot be written: File too large"),
    ):
        write_timeline(path, requests)
