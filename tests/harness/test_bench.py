"""The benchmark runs and reports every figure; how large they are is nobody's business here."""

import contextlib
import importlib.metadata
import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import psutil
import pytest

from contract.errors import ConfigError, ExecutionError
from harness.bench import measure
from harness.bench.__main__ import main
from harness.bench.engines import PEER, Setup, TierEngine, fixed_workers, peer_flash_choices
from harness.bench.machine import busy_processes, machine_facts, stream_bandwidth
from harness.bench.measure import summary, vocabulary_open_seconds
from harness.bench.plot import write_plot
from harness.bench.report import digits, render, render_markdown
from harness.bench.worker import CACHE_VARIABLES, Worker, peak_resident_bytes
from harness.tiers import open_tier
from tests.needs import need_installed
from tests.patience import PROCESS_SECONDS

RATES = ("decode_short", "decode_long", "prefill")
METRICS = {*RATES, "first_token_seconds", "cold_start_seconds", "peak_resident_bytes"}
SIZES = ["--prompt-tokens", "20", "--decode-tokens", "3", "--repeat", "2"]


@pytest.fixture(scope="module", autouse=True)
def a_short_stream() -> Iterator[None]:
    """Bandwidth is measured on megabytes: two arrays of the usual 256 are most of what a process of
    tests would have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "stream_bandwidth", partial(stream_bandwidth, nbytes=1 << 22))
        yield


@pytest.fixture(scope="module")
def report(tiny_model_path):
    """One run of the command, parsed."""
    return run_json(tiny_model_path, "--tiers", "cpu")


def run_json(model, *flags: str) -> dict:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["--model", str(model), "--json", *SIZES, *flags]) == 0
    return json.loads(out.getvalue())


def test_what_is_measured_is_what_runs(tiny_model_path, monkeypatch):
    """Without a tier the one that ``run`` takes; flags of llama-bench mean the same."""
    plans = []
    monkeypatch.setattr(
        "harness.bench.__main__.run_benchmark", lambda plan, say: plans.append(plan)
    )
    monkeypatch.setattr("harness.bench.__main__.render", lambda report: "")
    words = ["--model", str(tiny_model_path), "-p", "3", "-n", "4", "-r", "2"]
    with open_tier() as best:
        assert main(words) == 0
        assert main([*words, "--tier", f"auto,{best.info.name}"]) == 2
    (plan,) = plans
    assert plan.engines == (best.info.name,)
    assert (plan.prompt_tokens, plan.decode_tokens, plan.repeat) == (3, 4, 2)


def test_every_metric_has_its_samples(report):
    found = report["engines"]["cpu"]
    assert set(found) == METRICS
    for metric in (*RATES, "first_token_seconds"):
        samples = found[metric]["samples"]
        assert len(samples) == 2
        assert all(sample > 0 for sample in samples)
        assert found[metric]["minimum"] == min(samples)
        assert found[metric]["maximum"] == max(samples)
    assert len(found["cold_start_seconds"]["samples"]) == 1
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


LABELS = (
    *("decode at context 5", "decode at context 20", "prefill of 20 tokens"),
    *("start to first token", "first-ever start", "peak resident memory"),
)


def test_the_table_shows_every_metric(report):
    text = render(report)
    for label in LABELS:
        assert label in text


def beside_peer(report: dict) -> dict:
    """The report with a peer of half the speed, as a measured one would be stored."""
    ours = report["engines"]["cpu"]
    half = {
        metric: summary([value / 2 for value in found["samples"]]) for metric, found in ours.items()
    }
    ratios = {metric: summary([2.0] * len(found["samples"])) for metric, found in ours.items()}
    roofline = dict.fromkeys(("cpu", PEER), report["roofline"]["cpu"])
    return {
        **report, "engines": {"cpu": ours, PEER: half}, "ratios": {"cpu": ratios},
        "roofline": roofline,
        "peer": {
            "version": "llama-cpp-python 9.9", "flash_attention": True, "gpu": False,
            "tried_seconds": {"without flash attention": 2.5, "with flash attention": 1.5},
        },
    }  # fmt: skip


def test_markdown_is_one_table_with_a_row_for_every_metric(report):
    lines = render_markdown(beside_peer(report)).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 2 + len(METRICS)
    assert {row.count("|") for row in rows} == {len(("", "", "cpu", PEER, "ratio")) + 1}
    assert rows[0] == f"|  |  | cpu | {PEER} | cpu / {PEER} |"
    assert (
        f"{PEER} of llama-cpp-python 9.9 with flash attention (prompt and answer: "
        "without flash attention 2.5 s, with flash attention 1.5 s)"
    ) in lines[0]
    assert "busy" not in lines[0]
    for label, row in zip(LABELS, rows[2:], strict=True):
        assert label in row
        assert row.endswith("| 2 |")


def test_plot_shows_rates_ratios_and_the_memory_bound(report, tmp_path):
    shown = beside_peer(report)
    path = tmp_path / "plot.svg"
    write_plot(shown, path)
    text = "".join(ElementTree.parse(path).getroot().itertext())
    for label in LABELS[:3]:
        assert label in text
    for metric in RATES:
        for engine in ("cpu", PEER):
            assert digits(shown["engines"][engine][metric]["median"]) in text
    assert text.count("2.00x") == len(RATES)
    for nbytes in shown["bytes_per_token"].values():
        bound = shown["stream_bytes_per_second"]["median"] / nbytes
        assert f"memory bound {digits(bound)}" in text
    again = tmp_path / "again.svg"
    write_plot(shown, again)
    assert again.read_bytes() == path.read_bytes()


def test_plot_as_png_and_without_a_peer(report, tmp_path):
    path = tmp_path / "plot.png"
    write_plot(report, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("name", ["plot.txt", "plot", "absent/plot.svg"])
def test_an_impossible_plot_is_refused_before_anything_is_measured(
    tmp_path, capsys, monkeypatch, name
):
    monkeypatch.setattr("harness.bench.__main__.run_benchmark", None)
    assert main(["--plot", str(tmp_path / name)]) == 2
    assert "error: --plot: " in capsys.readouterr().err


def test_a_missing_plotting_library_is_named_with_its_remedy(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["--plot", str(tmp_path / "plot.svg")]) == 2
    assert "pip install" in (said := capsys.readouterr().err)
    assert "'.[bench]'" in said


def test_a_first_ever_start_finds_no_cache_of_this_user(tiny_model_path, tmp_path):
    """The folders kernels are cached in are below the one that was asked for; bytecode is kept."""
    seen = tmp_path / "seen.json"
    code = tmp_path / "sitecustomize.py"
    code.write_text(
        "import json, os, platformdirs, sys\n"
        f"names = {CACHE_VARIABLES!r}\n"
        "found = [os.environ.get(name) for name in names]\n"
        "found.append(platformdirs.user_cache_dir())\n"
        f"json.dump([sys.dont_write_bytecode, found], open({str(seen)!r}, 'w'))\n"
    )
    cache = tmp_path / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        with Worker("cpu", Setup(str(tiny_model_path), 1, 64, "f16"), "x", cache):
            pass
    compiles_every_time, found = json.loads(seen.read_text())
    assert not compiles_every_time
    if sys.platform != "linux":
        found.pop()
    assert all(Path(folder).is_relative_to(cache) for folder in found)


@pytest.mark.peer
@pytest.mark.long
def test_a_peer_is_measured_on_the_same_file(tiny_model_path):
    """The first-ever start of a tier that compiles would take longest."""
    need_installed("llama_cpp", "peer")
    report = run_json(tiny_model_path, "--tiers", "cpu", "--peer", PEER, "--repeat", "1")
    assert report["peer"]["version"] in render(report)
    assert set(report["engines"]) == {"cpu", PEER}
    assert set(report["ratios"]["cpu"]) == METRICS
    ours, peer = (report["engines"][name]["prefill"]["samples"] for name in ("cpu", PEER))
    ratios = report["ratios"]["cpu"]["prefill"]["samples"]
    assert ratios == [a / b for a, b in zip(ours, peer, strict=True)]
    assert f"cpu / {PEER}" in render(report)
    assert report["peer"]["version"].endswith(importlib.metadata.version("llama-cpp-python"))
    tried = report["peer"]["tried_seconds"]
    assert len(tried) == len(peer_flash_choices("f16")) == 2
    assert report["peer"]["flash_attention"] == (min(tried, key=tried.get).startswith("with "))


def test_the_report_says_where_the_peer_computed(report):
    shown = beside_peer(report)
    shown["peer"]["gpu"] = True
    assert f"{PEER} of llama-cpp-python 9.9 on its graphics card with flash" in render(shown)
    assert "graphics card" not in render(beside_peer(report))


def test_quantized_values_leave_the_peer_no_choice():
    assert peer_flash_choices("q8_0") == (True,)


def test_busy_processes_are_said_and_end(tiny_model_path, monkeypatch):
    """Not during a whole benchmark: they take a processor as long as they are there."""
    with busy_processes(1) as ids:
        assert [psutil.pid_exists(one) for one in ids] == [True]
    assert not psutil.pid_exists(ids[0])
    beside = []

    @contextlib.contextmanager
    def counted(count):
        beside.append(count)
        yield [0] * count

    monkeypatch.setattr("harness.bench.measure.busy_processes", counted)
    words = ("--tiers", "cpu", "--beside", "1", "--decode-tokens", "2", "--repeat", "1")
    report = run_json(tiny_model_path, *words)
    assert beside == [report["settings"]["beside"]] == [1]
    assert "beside 1 busy processes" in render(report)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_busy_processes_end_with_their_parent_however_it_ends(end):
    """Ctrl-C reaches parent and children, a kill the parent alone."""
    code = (
        "import time\nfrom harness.bench.machine import busy_processes\n"
        "with busy_processes(2) as ids:\n    print(*ids, flush=True)\n    time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as parent:
        busy = [psutil.Process(int(word)) for word in parent.stdout.readline().split()]
        assert len(busy) == 2
        if end is signal.SIGINT:
            for process in busy:
                process.send_signal(end)
        parent.send_signal(end)
        _, alive = psutil.wait_procs(busy, timeout=PROCESS_SECONDS)
        assert not alive


@pytest.mark.parametrize("name", ["cpu:1", "opencl:0", "opencl:many", "opencl:"])
def test_only_adapted_tiers_have_a_fixed_number_of_workers(name):
    with pytest.raises(ConfigError, match="fixed number of workers"):
        fixed_workers(name)
    assert fixed_workers("opencl:3") == 3
    assert fixed_workers("opencl") is None


def test_an_engine_computes_the_number_of_tokens_it_is_asked_for(tiny_model_path, monkeypatch):
    engine = TierEngine("cpu", Setup(str(tiny_model_path), 1, 64, "f16"))
    steps = []
    submit = engine._session.runner.submit

    def counted(inputs):
        steps.append(len(inputs.query))
        return submit(inputs)

    monkeypatch.setattr(engine._session.runner, "submit", counted)
    timing = engine.generate(range(7), 5)
    assert steps == [7, 1, 1, 1, 1, 1]
    assert timing.prefill_seconds > 0
    assert timing.decode_seconds > 0
    engine._session.close()


def test_a_worker_that_cannot_start_says_why(tmp_path):
    with pytest.raises(ExecutionError, match=r"cpu: .*absent\.gguf"):
        Worker("cpu", Setup(str(tmp_path / "absent.gguf"), 1, 64, "f16"), "x")


def test_a_worker_that_dies_says_of_what(tiny_model_path):
    """As an engine does whose native code was built for another processor."""
    with Worker("cpu", Setup(str(tiny_model_path), 1, 64, "f16"), "x") as worker:
        worker._process.send_signal(signal.SIGILL)
        worker._process.wait()
        with pytest.raises(ExecutionError, match="the cpu worker was ended by SIGILL"):
            worker.peak_resident_bytes()


def test_small_helpers():
    assert summary([3.0, 1.0, 2.0])["median"] == 2.0
    assert stream_bandwidth(2, nbytes=1 << 16) > 0
    assert machine_facts()["cpu"]
    assert len(vocabulary_open_seconds(2, tokens=10)) == 2


def test_a_tier_that_there_is_not_is_refused(tiny_model_path, capsys):
    assert main(["--model", str(tiny_model_path), *SIZES, "--tiers", "abacus"]) == 2
    assert "error: tier abacus is not available" in capsys.readouterr().err


def test_a_missing_peer_is_named_with_its_remedy(tiny_model_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["--model", str(tiny_model_path), "--peer", PEER]) == 2
    assert "pip install" in (said := capsys.readouterr().err)
    assert "'.[peer]'" in said
