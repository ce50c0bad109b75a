"""Runs the same steps on the definitions and on tiers, and compares every result."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from contract.arrays import Array
from contract.dtypes import F32, DType
from contract.ir.graph import BufferKind, Graph
from contract.records import QUERY_TOKEN
from contract.shape_key import ShapeKey
from contract.tier import Tier
from contract.types import SamplingParams
from harness.progress import SILENT, Progress
from harness.validate.compare import DOWNSTREAM, UNOBSERVED, Divergence, find_divergence
from harness.validate.histogram import ValueHistogram
from harness.validate.trace import (
    Site,
    TracedModel,
    layer_groups,
    observe,
    residual_sites,
    result_sites,
    scratch_of,
)
from reference.limits import Limits, whole_contexts
from reference.model.open import Model
from reference.runner import ModelRunner, StepInput
from reference.sched.slots import sampling_record

DEFINITIONS = "definitions"
"""The name of the oracle, which runs the definitions, in reports."""
TRACE_BYTES = 1 << 30
"""Most bytes of intermediate values a run keeps."""
PERSISTENT = (BufferKind.STATE, BufferKind.OUTPUT)
"""Kinds of buffers whose contents outlive the step even without tracing."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The steps to compute: ``tokens`` in chunks of ``chunk``, the last ``decode`` tokens one by
    one."""

    tokens: tuple[int, ...]
    chunk: int = 16
    decode: int = 4
    kv_dtype: DType = F32

    def steps(self) -> list[tuple[int, int]]:
        """The (first position, number of tokens) of every step."""
        prefill = max(1, len(self.tokens) - self.decode)
        steps = [
            (start, min(self.chunk, prefill - start)) for start in range(0, prefill, self.chunk)
        ]
        return steps + [(position, 1) for position in range(prefill, len(self.tokens))]

    @property
    def limits(self) -> Limits:
        """Limits of one slot that is just large enough."""
        positions = len(self.tokens)
        tokens = max(count for _, count in self.steps())
        return whole_contexts(1, positions, self.kv_dtype, tokens, step_rows=1, recent_tokens=1)

    def input(self, start: int, count: int) -> StepInput:
        """The inputs of a step of ``count`` tokens from position ``start``, with logits of the last
        token."""
        query = np.zeros(count, QUERY_TOKEN)
        query["token"] = self.tokens[start : start + count]
        query["position"] = np.arange(start, start + count)
        # Descending pages, so that a tier that ignores the page table fails.
        pages = np.arange(self.limits.slot_pages, dtype=np.int32)[None, ::-1]
        return StepInput(
            query=query,
            output_rows=np.array([count - 1], np.int32),
            sampling=sampling_record(SamplingParams(), 0, start + count)[None],
            page_table=pages,
        )


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """The result of a validation. Histograms are by layer, then by tier, the oracle included."""

    tiers: tuple[str, ...]
    layers: tuple[int, ...]
    steps: int
    results: int
    histograms: Mapping[int, Mapping[str, ValueHistogram]]
    divergences: Mapping[str, Divergence]

    @property
    def agrees(self) -> bool:
        """Whether no tier diverges."""
        return not self.divergences

    @property
    def verdict(self) -> str:
        """The verdict in one line."""
        names = ", ".join(self.tiers)
        scope = f"{self.results:,} results of {self.steps} steps, {len(self.layers)} layers"
        if self.agrees:
            return f"PASS: {names} agrees with the definitions bit for bit ({scope})"
        found = "; ".join(f"{tier} at {d.node}" for tier, d in self.divergences.items())
        return f"FAIL: {found} ({scope})"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "verdict": self.verdict,
            "agrees": self.agrees,
            "tiers": list(self.tiers),
            "steps": self.steps,
            "results": self.results,
            "layers": {
                str(layer): {name: histogram.as_dict() for name, histogram in by_tier.items()}
                for layer, by_tier in self.histograms.items()
            },
            "divergences": {tier: d.as_dict() for tier, d in self.divergences.items()},
        }


def validate(
    model: Model,
    oracle: Tier,
    tiers: Mapping[str, Tier],
    workload: Workload,
    layers: Sequence[int] | None = None,
    trace_bytes: int = TRACE_BYTES,
    progress: Progress = SILENT,
) -> ValidationReport:
    """Compare ``tiers`` with ``oracle`` at every result of ``layers`` (None: all of them).

    Each tier runs twice: once with intermediate values kept, comparing every op, and once as in
    production, comparing outputs and states. Layers whose values do not fit in ``trace_bytes``
    together are traced in several runs. ``progress`` counts the steps of each run."""
    comparison = _Comparison(model, oracle, tiers, workload, progress)
    chosen = tuple(sorted(comparison.residuals if layers is None else set(layers)))
    groups = layer_groups(comparison.graph, chosen, workload.limits.largest, trace_bytes)
    for number, group in enumerate(groups):
        comparison.trace(group, remember=number == 0)
    comparison.run_untraced()
    complete = set(chosen) == set(comparison.residuals)
    return ValidationReport(
        tiers=tuple(tiers),
        layers=chosen,
        steps=len(workload.steps()),
        results=comparison.results,
        histograms=comparison.histograms,
        divergences={
            name: comparison.explained(found, complete)
            for name, found in comparison.divergences.items()
        },
    )


@dataclass(slots=True)
class _Comparison:
    """The state of one validation. ``expected`` holds the oracle's outputs and states by step."""

    model: Model
    oracle: Tier
    tiers: Mapping[str, Tier]
    workload: Workload
    progress: Progress
    graph: Graph = field(init=False)
    residuals: Mapping[int, Site] = field(init=False)
    histograms: dict[int, dict[str, ValueHistogram]] = field(default_factory=dict)
    divergences: dict[str, Divergence] = field(default_factory=dict)
    expected: list[dict[Site, Array]] = field(default_factory=list)
    results: int = 0

    def __post_init__(self) -> None:
        self.graph = self.model.graph(self.workload.limits)
        self.residuals = residual_sites(self.graph)

    def trace(self, layers: frozenset[int | None], remember: bool) -> None:
        """Run the oracle and the tiers step by step, with the values of ``layers`` kept."""
        names = scratch_of(self.graph, layers)
        traced = TracedModel(self.model.file, self.model.config, names)
        persistent = {b.name for b in self.graph.of_kind(*PERSISTENT)} if remember else set()
        sites = [s for s in result_sites(self.graph) if s.view.buffer in names | persistent]
        for layer in sorted(layer for layer in layers if layer is not None):
            self.histograms[layer] = {n: ValueHistogram() for n in (DEFINITIONS, *self.tiers)}
        with ExitStack() as stack:
            runners = {
                name: stack.enter_context(self._runner(traced, tier))
                for name, tier in {DEFINITIONS: self.oracle, **self.tiers}.items()
            }
            for step, start, count in self._steps("definitions and tiers"):
                key = ShapeKey(count, 1)
                for runner in runners.values():
                    runner.step(self.workload.input(start, count))
                self._compare(runners, sites, step, key)
                self._histogram(runners, layers, key)
                if remember:
                    self._remember(runners[DEFINITIONS], key)

    def run_untraced(self) -> None:
        """Run every tier as in production and compare the outputs and states of every step."""
        untraced = TracedModel(self.model.file, self.model.config, frozenset())
        for name, tier in self.tiers.items():
            if name in self.divergences:
                continue
            with self._runner(untraced, tier) as runner:
                for step, start, count in self._steps(f"{name} as in production"):
                    key = ShapeKey(count, 1)
                    runner.step(self.workload.input(start, count))
                    for site, values in self.expected[step].items():
                        got = observe(runner, site.view, key)
                        self._check(name, site, step, key, values, got, UNOBSERVED)

    def _steps(self, label: str) -> Iterator[tuple[int, int, int]]:
        """Number, first position and tokens of every step, whose progress is shown."""
        steps = self.workload.steps()
        self.progress.start(label, len(steps), "step")
        try:
            for step, (start, count) in enumerate(steps):
                yield step, start, count
                self.progress.advance(1)
        finally:
            self.progress.close()

    def explained(self, found: Divergence, complete: bool) -> Divergence:
        """``found``, with a note when ops before it were not compared."""
        return found if complete or found.note else replace(found, note=DOWNSTREAM)

    def _runner(self, model: Model, tier: Tier) -> ModelRunner:
        return ModelRunner(model, tier, self.workload.limits)

    def _compare(
        self, runners: Mapping[str, ModelRunner], sites: Sequence[Site], step: int, key: ShapeKey
    ) -> None:
        for site in sites:
            expected = observe(runners[DEFINITIONS], site.view, key)
            for name in self.tiers:
                got = observe(runners[name], site.view, key)
                self._check(name, site, step, key, expected, got, "")
        self.results += len(sites)

    def _check(
        self,
        name: str,
        site: Site,
        step: int,
        key: ShapeKey,
        expected: Array,
        got: Array,
        note: str,
    ) -> None:
        known = self.divergences.get(name)
        if known is not None and known.order <= (step, site.node):
            return
        found = find_divergence(name, self.graph, site, step, key, expected, got, note)
        if found is not None:
            self.divergences[name] = found

    def _histogram(
        self, runners: Mapping[str, ModelRunner], layers: frozenset[int | None], key: ShapeKey
    ) -> None:
        for layer in layers:
            if layer is not None:
                for name, runner in runners.items():
                    values = observe(runner, self.residuals[layer].view, key)
                    self.histograms[layer][name].add(values)

    def _remember(self, oracle: ModelRunner, key: ShapeKey) -> None:
        self.expected.append(
            {
                site: observe(oracle, site.view, key).copy()
                for site in result_sites(self.graph)
                if self.graph.buffers[site.view.buffer].kind in PERSISTENT
            }
        )
