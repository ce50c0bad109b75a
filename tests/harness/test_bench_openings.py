"""A benchmark says that a tier cannot be opened before it measures another one, and holds no
memory of a tier that it does not measure unless measurements take turns."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from contract.errors import ExecutionError, OutOfMemory, TierUnavailable
from contract.ir.nodes import BufferDecl
from contract.tier import Tier
from harness import tiers
from harness.bench import drafts, measure, rates
from harness.bench.__main__ import main
from harness.bench.drafts import DraftsPlan, run_drafts
from harness.bench.engines import PEER, Setup, Timing
from harness.bench.measure import BenchmarkPlan, run_benchmark
from harness.bench.rates import RatesPlan, run_rates
from harness.host.session import Session
from harness.progress import Progress
from harness.tiers import TierOptions
from tests.harness.test_bench import SIZES
from tests.null_tier import NullAllocation, NullTier


class FullTier(NullTier):
    """A device that is there and has no memory left."""

    def _allocate(self, decl: BufferDecl, nbytes: int) -> NullAllocation:
        raise OutOfMemory(decl.name, nbytes, 0, 0)


def _absent(options: TierOptions) -> Tier:
    raise TierUnavailable("absent", "there is no such device", "add one")


@pytest.fixture(autouse=True)
def further_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, opened in (
        ("null", lambda options: NullTier()),
        ("full", lambda options: FullTier()),
        ("absent", _absent),
    ):
        monkeypatch.setitem(tiers.TIERS, name, opened)


@pytest.mark.parametrize("kind", [[], ["--serve"], ["--drafts"], ["--rates", "4"]], ids=str)
def test_an_absent_tier_is_said_before_another_is_opened(tiny_model_path, capsys, kind):
    words = ["--model", str(tiny_model_path), *SIZES, *kind]
    assert main([*words, "--tiers", "cpu,absent"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: tier absent is not available")


@contextmanager
def watched_sessions(module: Any) -> Iterator[list[int]]:
    """The number of open sessions at each opening of one by ``module``."""
    count, counts = 0, list[int]()

    class Watched(Session):
        @classmethod
        def open(cls, *args: Any, **more: Any) -> Session:
            nonlocal count
            session = Session.open(*args, **more)
            count += 1
            counts.append(count)
            close = session.close

            def closed() -> None:
                nonlocal count
                close()
                count -= 1

            session.close = closed  # type: ignore[method-assign]
            return session

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Session", Watched)
        yield counts


def rates_plan(model: Path, *engines: str) -> RatesPlan:
    return RatesPlan(model, engines, 1, decode_tokens=2, repeat=1, lengths=(4,), sequences=(2,))


def test_rates_open_every_session_once_before_they_measure(tiny_model_path):
    """One at a time; ``full`` has room for none."""
    said: list[str] = []
    with watched_sessions(rates) as counts, pytest.raises(OutOfMemory):
        run_rates(rates_plan(tiny_model_path, "null", "full"), said.append)
    assert all(line.endswith(": opening the model") for line in said)
    assert counts == [1, 1]
    with watched_sessions(rates) as counts:
        found = run_rates(rates_plan(tiny_model_path, "null", "cpu"), said.append)
    assert counts == [1] * 8
    for engine in found["engines"].values():
        assert len(engine["rates"]["seconds to open 1 slots"]["samples"]) == 1


class WatchedPlan(DraftsPlan):
    """``begun`` are the measurements that were begun."""

    begun: ClassVar[list[str]] = []

    def begin(self, engine: str, sequences: int, progress: Progress) -> None:
        self.begun.append(engine)
        super().begin(engine, sequences, progress)


def test_drafts_open_every_tier_before_they_measure(tiny_model_path, monkeypatch):
    """Plain and drafted answers take turns, so two sessions of one tier are open."""
    plan = WatchedPlan(tiny_model_path, ("cpu", "full"), 1, decode_tokens=4, repeat=1, draft=2)
    monkeypatch.setattr(WatchedPlan, "begun", [])
    with watched_sessions(drafts) as counts, pytest.raises(OutOfMemory):
        run_drafts(plan)
    assert plan.begun == []
    assert counts == [1, 2]


class FakeWorker:
    """A worker without a process. Opening one may be refused by ``refuses``, which gets its name
    and those of the workers that are open."""

    open: ClassVar[list[str]] = []
    refuses: ClassVar[Callable[[str, list[str]], bool]]
    first_token_seconds = 1.0

    def __init__(self, name: str, setup: Setup, prompt: str, cache: Path | None = None) -> None:
        if type(self).refuses(name, self.open):
            raise ExecutionError(f"{name}: out of memory")
        self.name = name
        self.open.append(name)

    def __enter__(self) -> "FakeWorker":
        return self

    def __exit__(self, *_: object) -> None:
        self.open.remove(self.name)

    def generate(self, prompt: object, decode_tokens: int) -> Timing:
        return Timing(1.0, 1.0)


@pytest.mark.parametrize(
    ("refuses", "begun"),
    [
        (
            lambda name, others: name == "native",
            ["first-ever start of cpu", "first-ever start of native"],
        ),
        (lambda name, others: name == "native" and "cpu" in others, None),
    ],
    ids=["alone", "beside another"],
)
def test_single_requests_open_every_tier_first(tiny_model_path, monkeypatch, refuses, begun):
    """Each once alone, before a peer's configurations are tried, then all, whose repetitions take
    turns, before their starts are repeated."""
    monkeypatch.setattr(measure, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "refuses", staticmethod(refuses), raising=False)
    said: list[str] = []
    plan = BenchmarkPlan(
        tiny_model_path, ("cpu", "native", PEER), 1, prompt_tokens=4, decode_tokens=2
    )
    with pytest.raises(ExecutionError):
        run_benchmark(plan, said.append)
    assert not any(line.startswith(("start to first token", "repetition")) for line in said)
    assert begun is None or said == begun
    assert FakeWorker.open == []


def test_drafts_are_measured_on_the_device_that_is_named(tiny_model_path):
    plan = DraftsPlan(tiny_model_path, ("cpu",), 1, device="zen")
    options = [plan.options("cpu", 1, draft) for draft in (0, 2)]
    assert [one.tier_options.device for one in options] == ["zen", "zen"]
