"""Progress goes to its stream only, and lines are spare."""

import errno
import io
import os
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from contract.amounts import format_bytes
from contract.types import Request, SamplingParams
from harness import console
from harness import progress as progress_module
from harness.host.open import load_model
from harness.host.options import SessionOptions
from harness.host.prompt_progress import PromptProgress
from harness.host.session import Session
from harness.progress import BarProgress, LineProgress, NullProgress, format_amount, progress_on
from tests.engine.headed_models import block_model, head_of, headed_model
from tests.named_tiers import open_by_name


@pytest.fixture(autouse=True)
def a_line_each_two_seconds(monkeypatch) -> None:
    """In other tests there is none."""
    monkeypatch.setattr(progress_module, "LINE_SECONDS", 2.0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_display_suits_the_stream():
    assert isinstance(progress_on(Terminal()), BarProgress)
    assert isinstance(progress_on(io.StringIO()), LineProgress)


@pytest.mark.parametrize(
    "progress", [NullProgress(), BarProgress(Terminal()), LineProgress(Terminal())]
)
def test_every_display_takes_the_same_calls(progress, capsys):
    """Close before start, start without close, twice in a row: and standard output stays clean."""
    progress.close()
    progress.start("first", 10, "token")
    progress.advance(3)
    progress.start("second", None, "B")
    progress.advance(3)
    progress.close()
    progress.close()
    assert capsys.readouterr().out == ""


class Gone(io.StringIO):
    """A terminal or a pipe that nobody reads any more."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    def write(self, _: str) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def flush(self) -> None:
        raise BrokenPipeError


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize(
    "stream",
    [None, closed(), Gone(terminal=True), Gone(terminal=False)],
    ids=["none", "closed", "terminal", "pipe"],
)
def test_no_work_fails_because_nobody_reads_of_it(stream, monkeypatch, capsys):
    """Standard error that was closed before the process began is None in Python."""
    monkeypatch.setattr(progress_module, "LINE_SECONDS", -1.0)
    monkeypatch.setattr("sys.stderr", stream)
    for transient in (False, True):
        progress = progress_on(transient=transient)
        progress.start("first", None, "token")
        progress.start("second", 10, "B")
        progress.advance(3)
        progress.close()
    console.note("a note")
    console.complain("a problem")
    monkeypatch.undo()
    assert capsys.readouterr() == ("", "")


def test_quick_work_prints_no_lines():
    stream = io.StringIO()
    progress = LineProgress(stream, Clock())
    progress.start("load", 100, "B")
    for _ in range(100):
        progress.advance(1)
    progress.close()
    assert stream.getvalue() == ""


def test_long_work_prints_a_line_now_and_then():
    stream, clock = io.StringIO(), Clock()
    progress = LineProgress(stream, clock)
    progress.start("pull", 4000, "B")
    for _ in range(4000):
        clock.now += 0.001
        progress.advance(1)
    progress.close()
    assert stream.getvalue().splitlines() == [
        "pull: 50% (2 kB of 4 kB)", "pull: 100% (4 kB of 4 kB)",
    ]  # fmt: skip


def test_work_of_unknown_length_announces_itself():
    stream, clock = io.StringIO(), Clock()
    progress = LineProgress(stream, clock)
    progress.start("waiting", None, "token")
    assert stream.getvalue() == "waiting ...\n"
    clock.now = 3
    progress.advance(1234)
    progress.close()
    assert stream.getvalue() == "waiting ...\nwaiting: 1,234 tokens\n"


def test_bar_shows_label_and_share():
    stream = Terminal()
    progress = BarProgress(stream)
    progress.start("pull", 1000, "B")
    progress.advance(1000)
    progress.close()
    assert "pull" in stream.getvalue()
    assert "100%" in stream.getvalue()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_499, "999 kB"), (999_500, "1 MB"),
     (98_362_432, "98.4 MB"), (22_134_528_992, "22.1 GB"), (5 * 10**12, "5 TB")],
)  # fmt: skip
def test_bytes_are_readable(count, text):
    assert format_bytes(count) == format_amount(count, "B") == text


def test_a_prompt_is_read_to_its_end_and_no_further(tiny_model_path):
    """The step after that of its last part is submitted ahead, and is not of the prompt."""
    open_by_name("native").close()
    read: list[int] = []

    class Shown(NullProgress):
        def advance(self, n: int) -> None:
            read.append(n)

    with Session.open(
        tiny_model_path, SessionOptions(tier="native", context=64, chunk=4)
    ) as session:
        prompt = range(7, 30)
        list(session.generate(prompt, SamplingParams(), 3, progress=Shown()))
    assert len(read) > 1
    assert sum(read) == len(prompt)


@pytest.mark.parametrize("made", [headed_model, block_model, None])
def test_loading_ends_at_its_total(synthetic_model, made):
    """A model, and a head, of which the model's graph reads some tensors."""
    open_by_name("native").close()
    jobs: list[tuple[int | None, list[int]]] = []

    class Shown(NullProgress):
        def start(self, label: str, total: int | None, unit: str) -> None:
            jobs.append((total, []))

        def advance(self, n: int) -> None:
            jobs[-1][1].append(n)

    fields = {"architecture": "qwen3", "quant": "q4_k_m", "layers": 3 if made else 2}
    make = partial(made, synthetic_model) if made else synthetic_model
    path = make(**fields)
    options = SessionOptions(tier="native", context=64, draft=3, draft_model=head_of(path))
    with ExitStack() as owned:
        load_model(path, options, owned, Shown())
    assert len(jobs) == (2 if made else 1)
    assert [total for total, _ in jobs] == [sum(read) for _, read in jobs]


def test_a_prompt_that_begins_again_counts_no_token_twice():
    """As behind a preemption, or a step that failed."""
    done = iter((16, 48, 0, 32, 64, 16, 64))
    engine: Any = SimpleNamespace(chunk_tokens=16, progress=lambda _: next(done))
    shown: list[int] = []
    display: Any = SimpleNamespace(start=lambda *_: None, advance=shown.append, close=lambda: None)
    reading = PromptProgress(engine, Request(1, (5,) * 64, 1), display)
    for _ in range(7):
        reading.look()
    assert shown == [16, 32, 0, 0, 16, 0, 0]
