"""A recorded run gives the same bits again, on any tier; whatever differs is found."""

import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from contract.arithmetic import ARITHMETIC_VERSION
from contract.errors import ZincError
from harness.digest import file_digest
from harness.trace.framing import FRAME, PREFIX, RecordKind, TraceError, TraceReader, TraceWriter
from harness.trace.records import ModelRecord, Submit
from tests.trace.recordings import (
    LIMITS,
    REQUESTS,
    TIERS,
    Refusing,
    Wrong,
    record_both,
    record_constrained,
    record_draft,
    record_engine,
    record_page_copies,
    record_recurrent,
    replay,
    replay_both,
)


@pytest.fixture(scope="module")
def trace(tiny_model_path, tmp_path_factory) -> Path:
    """A run of the engine on the CPU tier."""
    path = tmp_path_factory.mktemp("traces") / "engine.trace"
    record_engine(tiny_model_path, path, "cpu")
    return path


@pytest.mark.parametrize("other", TIERS)
@pytest.mark.parametrize(("tier", "depth"), [("cpu", 0), ("late", 3), ("native", 2), ("opencl", 1)])
def test_what_one_tier_did_every_tier_does(tiny_model_path, tmp_path, tier, depth, other):
    """Prefill and decode, greedy and sampled, joining and leaving, at any depth of the pipeline."""
    path = tmp_path / "engine.trace"
    tokens = record_engine(tiny_model_path, path, tier, depth=depth)
    assert [len(tokens[request.id]) for request in REQUESTS] == [6, 9, 5]
    replayed = replay(tiny_model_path, path, other)
    assert replayed.difference is None
    assert replayed.whole
    assert replayed.compared > replayed.submissions > 9


@pytest.mark.parametrize("tier", TIERS)
def test_models_side_by_side(synthetic_model, tiny_model_path, tmp_path, tier):
    """Two on one tier, their steps in turn; each weight comes from its own file."""
    paths = (tiny_model_path, synthetic_model(architecture="qwen2", quant="q8_0"))
    trace = tmp_path / "both.trace"
    record_both(paths, trace)
    assert replay_both(paths, trace, tier).difference is None
    with pytest.raises(TraceError, match="recorded with another model"):
        replay_both(paths[::-1], trace, tier)


@pytest.mark.parametrize("tier", TIERS)
def test_a_draft_model_is_in_it(synthetic_model, tiny_model_path, tmp_path, tier):
    paths = (tiny_model_path, synthetic_model(architecture="qwen3", quant="q8_0"))
    trace = tmp_path / "draft.trace"
    assert record_draft(paths, trace) > 0
    assert replay_both(paths, trace, tier).difference is None


@pytest.mark.parametrize("tier", TIERS)
def test_masks_biases_and_log_probabilities_are_in_it(tiny_model_path, tmp_path, tier):
    path = tmp_path / "constrained.trace"
    record_constrained(tiny_model_path, path, "late")
    assert replay(tiny_model_path, path, tier).difference is None


@pytest.mark.parametrize("tier", TIERS)
def test_recurrent_states_move_as_they_did(synthetic_model, tmp_path, tier):
    """Saves and loads in the queue, reads and writes between steps."""
    model = synthetic_model(architecture="qwen35", quant="q4_k_m")
    path = tmp_path / "recurrent.trace"
    record_recurrent(model, path, "cpu")
    with TraceReader(path) as reader:
        kinds = {record.kind for record in reader.records()}
    assert kinds == set(RecordKind) - {RecordKind.FAILED}
    assert replay(model, path, tier).difference is None


@pytest.mark.parametrize("kv_dtype", ["f16", "q8_0", "i12", "i4r", "i3r"])
@pytest.mark.parametrize("tier", TIERS)
def test_pages_of_every_type_are_copied_as_they_were(tiny_model_path, tmp_path, tier, kv_dtype):
    """As they are with caches in host memory and on disk."""
    path = tmp_path / "pages.trace"
    record_page_copies(tiny_model_path, path, kv_dtype)
    assert replay(tiny_model_path, path, tier).difference is None


