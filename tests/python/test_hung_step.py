"""A device that hangs in a step: closing its model ends with an error, and so does the process."""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.host import turn_watch
from harness.host.engine_thread import EngineThread
from harness.host.submissions import EngineStopped
from tests.paths import ROOT
from tests.patience import PATIENCE_SECONDS, POLL_SECONDS, PROCESS_SECONDS, wait_for_end, wait_until
from tests.python.conftest import engine_threads
from tests.serve.engine_child import be_watchful, hang_while
from zinc_rt import LLM, SamplingParams, loaded

WORDS = "the engine hangs; open another LLM; its memory is not freed"
ENDLESS = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0)
SCRIPT = """
import contextlib, ctypes, sys, threading
from harness.host.submissions import EngineStopped
from reference.runner import ModelRunner
from tests.serve.engine_child import be_watchful, impatience
from zinc_rt import LLM

be_watchful()
llm = LLM(sys.argv[1], tier="cpu", context=64, progress=False)
begun = threading.Event()

def submit(runner, inputs):
    with impatience():
        begun.set()
        ctypes.CDLL(None).sleep(10**6)

def ask():
    with contextlib.suppress(EngineStopped):
        llm.generate("a")

ModelRunner.submit = submit
threading.Thread(target=ask, daemon=True).start()
begun.wait()
"""


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hang is soon known; what it uses is freed behind the test."""
    for name in ("WATCH_SECONDS", "END_SECONDS"):
        monkeypatch.setattr(turn_watch, name, getattr(turn_watch, name))
    be_watchful()
    yield
    while loaded.LEFT:
        loaded.LEFT.pop().close()


@pytest.mark.parametrize("known", [False, True])
def test_close_ends_with_an_error(
    tiny_model_path: Path, tmp_path: Path, soon: None, known: bool
) -> None:
    """Whether the hang was known before or not; then nothing is left of the model but that."""
    threads, hangs = engine_threads(), tmp_path / "hangs"
    llm = LLM(tiny_model_path, tier="cpu", context=128, progress=False)
    llm._driver.call(hang_while, hangs)
    with ThreadPoolExecutor(1) as callers:
        hangs.touch()
        try:
            asked = callers.submit(llm.generate, "a", ENDLESS)
            wait_until(lambda: bool(llm._driver._streams))  # type: ignore[attr-defined]
            wait_until(lambda: not known or llm._driver.silence is not None)
            with pytest.raises(EngineStopped, match=WORDS):
                wait_for_end_of(llm)
            with pytest.raises(EngineStopped):
                asked.result()
            llm.close()
            with pytest.raises(EngineStopped):
                llm.generate("a")
            assert len(loaded.LEFT) == 1
        finally:
            hangs.unlink()
    loaded.LEFT.pop().close()
    wait_until(lambda: engine_threads() <= threads)


def wait_for_end_of(llm: LLM) -> None:
    """Close a model, which must end; raises what it raises."""
    raised: list[BaseException] = []

    def close() -> None:
        try:
            llm.close()
        except BaseException as error:
            raised.append(error)

    wait_for_end(close)
    if raised:
        raise raised[0]


def test_a_long_step_is_waited_for(
    tiny_model_path: Path, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that takes longer than the look at it, and less than what it may take."""
    monkeypatch.setattr(turn_watch, "END_SECONDS", PATIENCE_SECONDS)
    llm = LLM(tiny_model_path, tier="cpu", context=128, progress=False)
    submit, begun = llm._driver.engine.runner.submit, list[int]()  # type: ignore[attr-defined]

    def slow(inputs: object) -> object:
        begun.append(1)
        time.sleep(20 * POLL_SECONDS)
        return submit(inputs)

    llm._driver.engine.runner.submit = slow  # type: ignore[attr-defined]
    with ThreadPoolExecutor(1) as callers:
        asked = callers.submit(llm.generate, "a", ENDLESS)
        wait_until(lambda: bool(begun))
        llm.close()
        with pytest.raises(EngineStopped):
            asked.result()
    assert not loaded.LEFT


def test_an_interrupted_close_frees_all(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while it waits for a step: a second call would free nothing."""
    threads = engine_threads()
    llm = LLM(tiny_model_path, tier="cpu", context=128, progress=False)

    def interrupted(thread: EngineThread) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(EngineThread, "remove_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.close()
    wait_until(lambda: engine_threads() <= threads)
    with pytest.raises(EngineStopped):
        llm.generate("a")


def test_the_process_ends(tiny_model_path: Path, tmp_path: Path) -> None:
    """Where nobody closed the model; it says why its memory was not freed."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tiny_model_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PROCESS_SECONDS,
    )
    assert WORDS in done.stderr
    assert "Traceback" not in done.stderr
