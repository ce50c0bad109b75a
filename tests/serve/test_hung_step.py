"""A server whose device hangs within a step: the thread of the engines waits for it for ever."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from contract.types import LOCAL_TENANT
from harness.cli.serve_command import FAILED
from harness.host import step_times, turn_watch
from harness.host.engine_thread import EngineThread
from harness.host.remote import process
from harness.host.remote.process import EngineProcess
from harness.host.step_times import StepTimes
from harness.host.submissions import EngineStopped
from harness.host.turn_watch import TurnWatch, UnheardTime
from harness.serve import metrics
from harness.serve.ledger_store import LedgerStore
from harness.serve.run import LEFT, Running
from tests.hung_steps import BEGUN
from tests.paths import ROOT
from tests.patience import PATIENCE_SECONDS, wait_for_end, wait_until
from tests.serve.conftest import Serve
from tests.serve.engine_child import be_watchful, hang_while
from tests.serve.http import Http
from tests.serve.test_engine_process import BODY, COMPLETIONS, told
from tests.serve.test_process import server_environment

SENTENCE = "the engine hangs; restart the server"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hang is soon known, in this process."""
    for name in ("WATCH_SECONDS", "END_SECONDS"):
        monkeypatch.setattr(turn_watch, name, getattr(turn_watch, name))
    be_watchful()
    monkeypatch.setattr(process, "WATCH_SECONDS", turn_watch.WATCH_SECONDS)
    monkeypatch.setattr(process, "KILL_SECONDS", PATIENCE_SECONDS)


@contextmanager
def hanging(server: Running, file: Path) -> Iterator[None]:
    """The device hangs in every step."""
    driver = server.service.model.driver
    driver.call(be_watchful)
    driver.call(hang_while, file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "ANSWER_SECONDS", 0.1)
        file.touch()
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


@pytest.mark.parametrize("engine_process", [False, True])
def test_of_a_step_that_hangs_the_server_tells_what_it_knows(
    serve: Serve, soon: None, caplog: pytest.LogCaptureFixture, tmp_path: Path, engine_process: bool
) -> None:
    """Who waits is told, too, and so is who comes; once the step ends it answers as before."""
    with serve(engine_process=engine_process) as server, ThreadPoolExecutor(3) as clients:
        http = Http(server.url)
        before = http.post(COMPLETIONS, BODY).answer
        assert b'engine_answers{model_name="tiny"} 1.0' in http.get("/metrics").body
        with hanging(server, tmp_path / "hangs"):
            streamed = clients.submit(http.post, COMPLETIONS, {**BODY, "stream": True})
            asked = [clients.submit(http.post, COMPLETIONS, BODY) for _ in range(2)]
            wait_until(lambda: http.get("/health").status == 503)
            replies = [one.result() for one in asked]
            usage = f"/v1/tenants/{LOCAL_TENANT.id}/usage"
            replies += [http.get(path) for path in ("/health", "/ready", usage)]
            replies += [http.post(COMPLETIONS, BODY)]
            for reply in replies:
                assert (reply.status, reply.error["code"]) == (503, "engine_stopped")
                assert "the engine hangs; " in reply.error["message"]
            assert b"the engine hangs; " in streamed.result().body
            assert b'engine_answers{model_name="tiny"} 0.0' in http.get("/metrics").body
            if not engine_process:
                assert "the engine hangs, for" in caplog.text
                assert "engine_child.py" in caplog.text
        wait_until(lambda: http.get("/health").status == http.get("/ready").status == 200)
        assert told(http.post(COMPLETIONS, BODY).answer) == told(before)


def test_what_is_asked_between_steps_is_given_up(serve: Serve, soon: None, tmp_path: Path) -> None:
    """And is not done later, when nobody waits for it."""
    done: list[object] = []
    with serve() as server, ThreadPoolExecutor(1) as clients:
        driver, engines = server.service.model.driver, server.models._thread
        assert isinstance(engines, EngineThread)
        with hanging(server, tmp_path / "hangs"):
            asked = clients.submit(Http(server.url).post, COMPLETIONS, BODY)
            wait_until(lambda: any(driver.engine.unread))  # type: ignore[attr-defined]
            for call in (driver.call, engines.call):
                with pytest.raises(EngineStopped, match=SENTENCE):
                    call(done.append)
            assert asked.result().status == 503
            # Nor does it wait for the thread, where there would be no end of it.
            waiting = len(driver._commands), len(engines._commands)  # type: ignore[attr-defined]
            for call in (driver.call, engines.call):
                with pytest.raises(EngineStopped, match=SENTENCE):
                    call(done.append)
            assert (len(driver._commands), len(engines._commands)) == waiting  # type: ignore[attr-defined]
        wait_until(lambda: engines.silence is None)
        driver.call(lambda engine: None)
        assert done == []


