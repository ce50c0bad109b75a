"""Ctrl-C while a session computes: the step is abandoned, and what was cached stays."""

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from contract.types import SamplingParams
from harness.host.options import SessionOptions
from harness.host.session import Session
from harness.late_interrupts import LateInterrupt
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from reference.engine.pipeline import Pipeline
from reference.runner import ModelRunner
from tests.late_tier import LateTier
from tests.needs import need_device

pytestmark = pytest.mark.usefixtures("native_is_quick")
HISTORY = [number % 300 for number in range(40)]


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def pressed_within(patch: pytest.MonkeyPatch, number: int, counts: list[int]) -> None:
    """Ctrl-C is pressed in the step of this number from now on, when it is submitted."""
    submit = ModelRunner.submit

    def pressing(runner: ModelRunner, inputs: Any) -> Any:
        counts.append(len(inputs.query))
        if len(counts) == number:
            press()
        return submit(runner, inputs)

    patch.setattr(ModelRunner, "submit", pressing)


@pytest.mark.parametrize("tier", ["cpu", "native"])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen35"])
def test_the_next_answer_finds_what_was_cached(tmp_path, tier, architecture, monkeypatch):
    """Ctrl-C in a long prompt that continues a conversation, as in a chat: no further step of it is
    computed, and the next turn has the bits of one in a new session, and reads only what is new."""
    path = tmp_path / "model.gguf"
    write_synthetic(path, sized_spec("tiny", architecture=architecture, context=256))
    options = SessionOptions(tier=tier, slots=1, chunk=32)
    turn, long = [*HISTORY, 5, 6, 7], [*HISTORY, *range(150)]
    with need_device(lambda: Session.open(path, options)) as session:
        expected = [piece.token for piece in session.generate(turn, SamplingParams(), 3)]
    with Session.open(path, options) as session:
        list(session.generate(HISTORY, SamplingParams(), 2))
        steps: list[int] = []
        with monkeypatch.context() as patch:
            pressed_within(patch, 2, steps)
            generation = session.generate(long, SamplingParams(), 3)
            with pytest.raises(KeyboardInterrupt):
                list(generation)
            generation.cancel()
        assert len(steps) == 2
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        again = session.generate(turn, SamplingParams(), 3)
        assert [piece.token for piece in again] == expected
        # The few states of one slot may have been saved behind it.
        assert again.stats.cached_tokens == 32 or architecture == "qwen35"


def test_a_tier_that_finishes_steps_is_left_at_once(tmp_path, monkeypatch):
    """Ctrl-C is raised within the step; the session goes on."""
    path = tmp_path / "model.gguf"
    write_synthetic(path, sized_spec("tiny", context=256))
    monkeypatch.setattr("harness.host.open.open_tier", lambda *_: LateTier())
    monkeypatch.setattr(Pipeline, "leave", lambda self, request_ids: False)
    with need_device(lambda: Session.open(path, SessionOptions(slots=1, chunk=32))) as session:
        expected = [piece.token for piece in session.generate(HISTORY, SamplingParams(), 2)]
        steps: list[int] = []
        with monkeypatch.context() as patch:
            pressed_within(patch, 1, steps)
            generation = session.generate(range(150), SamplingParams(), 3)
            with pytest.raises(KeyboardInterrupt):
                list(generation)
            generation.cancel()
        again = session.generate(HISTORY, SamplingParams(), 2)
        assert [piece.token for piece in again] == expected


@pytest.mark.parametrize(
    ("presses", "hurries", "done"), [(1, True, 2), (2, True, 1), (1, False, 0)]
)
def test_when_it_is_raised(presses, hurries, done):
    """At the end; the second time, or if nothing can be done, at once."""
    steps: list[int] = []

    def compute() -> None:
        with LateInterrupt(lambda: hurries):
            press()
            steps.append(1)
            if presses == 2:
                press()
            steps.append(2)

    with pytest.raises(KeyboardInterrupt):
        compute()
    assert len(steps) == done


def test_others_are_left_alone():
    """Where Ctrl-C is ignored or has another meaning, and in other threads."""

    def hurried() -> bool:
        raise AssertionError("nobody asked")

    def within(change: Callable[[], object]) -> object:
        with LateInterrupt(hurried):
            return change()

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        within(press)
        came: list[int] = []
        signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
        within(press)
        assert came == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)
    handlers: list[object] = []
    thread = threading.Thread(
        target=lambda: within(lambda: handlers.append(signal.getsignal(signal.SIGINT)))
    )
    thread.start()
    thread.join()
    assert handlers == [before]