def test_recording_changes_nothing(tiny_model_path, tmp_path):
    """The tokens are those of the tier alone, and small: far less than the inputs themselves."""
    first = record_engine(tiny_model_path, tmp_path / "one", "cpu")
    assert first == record_engine(tiny_model_path, tmp_path / "other", "opencl", depth=3)
    with TraceReader(tmp_path / "one") as reader:
        submits = [len(r.payload) for r in reader.records() if r.kind is RecordKind.SUBMIT]
    assert np.median(submits) < 512
    with TraceReader(tmp_path / "one") as reader:
        assert reader.header["tier"] == "cpu"
        assert reader.header["arithmetic"] == ARITHMETIC_VERSION
        first = next(iter(reader.records()))
    assert first.kind is RecordKind.MODEL
    traced = ModelRecord.unpack(first.payload)
    assert traced.path == str(tiny_model_path)
    assert traced.sha256 == (file_digest(tiny_model_path),)
    assert traced.limits["pages"] == LIMITS.pages


@pytest.mark.parametrize("step", [1, 4, 9])
def test_the_first_step_that_differs_is_named(tiny_model_path, trace, step):
    """The negative control: a tier that reads one token wrong."""
    difference = replay(tiny_model_path, trace, "cpu", of=Wrong(step)).difference
    assert difference is not None
    assert difference.submission >= step - 1
    assert "slot@position" in str(difference)
    # A step whose wrong token is not sampled from differs later, others at once.
    assert difference.submission <= step + 1


def test_an_input_that_was_changed_is_found(tiny_model_path, trace, tmp_path):
    """A trace rewritten with one other token, every checksum right: the results tell."""
    forged = tmp_path / "forged.trace"
    with TraceReader(trace) as reader, TraceWriter(forged, reader.header) as writer:
        for record in reader.records():
            payload = bytearray(record.payload)
            if record.kind is RecordKind.SUBMIT:
                submit = Submit.unpack(record.payload)
                # Line 4 begins with the first query token; 1 is added to what decode sent as -1.
                for place, line in zip(submit.numbers, submit.lines.copy(), strict=True):
                    if place == 4 and line.view("<i4")[0] >= 0:
                        start = payload.index(line.tobytes())
                        payload[start] ^= 1
            if record.kind is not RecordKind.END:
                writer.write(record.kind, bytes(payload))
    assert replay(tiny_model_path, forged, "cpu").difference is not None


@pytest.mark.parametrize("where", [0.02, 0.3, 0.5, 0.77, 0.999])
@pytest.mark.parametrize("bit", [1, 128])
def test_a_flipped_bit_is_found(tiny_model_path, trace, tmp_path, where, bit):
    """Wherever it is, lengths included, reading stops there and says so."""
    data = bytearray(trace.read_bytes())
    data[int(where * len(data))] ^= bit
    damaged = tmp_path / "damaged.trace"
    damaged.write_bytes(data)
    with pytest.raises(TraceError, match=r"damaged|is not a trace|version"):
        replay(tiny_model_path, damaged, "cpu")


