"""What ``bench --server`` sends and what it makes of the answers. How fast anything is decides
nothing here."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import ConfigError, ExecutionError
from harness.bench.__main__ import main
from harness.bench.engines import PEER
from harness.bench.load import overhead
from harness.bench.load import plan as load_plan
from harness.bench.load.clients import RequestOutcome, ServerTarget, run_load
from harness.bench.load.measure import (
    OURS,
    TARGETS,
    error_counts,
    jain_index,
    load_figures,
    target_verdicts,
)
from harness.bench.load.overhead import STREAMS, Readers, engine_rate, http_seconds, server_here
from harness.bench.load.plan import (
    MIX_CONTEXT,
    MIXES,
    Lengths,
    LoadPlan,
    PlannedRequest,
    RequestKind,
    draw_load,
)
from harness.bench.load.report import METRICS, render_server_bench
from harness.bench.load.servers import ServerSetup, own_server
from harness.host.options import SessionOptions
from harness.serve.model import ModelOptions
from harness.serve.run import Running, ServeOptions, running
from tests.needs import need_installed
from tests.paths import ROOT
from tests.patience import PATIENCE_SECONDS, PROCESS_SECONDS

pytestmark = pytest.mark.usefixtures("native_is_quick")

SMALL = LoadPlan(requests=6, clients=3, mix="chat")


@pytest.fixture(scope="module")
def model_path(synthetic_model) -> Path:
    """A tiny model in whose context every prompt has room, a token a byte."""
    return synthetic_model(architecture="qwen3", quant="q4_k_m", context=4096)


@pytest.fixture(scope="module")
def server(model_path, tmp_path_factory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("server")
    session = SessionOptions(tier="native", context=4096, slots=4)
    model = ModelOptions(session, "tiny", folder / "digests.json")
    with running(ServeOptions(model_path, model, folder / "ledger.sqlite", folder)) as opened:
        yield opened


class Failing(BaseHTTPRequestHandler):
    """A server that refuses, cuts streams and fails in the middle, in turn."""

    count: ClassVar[int] = 0

    def do_POST(self) -> None:
        Failing.count += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        if Failing.count % 3 == 0:
            body = json.dumps({"error": {"message": "full", "code": "queue_full"}}).encode()
            self.send_response(503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'data: {"choices": [{"text": "a"}]}\n\n')
        if Failing.count % 3 == 1:
            self.wfile.write(b'data: {"error": {"message": "lost", "code": "lost"}}\n\n')

    def log_message(self, *_: object) -> None:
        pass


@given(
    st.integers(0, 1 << 32), st.sampled_from(sorted(MIXES)), st.integers(1, 40), st.integers(1, 5)
)
def test_the_same_seed_is_the_same_load(seed, mix, count, tenants):
    plan = LoadPlan(count, rate=3.0, mix=mix, seed=seed, tenants=tenants)
    load = draw_load(plan)
    assert load == draw_load(plan)
    assert load != draw_load(plan, 1)
    assert [asked.at for asked in load] == sorted(asked.at for asked in load)
    assert {asked.tenant for asked in load} == set(range(min(count, tenants)))
    beginnings = {asked.prompt.partition(":")[0] for asked in load + draw_load(plan, 1)}
    assert len(beginnings) == 2 * count
    for asked in load:
        assert any(
            kind.answer.minimum <= asked.max_tokens <= kind.answer.maximum for kind in MIXES[mix]
        )


def test_arrivals_are_a_poisson_process():
    """Gaps have the mean 1 / rate and, as exponential ones do, a deviation as large."""
    at = [asked.at for asked in draw_load(LoadPlan(4000, rate=5.0, seed=1))]
    gaps = np.diff([0.0, *at])
    assert math.isclose(gaps.mean(), 0.2, rel_tol=0.05)
    assert math.isclose(gaps.std(), 0.2, rel_tol=0.08)
    assert [asked.at for asked in draw_load(LoadPlan(5))] == [0.0] * 5


def test_every_request_of_a_mix_fits():
    longest = max(
        kind.prompt.maximum + kind.answer.maximum for mix in MIXES.values() for kind in mix
    )
    assert longest * 1.3 < MIX_CONTEXT


@pytest.mark.parametrize(
    "fields",
    [{"requests": 0}, {"clients": 0}, {"tenants": 0}, {"rate": 0.0}, {"rate": math.inf},
     {"mix": "other"}],
)  # fmt: skip
def test_loads_that_are_none(fields):
    with pytest.raises(ConfigError):
        replace(SMALL, **fields)


def answered(
    number: int, due: float, texts: list[float], tokens: int, tenant: int = 0
) -> RequestOutcome:
    asked = PlannedRequest(number, tenant, 0.0, "", 8)
    return RequestOutcome(asked, due, texts, texts[-1] + 1, tokens, 10)


def test_figures():
    answers = [
        answered(0, 10.0, [11.0, 12.0, 14.0], 30),
        answered(1, 10.0, [13.0], 8, tenant=1),
        RequestOutcome(PlannedRequest(2, 0, 0.0, "", 8), 10.0, error="queue_full"),
    ]
    found = load_figures(answers)
    assert (found["requests"], found["errors"], found["tokens"]) == (3, 1, 38)
    assert found["seconds"] == 5.0
    assert found["rate"] == 38 / 5
    assert found["first_p50"] == 2.0
    assert found["interval_p50"] == 1.5
    assert found["fairness"] == jain_index([30 / 5, 8 / 4])
    assert error_counts(answers) == {"queue_full": 1}
    assert load_figures([answers[2]])["errors"] == 1


@given(st.lists(st.floats(0.01, 1e3), min_size=1, max_size=20))
def test_jain_index(shares):
    index = jain_index(shares)
    assert 1 / len(shares) - 1e-9 <= index <= 1 + 1e-9
    assert math.isclose(jain_index([shares[0]] * 7), 1.0)
    assert math.isclose(jain_index([shares[0], 0, 0, 0]), 0.25)


@pytest.mark.parametrize("rate", [None, 200.0])
def test_a_load_on_a_server(server, rate):
    """Every answer has the tokens that the server says it generated."""
    plan = replace(SMALL, rate=rate)
    load = [replace(asked, max_tokens=5) for asked in draw_load(plan)]
    answers = run_load(ServerTarget(server.url, "tiny"), plan, load)
    assert [answer.request for answer in answers] == load
    assert error_counts(answers) == {}
    assert all(0 < answer.tokens <= 5 and answer.prompt_tokens > 8 for answer in answers)
    assert all(answer.due <= answer.texts[0] <= answer.ended for answer in answers)


def test_errors_are_counted_by_what_they_are():
    with ThreadingHTTPServer(("127.0.0.1", 0), Failing) as failing:
        Thread(target=failing.serve_forever, daemon=True).start()
        target = ServerTarget(f"http://127.0.0.1:{failing.server_port}", "any")
        answers = run_load(target, replace(SMALL, clients=1), draw_load(SMALL))
        failing.shutdown()
    assert error_counts(answers) == {"lost": 2, "connection": 2, "queue_full": 2}
    assert error_counts(run_load(target, SMALL, draw_load(SMALL))) == {"connection": 6}


def test_the_engine_with_and_without_http(model_path, monkeypatch):
    """Both generate; an answer that is not whole is an error and no rate."""
    monkeypatch.setattr(overhead, "TOKENS", 4)
    setup = ServerSetup(model_path, "cpu", 1, slots=16, context=256)
    with server_here(setup) as server, Readers(server.url) as readers:
        for streams in STREAMS:
            assert engine_rate(server, streams) > 0
            spoken = http_seconds()
            assert readers.rate(streams) > 0
            assert spoken < http_seconds() < time.process_time()
        server.service.draining.set()
        with pytest.raises(ExecutionError, match="readers ended"):
            readers.rate(1)


def test_a_server_is_started_with_tenants(model_path):
    setup = ServerSetup(model_path, "cpu", 1, slots=2, tenants=3, context=2048)
    with own_server(setup) as started:
        assert started.ready_seconds > 0
        assert len(set(started.target.keys)) == 3
        plan = replace(SMALL, tenants=3)
        load = [replace(asked, max_tokens=2) for asked in draw_load(plan)]
        answers = run_load(started.target, plan, load)
        assert error_counts(answers) == {}
        keyless = replace(started.target, keys=("wrong",))
        assert len(error_counts(run_load(keyless, plan, load))) == 1


KILLED = """
import os, sys, time
from harness.bench.load.servers import attended
with attended("http.server", ["0", "--bind", "127.0.0.1"]) as server:
    print(server.pid, flush=True)
    time.sleep(600)
