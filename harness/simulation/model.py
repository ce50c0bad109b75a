"""A world with a real model: a tiny synthetic one on the CPU tier, in the same virtual time."""

import tempfile
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from contract.arrays import Floats
from contract.errors import DeviceLost
from contract.types import Request, TokenEvent
from harness.simulation.clock import VirtualClock
from harness.simulation.constraint import Constraint
from harness.simulation.device import NO_SCOPE
from harness.simulation.invariants import Violation
from harness.simulation.schedule import EngineShape
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from reference.cpu.tier import CpuTier
from reference.engine import Engine, EngineOptions
from reference.limits import Limits, pages_for
from reference.model.open import Model, open_model
from reference.runner import ModelRunner, StepInput, StepOutput

MODEL_VOCAB = 320
"""Tokens of the synthetic models."""
END_OF_GENERATION = frozenset(range(0, MODEL_VOCAB, 64))


class BreakableRunner:
    """A ``ModelRunner`` that can be watched and made to fail, as ``SimulatedRunner``."""

    def __init__(self, inner: ModelRunner, clock: VirtualClock, seconds: float) -> None:
        self.slot_scopes = [NO_SCOPE] * inner.limits.slots
        self.watch: Any = lambda step: None
        self.violation: Violation | None = None
        self.steps = 0
        self.failures = self.abandoned = 0
        self._inner = inner
        self._clock = clock
        self._seconds = seconds
        self._fault: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def fail_next(self, where: str) -> None:
        """The next step is lost when it is submitted, or the next one read when it is."""
        self._fault = where

    def restart(self) -> None:
        """Nothing is queued here."""
        self._fault = None

    def submit(self, inputs: StepInput) -> Any:
        self._lose_if("submit")
        self.watch(inputs)
        self.steps += 1
        return self._inner.submit(inputs)

    def collect(self, submission: Any) -> StepOutput:
        self._clock.advance(self._seconds)
        self._lose_if("collect")
        return self._inner.collect(submission)

    def _lose_if(self, where: str) -> None:
        if self._fault == where:
            self._fault = None
            self.failures += 1
            raise DeviceLost("the device was lost on purpose")


class ModelWorld:
    """A tiny Qwen 3, or a hybrid of attention and delta nets where the shape is recurrent.

    The right answer of a request is what it gets alone, one step at a time, on a second runner."""

    end_of_generation = END_OF_GENERATION
    disk = None

    def __init__(self, shape: EngineShape, clock: VirtualClock) -> None:
        self.clock = clock
        self._stack = ExitStack()
        model = _model("qwen35" if shape.recurrent else "qwen3")
        tier = self._stack.enter_context(CpuTier(1))
        runner = self._stack.enter_context(ModelRunner(model, tier, shape.limits))
        context = shape.limits.context
        alone = Limits(
            1,
            context,
            pages_for(context),
            step_tokens=context + 1,
            step_rows=context,
            masks=min(1, shape.limits.masks),
            biases=shape.limits.biases,
            top_log_probabilities=shape.limits.top_log_probabilities,
        )
        self._alone = self._stack.enter_context(ModelRunner(model, tier, alone))
        self._solos: dict[Request, tuple[TokenEvent, ...]] = {}
        self._logits: dict[int, Floats] = {}
        self.runner = BreakableRunner(runner, self.clock, shape.step_seconds)

    def solo(
        self, request: Request, constraint: Constraint | None = None
    ) -> tuple[TokenEvent, ...]:
        """By running it."""
        engine = Engine(
            self._alone,
            EngineOptions(
                end_of_generation=self.end_of_generation, prefix_cache=False, steps_ahead=0
            ),
        )
        parts: list[Floats] = []
        engine.submit(
            replace(request, tenant=0),
            lambda start, logits: parts.append(logits),
            allowed=None if constraint is None else partial(constraint.mask, vocab=MODEL_VOCAB),
        )
        events = tuple(engine.run())
        self._logits[request.id] = np.concatenate(parts)
        return events

    def logits_match(self, request: Request, start: int, logits: Floats) -> bool:
        """All bits of them."""
        expected = self._logits[request.id][start : start + len(logits)]
        return logits.tobytes() == expected.tobytes()

    def unload(self) -> None:
        """There is one model, and nothing is loaded in its place."""

    def close(self) -> None:
        """Free the runners."""
        self._stack.close()


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """The folder of this process's models, removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="zinc-rt-simulation-")


@cache
def _model(architecture: str) -> Model:
    path = Path(_folder().name) / f"{architecture}.gguf"
    write_synthetic(path, sized_spec("tiny", architecture=architecture, quant="q8_0"))
    return open_model(path)