def test_the_server_ends_though_a_step_hangs(
    serve: Serve, soon: None, patient_end: None, tmp_path: Path
) -> None:
    """Who waits is told, and what was counted is on disk."""
    with hanging_till_the_end(tmp_path / "hangs") as hang:
        with serve(ledger=tmp_path / "ledger") as server, ThreadPoolExecutor(1) as clients:
            assert Http(server.url).post(COMPLETIONS, BODY).status == 200
            hang(server)
            asked = clients.submit(Http(server.url).post, COMPLETIONS, BODY)
            wait_until(lambda: bool(server.service.model.driver._streams))
            server.drain(0)
            assert asked.result().status == 503
        assert server.models.hangs


def test_the_server_ends_though_a_step_hangs_in_its_child(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, patient_end: None, tmp_path: Path
) -> None:
    """Long before such a step is known to hang."""
    monkeypatch.setattr(process, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(process, "END_SECONDS", 1.0)
    with serve(engine_process=True) as server, ThreadPoolExecutor(1) as clients:
        engines, driver = server.models._thread, server.service.model.driver
        assert isinstance(engines, EngineProcess)
        driver.call(hang_while, tmp_path / "hangs")
        (tmp_path / "hangs").touch()
        asked = clients.submit(Http(server.url).post, COMPLETIONS, BODY)
        wait_until(lambda: bool(driver._streams))
        wait_for_end(lambda: server.drain(0))
        assert asked.result().status == 503
    assert engines.pid is None


@contextmanager
def hanging_till_the_end(file: Path) -> Iterator[Any]:
    begun: list[Any] = []

    def hang(server: Running) -> None:
        context = hanging(server, file)
        context.__enter__()
        begun.append(context)

    try:
        yield hang
    finally:
        for context in begun:
            context.__exit__(None, None, None)
        while LEFT:
            LEFT.pop().close()


@pytest.mark.parametrize("known", [False, True])
def test_sigterm_ends_a_process_whose_device_hangs(
    tiny_model_path: Path, tmp_path: Path, known: bool
) -> None:
    """It says why; clients were answered, and what was counted is on disk."""
    hangs, ledger = tmp_path / "hangs", tmp_path / "ledger"
    seconds = "1" if known else str(PATIENCE_SECONDS)
    line = [sys.executable, "-m", "tests.hung_steps", str(hangs), seconds, "serve"]
    line += ["--tier", "cpu", "--quiet"]
    line += ["--model", str(tiny_model_path), "--port", "0", "--context", "256", "--slots", "2"]
    line += ["--ledger", str(ledger), "--drain-seconds", "1"]
    with (
        subprocess.Popen(
            line, env=server_environment(tmp_path), stderr=subprocess.PIPE, text=True, cwd=ROOT
        ) as server,
        ThreadPoolExecutor(1) as clients,
    ):
        assert server.stderr is not None
        try:
            while not (found := re.search(r"listening on (http\S+)", server.stderr.readline())):
                assert server.poll() is None
            http = Http(found[1])
            assert http.post(COMPLETIONS, BODY).status == 200
            hangs.touch()
            asked = clients.submit(http.post, COMPLETIONS, BODY)
            wait_until(hangs.with_suffix(BEGUN).exists)
            wait_until(lambda: not known or http.get("/health").status == 503)
            server.send_signal(signal.SIGTERM)
            reply = asked.result()
            assert (reply.status, reply.error["code"]) == (503, "engine_stopped")
            assert server.wait(PATIENCE_SECONDS) == FAILED
            assert "the engine hangs: the process ends without it" in server.stderr.read()
        finally:
            server.kill()
    with LedgerStore(ledger) as store:
        assert store.total(LOCAL_TENANT).requests == 2


class TestPatience:
    def test_a_step_may_take_what_its_size_takes(self):
        times = StepTimes()
        assert times.patience(1) == step_times.OTHER_SECONDS
        assert times.patience(4096) == 4096 * step_times.LONGER * step_times.FIRST_TOKEN_SECONDS
        times.note(0.01, 1)
        assert times.patience(1) == step_times.LEAST_SECONDS
        assert times.patience(512) == step_times.OTHER_SECONDS
        times.note(40.0, 1)
        assert times.patience(1) == 40.0 * step_times.LONGER
        times.note(1.0, 1)
        assert 30.0 * step_times.LONGER < times.patience(1) < 40.0 * step_times.LONGER
        times.note(300.0, 300)
        assert times.patience(511) == 300.0 * step_times.LONGER
        times.note(0.0, 0)

    def test_one_long_step_is_forgotten(self):
        """Kernels were compiled in it, or the process was stopped for a night."""
        times = StepTimes()
        times.note(30_000.0, 1)
        for _ in range(1000):
            times.note(0.01, 1)
        assert times.patience(1) == step_times.LEAST_SECONDS

    def test_at_the_end_a_thread_that_works_on_does_not_hang(self, soon, monkeypatch):
        """Whose turns end, after a pause of the process, or of many models in turn."""
        monkeypatch.setattr(turn_watch, "END_SECONDS", PATIENCE_SECONDS / 2)
        with watched() as (watch, hung):
            watch.end_by(time.monotonic() - PATIENCE_SECONDS)
            for _ in range(20):
                watch.begin()
                threading.Event().wait(0.05)
            assert not hung
            assert watch.silence is None

    def test_each_thing_that_is_asked_has_a_time_of_its_own(self):
        """Many together may take long: slots that are restored."""
        turns: list[int] = []
        with EngineThread() as engines:
            begun, go_on = threading.Event(), threading.Event()

            def wait(models: Any) -> None:
                begun.set()
                assert go_on.wait(PATIENCE_SECONDS)

            with ThreadPoolExecutor(3) as callers:
                callers.submit(engines.call, wait)
                assert begun.wait(PATIENCE_SECONDS)
                for _ in range(2):
                    callers.submit(engines.call, lambda models: turns.append(engines.turns._turn))
                wait_until(lambda: len(engines._commands) == 2)
                go_on.set()
        assert len(set(turns)) == 2

    def test_time_in_which_the_process_was_stopped_does_not_count(self, monkeypatch):
        """A signal, a debugger, or a machine that sleeps."""
        now = [100.0]
        monkeypatch.setattr(turn_watch, "time", SimpleNamespace(monotonic=lambda: now[0]))
        unheard = UnheardTime(5.0)
        for passed, seconds in [(5.0, 5.0), (6.0, 11.0), (9000.0, 21.0)]:
            now[0] += passed
            unheard.look(False)
            assert unheard.seconds == seconds
        unheard.look(True)
        assert unheard.seconds == 0.0

    def test_turns_that_end_are_no_hang_however_many(self, monkeypatch):
        now, hung = [0.0], list[int]()
        monkeypatch.setattr(turn_watch, "time", SimpleNamespace(monotonic=lambda: now[0]))
        watch = TurnWatch(SENTENCE, lambda: hung.append(1))
        watch.thread = threading.get_ident()
        begin, seen = partial(watch.begin, lambda: 3.5), list[str | None]()
        happens: list[Callable[[], object]] = [*[begin] * 40, watch.end, *[str] * 40, begin]
        happens += [*[str] * 4, begin]

        def wait(seconds: float) -> bool:
            """In the place of the wait between two looks."""
            seen.append(watch.silence)
            now[0] += seconds
            if happens:
                happens.pop(0)()
                return False
            return True

        watch._ended = SimpleNamespace(wait=wait)  # type: ignore[assignment]
        watch._run()
        assert hung == [1]
        assert seen == [*[None] * 86, SENTENCE, None]

    def test_a_step_may_take_what_the_steps_of_all_models_take(self, monkeypatch):
        """And one that is not begun yet what other work may."""
        with EngineThread() as engines, monkeypatch.context() as patch:
            drivers = {key: SimpleNamespace(patience=p) for key, p in (("0", 0.0), ("1", 70.0))}
            patch.setattr(engines, "_drivers", drivers)
            for stepped, patience in (("0", 70.0 + step_times.OTHER_SECONDS), ("1", 70.0)):
                engines._models.stepped = stepped
                assert engines._patience() == patience

    def test_a_debugger_is_no_hang(self, soon):
        """Its frames are those of the thread that it stops."""
        begun, event = threading.Event(), threading.Event()
        stop: dict[str, Any] = {"__name__": "bdb", "begun": begun, "event": event}
        exec("def wait(): begun.set(); event.wait()", stop)
        with watched() as (watch, hung):
            debugged = threading.Thread(target=stop["wait"], daemon=True)
            debugged.start()
            assert begun.wait(PATIENCE_SECONDS)
            assert debugged.ident is not None
            watch.thread = debugged.ident
            watch.begin(lambda: 0.1)
            threading.Event().wait(0.6)
            assert not hung
            event.set()
            wait_until(lambda: bool(hung))


@contextmanager
def watched() -> Iterator[tuple[TurnWatch, list[int]]]:
    hung: list[int] = []
    watch = TurnWatch(SENTENCE, lambda: hung.append(1))
    watch.thread = threading.get_ident()
    watch.start()
    yield watch, hung
    watch.close()
