"""The trace file as bytes: whatever happened to them, reading tells or stops, and never breaks."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract.dtypes import F32, I32
from contract.errors import ConfigError
from harness.trace.framing import FRAME, RecordKind, TraceError, TraceReader, TraceWriter
from harness.trace.records import LINE_BYTES, InputHistory, Submit, digest

HEADER = {"model": "somewhere", "arithmetic": 2}
RECORDS = [(kind, bytes(range(7 * kind))) for kind in RecordKind if kind is not RecordKind.END]
FRESH = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> bytes:
    """A trace of one record of each kind."""
    path = tmp_path_factory.mktemp("traces") / "written"
    with TraceWriter(path, HEADER) as writer:
        for kind, payload in RECORDS:
            writer.write(kind, payload[:3], payload[3:])
    return path.read_bytes()


def read(path: Path, data: bytes) -> tuple[list[tuple[RecordKind, bytes]], bool]:
    """Every record, and whether the trace is whole."""
    path.write_bytes(data)
    with TraceReader(path) as reader:
        assert reader.header == HEADER
        records = [(record.kind, bytes(record.payload)) for record in reader.records()]
        return records, reader.whole


def test_what_was_written_is_read(tmp_path, written):
    assert read(tmp_path / "t", written) == ([*RECORDS, (RecordKind.END, b"")], True)


@FRESH
@given(st.data())
def test_any_flipped_bit_is_an_error(tmp_path, written, data):
    """Magic, version, header, kinds, lengths, checksums, payloads."""
    bit = data.draw(st.integers(0, 8 * len(written) - 1))
    changed = bytearray(written)
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(TraceError):
        read(tmp_path / "t", bytes(changed))


@FRESH
@given(st.data())
def test_any_cut_leaves_the_records_before_it(tmp_path, written, data):
    """Those that are whole, and the knowledge that the end is missing."""
    ends = len(written) - FRAME.itemsize - np.cumsum([0, *map(size, reversed(RECORDS))])[::-1]
    kept = data.draw(st.integers(int(ends[0]), len(written) - 1))
    records, whole = read(tmp_path / "t", written[:kept])
    assert not whole
    assert records == RECORDS[: int((ends[1:] <= kept).sum())]


def size(record: tuple[RecordKind, bytes]) -> int:
    """Bytes of a record in the file."""
    return FRAME.itemsize + len(record[1])


def test_what_follows_the_end_is_an_error(tmp_path, written):
    with pytest.raises(TraceError, match="bytes follow the end"):
        read(tmp_path / "t", written + b"\0")


def test_a_file_in_the_way_is_kept(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(b"mine")
    with pytest.raises(ConfigError, match="cannot be written: File exists"):
        TraceWriter(path, HEADER)
    assert path.read_bytes() == b"mine"


blocks = st.lists(st.integers(0, 255), min_size=4, max_size=4).map(
    lambda lines: np.repeat(np.array(lines, np.uint8), LINE_BYTES)
)


@given(st.lists(st.tuples(st.integers(0, 2), blocks), min_size=1, max_size=12))
def test_inputs_come_back_from_their_changes(steps):
    """Of several graphs in any order; what did not change is not stored."""
    recorded, replayed = InputHistory(), InputHistory()
    latest: dict[int, np.ndarray] = {}
    for graph, inputs in steps:
        places, lines = recorded.changes(graph, inputs)
        before = latest.get(graph, np.zeros_like(inputs))
        assert len(places) == (inputs != before)[::LINE_BYTES].sum()
        payload = b"".join(Submit(5, 3, places, lines).pack())
        submit = Submit.unpack(memoryview(payload))
        assert (submit.batch, submit.requested) == (5, 3)
        assert (replayed.apply(graph, len(inputs), submit) == inputs).all()
        latest[graph] = inputs.copy()


def test_a_digest_knows_what_counts_as_equal():
    """-0 is +0 and every NaN one NaN in binary32, elsewhere a byte is a byte."""
    words = np.array([0, 0x7FC00000, 0x3F800000], np.uint32)
    same = np.array([0x80000000, 0xFFC00001, 0x3F800000], np.uint32)
    other = np.array([0, 0x7FC00000, 0x3F800001], np.uint32)
    assert digest(words.view(np.uint8), F32) == digest(same.view(np.uint8), F32)
    assert digest(words.view(np.uint8), F32) != digest(other.view(np.uint8), F32)
    assert digest(words.view(np.uint8), I32) != digest(same.view(np.uint8), I32)
