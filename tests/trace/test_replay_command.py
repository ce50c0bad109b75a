"""``zinc-rt run --trace`` and ``python -m harness.replay``: what they say, and their exit codes."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from contract.processors import processor_name
from harness.cli.main import main
from harness.replay import main as replay
from harness.trace.framing import RecordKind, TraceReader, TraceWriter


@pytest.fixture(scope="module")
def recorded(tiny_model_path, tmp_path_factory) -> tuple[Path, Path]:
    """A trace and a timeline of one answer."""
    folder = tmp_path_factory.mktemp("recorded")
    trace, timeline = folder / "run.trace", folder / "run.json"
    files = ["--trace", str(trace), "--timeline", str(timeline)]
    sizes = ["--context", "64", "--max-tokens", "9", "--tier", "cpu"]
    model = ["--model", str(tiny_model_path)]
    assert main(["run", "--raw", *model, *files, *sizes, "once upon a time"]) == 0
    return trace, timeline


@pytest.mark.parametrize("tier", ["cpu", "native", "opencl"])
def test_a_recorded_answer_is_identical(recorded, capsys, tier):
    """The model is found by the trace itself."""
    assert replay([str(recorded[0]), "--tier", tier]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("identical: ")
    assert f"recorded on cpu ({processor_name()}), replayed on {tier} " in said.out
    assert "cut off" not in said.err


def test_the_timeline_is_json(recorded):
    """With times that go forward: a session that is watched has a clock."""
    events = json.loads(recorded[1].read_text())
    steps = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert sum(step["args"]["decode"] for step in steps) >= 8
    assert all(step["dur"] > 0 for step in steps)


def test_a_cut_trace_says_so(recorded, tmp_path, capsys):
    cut = tmp_path / "cut.trace"
    cut.write_bytes(recorded[0].read_bytes()[:-5])
    assert replay([str(cut), "--tier", "cpu"]) == 3
    assert capsys.readouterr().out.startswith("NOT WHOLE: its end is missing; identical as far")
    with TraceReader(recorded[0]) as reader:
        first = next(reader.records()).offset
    cut.write_bytes(recorded[0].read_bytes()[:first])
    assert replay([str(cut), "--tier", "cpu"]) == 3
    assert "0 submissions, 0 results" in capsys.readouterr().out


def test_records_left_out_or_swapped_are_named(recorded, tmp_path, capsys):
    """Every checksum is right: the first, one in the middle and the last result, and two buffers
    of every pair of kinds."""
    with TraceReader(recorded[0]) as reader:
        header = reader.header
        records = [(one.kind, bytes(one.payload)) for one in reader.records()][:-1]
    results = [n for n, (kind, _) in enumerate(records) if kind is RecordKind.RESULT]
    forged = tmp_path / "forged.trace"

    def replayed(kept: Sequence[tuple[RecordKind, bytes]]) -> tuple[int, str]:
        forged.unlink(missing_ok=True)
        with TraceWriter(forged, header) as writer:
            for kind, payload in kept:
                writer.write(kind, payload)
        code = replay([str(forged), "--tier", "cpu"])
        said = capsys.readouterr()
        return code, said.out + said.err

    assert replayed(records)[0] == 0
    for left_out in (results[0], results[len(results) // 2]):
        code, said = replayed([*records[:left_out], *records[left_out + 1 :]])
        assert code == 2
        assert "is missing" in said
    code, said = replayed([*records[: results[-1]], *records[results[-1] + 1 :]])
    assert code == 3
    assert said.startswith("NOT WHOLE: the results of 1 submissions")
    without = [one for one in records if one[0] is not RecordKind.RESULT]
    assert replayed(without)[0] == 3
    buffers = [n for n, (kind, _) in enumerate(records) if kind is RecordKind.BUFFER]
    for a, b in ((0, 1), (0, -1), (len(buffers) // 2, -2)):
        swapped = list(records)
        one, other = buffers[a], buffers[b]
        swapped[one], swapped[other] = swapped[other], swapped[one]
        code, said = replayed(swapped)
        assert code == 2
        assert said.startswith("error: ")
        assert "Traceback" not in said


def test_a_difference_is_exit_code_1(recorded, tmp_path, capsys):
    """One digest is another: the submission and the output are named."""
    forged, results = tmp_path / "forged.trace", 0
    with TraceReader(recorded[0]) as reader, TraceWriter(forged, reader.header) as writer:
        for record in reader.records():
            payload = bytearray(record.payload)
            if record.kind is RecordKind.RESULT:
                payload[-1] ^= results == 3
                results += 1
            if record.kind is not RecordKind.END:
                writer.write(record.kind, bytes(payload))
    assert replay([str(forged), "--tier", "cpu"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("DIFFERENT: submission 3, graph ")
    assert "(slot@position 0@" in said
    assert "output.ring is another" in said


def test_what_is_in_a_trace_is_listed(recorded, capsys):
    assert replay([str(recorded[0]), "--list"]) == 0
    said = capsys.readouterr().out
    assert "tier: cpu" in said
    assert "submit" in said


def test_a_damaged_trace_is_exit_code_2(recorded, tmp_path, capsys):
    data = bytearray(recorded[0].read_bytes())
    data[len(data) // 2] ^= 1
    damaged = tmp_path / "damaged.trace"
    damaged.write_bytes(data)
    for path in (damaged, tmp_path / "absent.trace", tmp_path):
        assert replay([str(path), "--tier", "cpu"]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert said.count("\n") == 1


@pytest.mark.parametrize("flag", ["--trace", "--timeline"])
def test_a_file_in_the_way_is_kept(tiny_model_path, tmp_path, flag, capsys):
    path = tmp_path / "mine"
    path.write_text("mine")
    command = ["run", "--raw", "--tier", "cpu", "--context", "64", "--max-tokens", "2"]
    assert main([*command, "--model", str(tiny_model_path), flag, str(path), "hello"]) == 2
    assert "cannot be written: File exists" in capsys.readouterr().err
    assert path.read_text() == "mine"


def test_the_help_teaches(capsys):
    with pytest.raises(SystemExit):
        replay(["--help"])
    said = capsys.readouterr().out
    assert "examples:" in said
    assert "zinc-rt run --trace" in said
