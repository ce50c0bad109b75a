"""Measures the host's cost of a step: the engine on a tier that computes nothing.

Everything the submitting thread does is real: planning, the step's inputs, the tier's copy of them,
the events. Times are CPU time of the thread, which other processes hardly change."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from contract.arithmetic import PAGE_TOKENS
from contract.arrays import Bytes
from contract.ir.inputs import InputRows
from contract.tier import TierInfo
from contract.types import Request, TokenEvent
from harness.bench.engines import GREEDY
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from reference.cpu.tier import CpuBatch, CpuFence, CpuTier
from reference.engine import Engine, EngineOptions
from reference.limits import Limits, pages_for
from reference.model.open import Model, open_model
from reference.runner import ModelRunner

HOST_SLOTS = (1, 16, 64)
HOST_CONTEXTS = (1024, 131_072)
CHUNK_TOKENS = 8192
"""Prompt tokens per step; nothing computes them, so long contexts fill quickly."""
CHURN_TOKENS = 64
"""Tokens of a request when requests come and go: with as many slots, one ends per step."""


class IdleTier(CpuTier):
    """A tier that copies a step's inputs, as every tier does, and computes nothing: every token is
    0. It claims to be asynchronous, so that an engine keeps a step ahead."""

    @property
    def info(self) -> TierInfo:
        """The CPU tier's, marked as asynchronous."""
        return replace(super().info, asynchronous=True)

    def submit(
        self,
        batch: CpuBatch,
        inputs: Bytes,
        requested: Sequence[str] = (),
        rows: InputRows | None = None,
    ) -> CpuFence:
        """Copy the inputs."""
        batch.inputs.update(inputs, rows)
        return CpuFence(MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class HostCost:
    """Microseconds of CPU time per step, by sample: ``steady`` while the same sequences decode,
    ``churn`` while in each step about ``slots / 64`` sequences end and as many start."""

    steady: list[float]
    churn: list[float]


@contextmanager
def idle_runner(model: Model, slots: int, context: int) -> Iterator[ModelRunner]:
    """A runner whose steps cost only the host's time."""
    limits = Limits(
        slots=slots,
        context=context,
        pages=slots * pages_for(context),
        step_tokens=slots + CHUNK_TOKENS,
        step_rows=slots,
    )
    with IdleTier() as tier, ModelRunner(model, tier, limits) as runner:
        yield runner


@contextmanager
def smallest_model() -> Iterator[Model]:
    """A model of one layer; its size makes no difference to the host."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "smallest.gguf"
        context = max(HOST_CONTEXTS)
        spec = sized_spec("tiny", architecture="qwen3", quant="q4_k_m", layers=1, context=context)
        write_synthetic(path, spec)
        model = open_model(path)
        with model.file:
            yield model


def measure_host(runner: ModelRunner, steps: int) -> HostCost:
    """Time ``steps`` steps of each kind; every sequence decodes at the end of its context."""
    return HostCost(steady(runner, steps), _churn(runner, steps))


def steady(runner: ModelRunner, steps: int) -> list[float]:
    """Microseconds of CPU time of each of ``steps`` steps in which one sequence per slot
    decodes."""
    limits = runner.limits
    engine = Engine(runner, EngineOptions(prefix_cache=False), clock=time.perf_counter)
    prompt = (1,) * (limits.context - steps - 2 * PAGE_TOKENS)
    for number in range(limits.slots):
        # Different lengths, so that not all sequences begin a page in the same step.
        request = prompt[number % PAGE_TOKENS :]
        engine.submit(Request(number, request, steps + PAGE_TOKENS, GREEDY, ignore_end=True))
    begun: set[int] = set()
    while len(begun) < limits.slots:
        for event in engine.step():
            begun.add(event.request_id)
            # Stall it, or the first sequences would end before the last prompt is read.
            engine.stall(event.request_id, patient=True)
    for number in begun:
        engine.unstall(number)
    while len(engine.step()) < limits.slots:
        pass
    return [_cpu_microseconds(engine)[0] for _ in range(steps)]


def _churn(runner: ModelRunner, steps: int) -> list[float]:
    """Like ``steady`` with short sequences, each followed by another when it ends."""
    limits = runner.limits
    engine = Engine(runner, EngineOptions(prefix_cache=False), clock=time.perf_counter)
    found = []
    number = 0

    def submit(tokens: int) -> None:
        nonlocal number
        number += 1
        engine.submit(Request(number, (1,) * PAGE_TOKENS, tokens, GREEDY, ignore_end=True))

    for slot in range(limits.slots):
        submit(1 + slot * CHURN_TOKENS // limits.slots)
    for _ in range(steps):
        microseconds, events = _cpu_microseconds(engine)
        found.append(microseconds)
        for _ in range(sum(event.finish_reason is not None for event in events)):
            submit(CHURN_TOKENS)
    return found


def _cpu_microseconds(engine: Engine) -> tuple[float, Sequence[TokenEvent]]:
    """CPU time of a step in microseconds, and its events."""
    started = time.thread_time()
    events = engine.step()
    return (time.thread_time() - started) * 1e6, events
