"""The ratios of the speed gate. A ratio is larger when what it is named after is faster.

The two times of a ratio are measured one after the other; the ratio is the median over the
repetitions."""

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from contract.processors import processors
from harness.bench.engines import Setup, TierEngine, Timing
from reference.cpu.tier import CpuTier
from reference.model.open import open_model
from tests.bench.cpu_use import CpuUse
from tests.bench.steps import runner_on, step_of

CPU, OPENCL = "cpu", "opencl"
PROMPT_TOKENS = 128
DECODE_TOKENS = 32
DEFINED_TOKENS = 4
"""Tokens of the step that the slow definitions compute."""

Seconds = Callable[[], float]
Rounds = Callable[[Callable[[], None], Callable[[], None], int], None]
"""Calls the first function, then the second, the given number of times."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A ratio, and the share of the cores that other processes used during its measurement."""

    ratio: float
    others: float


@dataclass(slots=True)
class Bench:
    """The engines of one model, each opened on first use."""

    model: Path
    stack: ExitStack
    engines: dict[str, TierEngine] = field(default_factory=dict)

    def timing(self, tier: str) -> Timing:
        """The timing of one prompt and its continuation on a tier."""
        if tier not in self.engines:
            context = PROMPT_TOKENS + DECODE_TOKENS + 1
            setup = Setup(str(self.model), processors(), context, "f16")
            engine = TierEngine(tier, setup)
            self.stack.callback(engine.close)
            self.engines[tier] = engine
        return self.engines[tier].generate(range(PROMPT_TOKENS), DECODE_TOKENS)

    def decode_step(self, tier: str) -> float:
        """Seconds a decode step takes."""
        return self.timing(tier).decode_seconds / DECODE_TOKENS

    def prefill_token(self, tier: str) -> float:
        """Seconds a token of a prompt takes."""
        return self.timing(tier).prefill_seconds / PROMPT_TOKENS

    def short_step(self, tier: CpuTier) -> Seconds:
        """A timed step of a few tokens."""
        model = open_model(self.model)
        self.stack.callback(model.file.close)
        self.stack.enter_context(tier)
        runner = self.stack.enter_context(runner_on(model, tier, DEFINED_TOKENS))
        inputs = step_of(runner, DEFINED_TOKENS)

        def seconds() -> float:
            started = time.perf_counter()
            runner.step(inputs)
            return time.perf_counter() - started

        return seconds


def _against_definitions(bench: Bench) -> tuple[Seconds, Seconds]:
    return bench.short_step(CpuTier(definitions_only=True)), bench.short_step(CpuTier())


def _prefill_against_decode(bench: Bench) -> tuple[Seconds, Seconds]:
    return partial(bench.decode_step, CPU), partial(bench.prefill_token, CPU)


def _decode_against_cpu(bench: Bench) -> tuple[Seconds, Seconds]:
    return partial(bench.decode_step, CPU), partial(bench.decode_step, OPENCL)


def _prefill_against_cpu(bench: Bench) -> tuple[Seconds, Seconds]:
    return partial(bench.prefill_token, CPU), partial(bench.prefill_token, OPENCL)


Pair = Callable[[Bench], tuple[Seconds, Seconds]]
"""Makes the two timed functions: the yardstick, and what is compared with it."""
MEASUREMENTS: Mapping[str, tuple[str, Pair]] = {
    "cpu_step_over_definitions": (CPU, _against_definitions),
    "cpu_prefill_over_decode": (CPU, _prefill_against_decode),
    "opencl_decode_over_cpu": (OPENCL, _decode_against_cpu),
    "opencl_prefill_over_cpu": (OPENCL, _prefill_against_cpu),
}
"""The required tier and the functions to time, by the name of the ratio."""


REPETITIONS = 5
"""The number of interleaved measurements whose median is the ratio."""


def measure_ratio(bench: Bench, name: str, rounds: Rounds) -> Measured:
    """Measure the named ratio. ``rounds`` runs the measured function after its yardstick each
    time."""
    yardstick, measured = MEASUREMENTS[name][1](bench)
    slow: list[float] = []
    quick: list[float] = []
    yardstick(), measured()  # the first call lowers graphs and fills caches
    before = CpuUse.now()
    rounds(lambda: slow.append(yardstick()), lambda: quick.append(measured()), REPETITIONS)
    ratio = statistics.median(a / b for a, b in zip(slow, quick, strict=True))
    return Measured(ratio, CpuUse.now().others_since(before))