def test_every_flipped_frame_is_found(trace, tmp_path):
    """Kinds and lengths too: none of them passes for a tail that was cut off."""
    data = trace.read_bytes()
    with TraceReader(trace) as reader:
        offsets = [record.offset for record in reader.records()]
    damaged = tmp_path / "damaged.trace"
    for offset in offsets[:: max(1, len(offsets) // 8)]:
        for place in range(FRAME.itemsize):
            changed = bytearray(data)
            changed[offset + place] ^= 0x10
            damaged.write_bytes(changed)
            with (
                TraceReader(damaged) as reader,
                pytest.raises(TraceError, match=f"the record at byte {offset} is damaged"),
            ):
                list(reader.records())


def test_a_tail_that_was_cut_off_is_dropped(tiny_model_path, trace, tmp_path):
    """What is whole is replayed, and the answer says that something is missing."""
    data = trace.read_bytes()
    cut = tmp_path / "cut.trace"
    for kept in (len(data) - 1, len(data) - FRAME.itemsize, len(data) * 3 // 4, len(data) // 2):
        cut.write_bytes(data[:kept])
        replayed = replay(tiny_model_path, cut, "cpu")
        assert replayed.difference is None
        assert not replayed.whole


@pytest.mark.parametrize("kept", [0, 5, PREFIX.itemsize - 1, PREFIX.itemsize + 3])
def test_a_header_cannot_be_cut(trace, tmp_path, kept):
    cut = tmp_path / "cut.trace"
    cut.write_bytes(trace.read_bytes()[:kept])
    with pytest.raises(TraceError, match=r"not a trace|header is damaged"):
        TraceReader(cut)


@pytest.mark.parametrize("tier", TIERS)
def test_what_a_tier_refused_is_not_done_again(tiny_model_path, tmp_path, tier):
    """A fault in the middle: the requests resume, and the replay leaves out what never ran."""
    path = tmp_path / "refused.trace"
    tokens = record_engine(tiny_model_path, path, "cpu", of=Refusing(5))
    assert tokens == record_engine(tiny_model_path, tmp_path / "other.trace", "cpu")
    with TraceReader(path) as reader:
        assert [record.kind for record in reader.records()].count(RecordKind.FAILED) == 1
    assert replay(tiny_model_path, path, tier).difference is None


def test_a_submission_that_ends_the_process_is_in_the_trace(tiny_model_path, trace, tmp_path):
    """It was written before it was done: the last one without a result."""
    data = trace.read_bytes()
    with TraceReader(trace) as reader:
        last = [record.offset for record in reader.records() if record.kind is RecordKind.RESULT][
            -1
        ]
    died = tmp_path / "died.trace"
    died.write_bytes(data[:last])
    replayed = replay(tiny_model_path, died, "cpu")
    assert not replayed.whole
    assert replayed.submissions == replay(tiny_model_path, trace, "cpu").submissions


def test_another_model_is_refused(synthetic_model, trace, tiny_model_path):
    other = synthetic_model(architecture="qwen2", quant="q8_0")
    with pytest.raises(TraceError, match="recorded with another model"):
        replay(other, trace, "cpu")


def test_senseless_records_are_errors(tiny_model_path, trace, tmp_path):
    """Numbers of things that are not there, fields that are missing: never a crash."""
    with TraceReader(trace) as reader:
        header = reader.header
        records = [(r.kind, bytes(r.payload)) for r in reader.records()]
    first_submit = next(n for n, (kind, _) in enumerate(records) if kind is RecordKind.SUBMIT)
    far = (10**6).to_bytes(8, "little")
    senseless = [
        (RecordKind.RESERVE, json.dumps({"graph": 9, "largest": [1, 1]}).encode()),
        (RecordKind.RESERVE, b"{"), (RecordKind.BUFFER, b"{}"), (RecordKind.BATCH, b"[1]"),
        (RecordKind.FREE, far), (RecordKind.SUBMIT, b""),
        (RecordKind.SUBMIT, records[first_submit][1][:-1]), (RecordKind.RESULT, far),
        (RecordKind.WRITE, 3 * far), (RecordKind.READ, 3 * far),
    ]  # fmt: skip
    for bad in senseless:
        path = tmp_path / "senseless.trace"
        path.unlink(missing_ok=True)
        with TraceWriter(path, header) as writer:
            for kind, payload in (*records[:first_submit], bad):
                writer.write(kind, payload)
        with pytest.raises(TraceError, match=f"record {bad[0].name} at byte .* makes no sense"):
            replay(tiny_model_path, path, "cpu")


@pytest.mark.parametrize("seed", range(16))
def test_other_numbers_never_break_it(tiny_model_path, trace, tmp_path, seed):
    """One bit of one payload is another and every checksum right: an error with a name, another
    result, or nothing that mattered."""
    rng = np.random.default_rng(seed)
    with TraceReader(trace) as reader:
        header = reader.header
        records = [(record.kind, bytearray(record.payload)) for record in reader.records()]
    kinds = sorted({kind for kind, payload in records if payload})
    kind = kinds[seed % len(kinds)]
    payload = rng.choice([n for n, record in enumerate(records) if record[0] is kind])
    records[payload][1][rng.integers(len(records[payload][1]))] ^= 1 << int(rng.integers(8))
    path = tmp_path / "other.trace"
    with TraceWriter(path, header) as writer:
        for kind, data in records[:-1]:
            writer.write(kind, bytes(data))
    with suppress(ZincError):
        assert replay(tiny_model_path, path, "cpu").compared > 0
