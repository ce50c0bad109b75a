"""Runs to record: requests of all kinds through an engine, and recurrent states moved about."""

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from contract.dtypes import BY_NAME
from contract.errors import DeviceLost
from contract.tier import Tier
from contract.types import Request, SamplingParams
from harness.trace.framing import TraceReader
from harness.trace.play import Replayed, play
from harness.trace.record import record_on
from harness.trace.records import ModelRecord
from reference.cpu.tier import CpuTier
from reference.engine import Engine, EngineOptions
from reference.engine.draft_model import DraftModel, draft_limits
from reference.limits import Limits
from reference.memory.recurrent import recurrent_buffers
from reference.model.open import Model, open_model
from reference.runner import ModelRunner
from tests.constrained import LIMITS as CONSTRAINED_LIMITS
from tests.constrained import Constrained, run
from tests.named_tiers import named

TIERS = named("native", "opencl")
LIMITS = Limits(
    slots=2, context=64, pages=8, step_tokens=24, step_rows=20, saved_states=2, draft_tokens=11
)
REQUESTS = (
    Request(1, tuple(range(5, 35)), 6, ignore_end=True),
    Request(2, (80, 81, 82), 9, SamplingParams(temperature=0.9, top_k=40, seed=5)),
    Request(3, (7,), 5, SamplingParams(repeat_penalty=1.3, presence_penalty=0.2)),
)


def record_engine(
    path: Path, trace: Path, tier: str, *, depth: int = 0, of: Tier | None = None
) -> dict[int, list[int]]:
    """Three requests on two slots, one of which has its logits taken; the tokens of each."""
    model = open_model(path)
    opened = of or TIERS[tier]()
    tokens: dict[int, list[int]] = {request.id: [] for request in REQUESTS}
    with model.file:
        recorder = record_on(opened, trace, model, LIMITS)
        with recorder as recorded, ModelRunner(model, recorded, LIMITS) as run:
            engine = Engine(run, EngineOptions(steps_ahead=depth))
            for request in REQUESTS:
                sink = (lambda first, rows: None) if request.id == 2 else None
                engine.submit(request, sink)
            while not engine.idle:
                with suppress(DeviceLost):
                    for event in engine.step():
                        tokens[event.request_id].append(event.token)
    return tokens


def record_constrained(path: Path, trace: Path, tier: str) -> None:
    """Steps with masks, biases and log-probabilities, three under way."""
    model = open_model(path)
    opened = TIERS[tier]()
    with model.file:
        recorder = record_on(opened, trace, model, CONSTRAINED_LIMITS)
        with recorder as recorded, ModelRunner(model, recorded, CONSTRAINED_LIMITS) as runner:
            run(runner, [Constrained(8, 5), Constrained(2, 17, temperature=0.9)], depth=3)


def record_recurrent(path: Path, trace: Path, tier: str) -> None:
    """A hybrid model whose states are saved and loaded, and read and written by the host."""
    model = open_model(path)
    opened = TIERS[tier]()
    with model.file:
        recorder = record_on(opened, trace, model, LIMITS)
        with recorder as recorded, ModelRunner(model, recorded, LIMITS) as run:
            generate(run, 1)
            run.recurrent.save(0, 1)
            run.recurrent.load(1, 1)
            run.recurrent._settle()
            for decl in recurrent_buffers(run.graph):
                buffer = run._buffers[decl.name]
                nbytes = buffer.nbytes // LIMITS.slots
                recorded.write(buffer, 0, recorded.read(buffer, nbytes, nbytes))
            generate(run, 2)


def record_page_copies(path: Path, trace: Path, kv_dtype: str) -> None:
    """Pages that are copied, saved in host memory, and loaded from it between two steps."""
    model = open_model(path)
    limits = replace(LIMITS, kv_dtype=BY_NAME[kv_dtype])
    with model.file:
        recorder = record_on(CpuTier(), trace, model, limits)
        with recorder as recorded, ModelRunner(model, recorded, limits) as run:
            generate(run, 1)
            copies = run.page_copies()
            assert copies is not None
            copies.copy(0, 5)
            copies.load(copies.save(5), 6)
            generate(run, 2)


def generate(runner: ModelRunner, number: int) -> None:
    """A few tokens."""
    engine = Engine(runner)
    engine.submit(Request(number, (3, 5, 7, 11), 4))
    list(engine.run())


def replay(path: Path, trace: Path, tier: str, *, of: Tier | None = None) -> Replayed:
    """A trace on a fresh tier, or on ``of``."""
    model = open_model(path)
    with model.file, of or TIERS[tier]() as opened, TraceReader(trace) as reader:
        return play(reader, lambda number, traced: model, opened)


def record_both(paths: Sequence[Path], trace: Path) -> None:
    """Two models on one CPU tier."""
    with ExitStack() as owned:
        models = [open_model(path) for path in paths]
        for model in models:
            owned.callback(model.file.close)
        first = owned.enter_context(record_on(CpuTier(), trace, models[0], LIMITS))
        faces = [first, first.for_model(models[1], LIMITS)]
        runners = [
            owned.enter_context(ModelRunner(model, face, LIMITS))
            for model, face in zip(models, faces, strict=True)
        ]
        engines = [Engine(runner) for runner in runners]
        for engine in engines:
            engine.submit(REQUESTS[0])
        while not all(engine.idle for engine in engines):
            for engine in engines:
                engine.step()


def record_draft(paths: Sequence[Path], trace: Path) -> int:
    """The second model guesses for the first, in the same queue; how many guesses there were."""
    with ExitStack() as owned:
        model, small = (open_model(path) for path in paths)
        for opened in (model, small):
            owned.callback(opened.file.close)
        tier = owned.enter_context(record_on(CpuTier(), trace, model, LIMITS))
        runner = owned.enter_context(ModelRunner(model, tier, LIMITS))
        limits = draft_limits(LIMITS)
        beside = owned.enter_context(ModelRunner(small, tier.for_model(small, limits), limits))
        engine = Engine(runner, drafter=DraftModel(beside, model))
        for request in REQUESTS:
            engine.submit(request)
        list(engine.run())
        return engine.statistics.speculation.drafted


def replay_both(paths: Sequence[Path], trace: Path, tier: str) -> Replayed:
    """A trace of several models."""
    with ExitStack() as files, TIERS[tier]() as opened, TraceReader(trace) as reader:

        def open_it(number: int, traced: ModelRecord) -> Model:
            model = open_model(paths[number])
            files.callback(model.file.close)
            return model

        return play(reader, open_it, opened)


class Wrong(CpuTier):
    """A CPU tier that gets one step wrong: the negative control."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.left = step

    def submit(self, batch, inputs, requested=(), rows=None):  # type: ignore[no-untyped-def]
        self.left -= 1
        if self.left == 0:
            inputs = self.spoiled(inputs)
        return super().submit(batch, inputs, requested, rows)

    def spoiled(self, inputs):  # type: ignore[no-untyped-def]
        """The inputs with the lowest bit of a query token changed, right behind the STEP record."""
        inputs = inputs.copy()
        inputs[256] ^= np.uint8(1)
        return inputs


class Refusing(Wrong):
    """A CPU tier that loses its device once, before it does anything."""

    def spoiled(self, inputs):  # type: ignore[no-untyped-def]
        raise DeviceLost("refused")
