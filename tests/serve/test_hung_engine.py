"""A server whose engines' process hangs: it does not end, and does not answer."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from contract.types import LOCAL_TENANT
from harness.host.remote import process
from harness.host.remote.process import ChildProcess, EngineProcess
from harness.serve import metrics
from harness.serve.run import Running
from tests.patience import PATIENCE_SECONDS, wait_for_end, wait_until
from tests.serve.conftest import Serve
from tests.serve.http import Http
from tests.serve.test_engine_process import BODY, COMPLETIONS, told
from tests.serve.test_hung_step import hanging
from tests.stopped import stopped


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child is looked at often. One that works may take its time, see ``hung``."""
    monkeypatch.setattr(process, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(process, "SILENT_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(process, "END_SECONDS", 0.5)
    monkeypatch.setattr(process, "KILL_SECONDS", PATIENCE_SECONDS)


def child_of(server: Running) -> ChildProcess:
    engines = server.models._thread
    assert isinstance(engines, EngineProcess)
    assert engines._child is not None
    return engines._child


@contextmanager
def hung(child: ChildProcess) -> Iterator[None]:
    """A child does not answer, which is soon known, until it has answered again."""
    with pytest.MonkeyPatch.context() as patch:
        with stopped(child.pid):
            patch.setattr(process, "SILENT_SECONDS", 1.0)
            patch.setattr(metrics, "ANSWER_SECONDS", 0.1)
            yield
        wait_until(lambda: child.ended or child._unheard < process.SILENT_SECONDS)


def test_of_a_child_that_hangs_the_server_tells_what_it_knows(
    serve: Serve, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    with serve(engine_process=True) as server:
        http = Http(server.url)
        before = http.post(COMPLETIONS, BODY).answer
        known = http.get("/metrics").body
        assert b'engine_answers{model_name="tiny"} 1.0' in known
        usage = f"/v1/tenants/{LOCAL_TENANT.id}/usage"
        asked = [("/health", None), ("/ready", None), (usage, None), (COMPLETIONS, BODY)]
        with hung(child_of(server)):
            wait_until(lambda: http.get("/health").status == 503)
            for path, body in asked:
                reply = http.get(path) if body is None else http.post(path, body)
                assert (reply.status, reply.error["code"]) == (503, "engine_stopped"), path
                assert "the engine's process does not answer" in reply.error["message"]
            now = http.get("/metrics").body
            assert b'engine_answers{model_name="tiny"} 0.0' in now
            of_tenants = [line for line in known.splitlines() if b":tenant_" in line]
            assert of_tenants == [line for line in now.splitlines() if b":tenant_" in line]
            assert len(of_tenants) > 5
            wait_until(lambda: "does not answer" in caplog.text)
        assert http.get("/health").status == http.get("/ready").status == 200
        assert told(http.post(COMPLETIONS, BODY).answer) == told(before)
        pid = child_of(server).pid
        wanted = [
            "the engine's process %d does not answer",
            "the engine's process %d answers again",
        ]

        def said() -> list[str]:
            all_said = [one.message for one in caplog.records]
            return [line for line in all_said if "the engine's process" in line]

        wait_until(lambda: said()[:2] == [line % pid for line in wanted])


@contextmanager
def reading_hangs(server: Running, _: Path) -> Iterator[None]:
    with hung(child_of(server)):
        yield


@contextmanager
def step_hangs(server: Running, folder: Path) -> Iterator[None]:
    with hanging(server, folder / "hangs"), ThreadPoolExecutor(1) as clients:
        asked = clients.submit(Http(server.url).post, COMPLETIONS, BODY)
        yield
        assert asked.result().status == 503


@pytest.mark.parametrize("hangs", [reading_hangs, step_hangs])
def test_a_child_that_goes_on_to_hang_is_replaced(
    serve: Serve, impatient: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hangs: Any
) -> None:
    with serve(engine_process=True) as server:
        http, child = Http(server.url), child_of(server)
        before = http.post(COMPLETIONS, BODY).answer
        with hangs(server, tmp_path):
            wait_until(lambda: http.get("/health").status == 503)
            assert not child.ended
            monkeypatch.setattr(process, "KILL_SECONDS", 0.5)
            wait_until(lambda: child.ended and server.service.model.driver.failure is not None)
        monkeypatch.setattr(process, "KILL_SECONDS", PATIENCE_SECONDS)
        assert told(http.post(COMPLETIONS, BODY).answer) == told(before)
        assert child_of(server).pid != child.pid


def test_the_server_ends_though_its_child_hangs(
    serve: Serve, impatient: None, patient_end: None
) -> None:
    """And does not leave it behind."""
    with ExitStack() as serving, ThreadPoolExecutor(1) as clients:
        server = serving.enter_context(serve(engine_process=True))
        child = psutil.Process(child_of(server).pid)
        with hung(child_of(server)):
            asked = clients.submit(Http(server.url).post, COMPLETIONS, BODY)
            wait_until(lambda: bool(server.service.model.driver._streams))
            wait_for_end(lambda: server.drain(0))
            assert asked.result().status == 503
            wait_for_end(serving.close)
            assert not child.is_running()


def test_a_child_that_loads_is_not_silent(
    serve: Serve, impatient: None, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long its interpreter is held."""
    with serve(beside={"other": tiny_model_path}, engine_process=True) as server:
        http, engines, child = Http(server.url), server.models._thread, child_of(server)
        assert isinstance(engines, EngineProcess)
        opened = engines.open

        def slowly(*given: Any) -> Any:
            with ThreadPoolExecutor(1) as others, monkeypatch.context() as patch:
                with stopped(child.pid):
                    loading = others.submit(opened, *given)
                    wait_until(lambda: child._opening > 0)
                    patch.setattr(process, "SILENT_SECONDS", 0.5)
                    wait_until(lambda: child._unheard > 2 * process.SILENT_SECONDS)
                    assert http.get("/health").status == 200
                return loading.result()

        engines.open = slowly  # type: ignore[method-assign]
        assert http.post(COMPLETIONS, {**BODY, "model": "other"}).status == 200