"""


def test_a_server_ends_with_who_started_it():
    """Who is killed ends nothing itself."""
    words = [sys.executable, "-c", KILLED]
    named = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=named) as parent:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        with pytest.raises(psutil.TimeoutExpired):
            server.wait(0.5)
        parent.kill()
        server.wait(PATIENCE_SECONDS)


def test_a_bench_that_is_told_to_end_leaves_nothing(model_path, tmp_path):
    """SIGTERM in the middle of a load: the server is gone, and so is the folder of its keys."""
    words = [sys.executable, "-m", "harness.bench", "--server", "--model", str(model_path)]
    words += ["--tenants", "2", "--slots", "2", "--clients", "2", "--repeat", "1"]
    words += ["--requests", "5000"]
    named = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=named) as bench:
        assert bench.stderr is not None
        assert any("load 1 of 1" in line for line in bench.stderr)
        assert list(tmp_path.glob("*/tenants.toml"))
        servers = psutil.Process(bench.pid).children(recursive=True)
        assert servers
        bench.terminate()
        assert bench.wait(PROCESS_SECONDS) == 128 + signal.SIGTERM
        gone, alive = psutil.wait_procs(servers, PATIENCE_SECONDS)
        assert (len(gone), alive) == (len(servers), [])
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_does_not_start(tmp_path):
    setup = ServerSetup(tmp_path / "none.gguf", "cpu", 1, slots=2)
    with pytest.raises(ExecutionError, match=r"none\.gguf"), own_server(setup):
        pass


@pytest.fixture
def tiny_requests(monkeypatch) -> None:
    """Every mix has requests of a few tokens."""
    few = RequestKind(1.0, Lengths(4, 0.1, 1, 8), Lengths(4, 0.1, 1, 8))
    monkeypatch.setattr(load_plan, "MIXES", dict.fromkeys(MIXES, (few,)))


@pytest.mark.usefixtures("tiny_requests")
def test_the_command(server, tmp_path, capsys):
    """As JSON, as tables, and as a plot, of a server that runs."""
    words = [
        *("--server", server.url, "--requests", "3", "--clients", "2", "--repeat", "2", "--mix"),
        "chat",
    ]
    plot = tmp_path / "load.svg"
    assert main([*words, "--json", "--plot", str(plot)]) == 0
    report = json.loads(capsys.readouterr().out)
    found = report["engines"][OURS]
    assert found["errors"]["samples"] == [0, 0]
    assert len(found["rate"]["samples"]) == 2
    assert set(found) <= set(METRICS) | {"requests"}
    assert "first text, ms" in plot.read_text()
    shown = render_server_bench(report)
    assert "generated by all" in shown
    assert "| --- |" in render_server_bench(report, markdown=True)


def test_targets():
    """Those that something was measured for, and only for the load they are meant for."""
    ours = {"http_1": {"median": 0.96}, "http_16": {"median": 0.8}}
    load = {"clients": 8, "rate": None}
    report = {"engines": {OURS: ours}, "ratios": {"rate": {"median": 1.31}}, "load": load}
    assert {one["metric"]: one["met"] for one in target_verdicts(report)} == {
        "rate": True, "http_1": True, "http_16": False,
    }  # fmt: skip
    for other in ({**load, "clients": 4}, {**load, "rate": 2.0}):
        assert "rate" not in {one["metric"] for one in target_verdicts({**report, "load": other})}
    assert {target.metric for target in TARGETS} <= set(METRICS)


def test_a_server_that_is_not_there(capsys):
    assert main(["--server", "http://127.0.0.1:1"]) == 1
    assert "connection refused" in capsys.readouterr().err


@pytest.mark.peer
@pytest.mark.long
@pytest.mark.usefixtures("tiny_requests")
def test_beside_the_peer(model_path, tmp_path, monkeypatch, capsys):
    """The same file and load on both, a ratio for each repetition."""
    need_installed("llama_cpp", "peer")
    need_installed("uvicorn", "peer")
    model = tmp_path / "tiny.gguf"
    shutil.copy(model_path, model)
    words = ["--server", "--model", model, "--tiers", "cpu", "--peer", PEER, "--requests", "2"]
    words += ["--clients", "2", "--repeat", "1", "--mix", "chat", "--json"]
    assert main([str(word) for word in words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["errors"] == {}
    assert set(report["engines"]) == {OURS, PEER}
    assert len(report["ratios"]["rate"]["samples"]) == 1
