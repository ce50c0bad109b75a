"""The benchmark runs and reports every figure; how large they are is nobody's business here."""

from __future__ import annotations

import contextlib
import io
import json

import numpy as np
import pytest

from contract.errors import ExecutionError
from harness.bench.__main__ import main, render
from harness.bench.engines import PEER, Setup, TierEngine
from harness.bench.machine import machine_facts, peak_resident_bytes, stream_bandwidth
from harness.bench.measure import summary, vocabulary_open_seconds
from harness.bench.worker import Worker

RATES = ("decode_short", "decode_long", "prefill")
METRICS = {*RATES, "first_token_seconds", "peak_resident_bytes"}
SIZES = ["--prompt-tokens", "20", "--decode-tokens", "3", "--repeat", "2"]


@pytest.fixture(scope="module")
def report(tiny_model_path):
    """One run of the command, parsed."""
    return run_json(tiny_model_path)


def run_json(model, *flags: str) -> dict:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["--model", str(model), "--json", *SIZES, *flags]) == 0
    return json.loads(out.getvalue())


def test_every_metric_has_its_samples(report):
    found = report["engines"]["cpu"]
    assert set(found) == METRICS
    for metric in (*RATES, "first_token_seconds"):
        samples = found[metric]["samples"]
        assert len(samples) == 2
        assert all(sample > 0 for sample in samples)
        assert found[metric]["minimum"] == min(samples)
        assert found[metric]["maximum"] == max(samples)
    assert report["ratios"] == {}


def test_the_report_says_what_was_measured_where(report, tiny_model_path):
    assert report["model"]["file"] == tiny_model_path.name
    assert report["model"]["bytes"] == tiny_model_path.stat().st_size
    assert report["settings"]["prompt_tokens"] == 20
    assert report["machine"]["cores"] >= 1
    assert report["machine"]["numpy"] == np.__version__
    assert len(report["vocabulary_open_seconds"]["samples"]) == 2


def test_memory_peak_covers_at_least_the_interpreter(report):
    assert report["engines"]["cpu"]["peak_resident_bytes"]["median"] > 10e6
    assert peak_resident_bytes() > 10e6


def test_roofline_is_rate_times_bytes_over_bandwidth(report):
    moved = report["bytes_per_token"]
    assert moved["decode_short"] < moved["decode_long"]
    stream = report["stream_bytes_per_second"]["median"]
    for label, share in report["roofline"]["cpu"].items():
        rate = report["engines"]["cpu"][label]["median"]
        assert share == rate * moved[label] / stream


def test_the_table_shows_every_metric(report):
    text = render(report)
    for label in ("decode at context 5", "decode at context 20", "prefill of 20 tokens", "memory"):
        assert label in text


@pytest.mark.peer
def test_a_peer_is_measured_on_the_same_file(tiny_model_path):
    pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    report = run_json(tiny_model_path, "--peer", PEER)
    assert set(report["engines"]) == {"cpu", PEER}
    assert set(report["ratios"]["cpu"]) == METRICS
    ours, peer = (report["engines"][name]["prefill"]["samples"] for name in ("cpu", PEER))
    ratios = report["ratios"]["cpu"]["prefill"]["samples"]
    assert ratios == [a / b for a, b in zip(ours, peer, strict=True)]
    assert f"cpu / {PEER}" in render(report)


def test_an_engine_computes_the_number_of_tokens_it_is_asked_for(tiny_model_path, monkeypatch):
    engine = TierEngine("cpu", Setup(str(tiny_model_path), 1, 64, "f16"))
    steps = []
    step = engine._session.runner.step

    def counted(inputs):
        steps.append(len(inputs.query))
        return step(inputs)

    monkeypatch.setattr(engine._session.runner, "step", counted)
    timing = engine.generate(range(7), 5)
    assert steps == [7, 1, 1, 1, 1, 1]
    assert timing.prefill_seconds > 0
    assert timing.decode_seconds > 0
    engine._session.close()


def test_a_worker_that_cannot_start_says_why(tmp_path):
    with pytest.raises(ExecutionError, match=r"cpu: .*absent\.gguf"):
        Worker("cpu", Setup(str(tmp_path / "absent.gguf"), 1, 64, "f16"), "x")


def test_small_helpers():
    assert summary([3.0, 1.0, 2.0])["median"] == 2.0
    assert stream_bandwidth(2, nbytes=1 << 16) > 0
    assert machine_facts()["cpu"]
    assert len(vocabulary_open_seconds(2, tokens=10)) == 2


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--repeat", "0"], "--repeat: must be at least 1"),
        (["--tiers", "cpu,cpu"], "not a list of different tiers"),
        (["--tiers", "abacus"], "there is no tier of that name"),
        (["--prompt-tokens", "5000"], "the model has 1024"),
    ],
)
def test_command_refuses_in_one_line(tiny_model_path, capsys, argv, problem):
    assert main(["--model", str(tiny_model_path), *SIZES, *argv]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert len(errors) == 1
    assert problem in errors[0]


def test_a_missing_peer_is_named_with_its_remedy(tiny_model_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["--model", str(tiny_model_path), "--peer", PEER]) == 2
    assert "pip install 'zinc-rt[peer]'" in capsys.readouterr().err
