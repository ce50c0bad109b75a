"""Prometheus metrics, with vLLM's names after ``zinc_rt:``, so that vLLM's dashboards need one
replacement."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from contract.types import QosClass, Tenant
from harness.host.memory_state import MemoryState
from harness.host.stream_driver import SharedDriver
from harness.host.submissions import EngineStopped
from harness.serve.generation import Generation
from reference.engine import Engine, EngineStatistics
from reference.memory.disk.statistics import DiskStatistics
from reference.sched.tenants import Usage

if TYPE_CHECKING:
    from harness.serve.model import ServedModel

Source = TypeVar("Source")
NAMESPACE = "zinc_rt:"
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
STEP_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0),
)
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
WHO = ("tenant", "qos")
CLASSES = {qos: qos.value for qos in QosClass}
"""The classes' names, which the library looks for by two calls."""


class Metrics:
    """The metrics of one server."""

    def __init__(self, model: ServedModel) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._engine = _EngineGauges()
        self._engine.follow(model)
        self._registry.register(self._engine)
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of ended requests.", WHO)
        self._generated = self._counter(
            "generation_tokens", "Tokens of answers, as they come.", WHO
        )
        self._success = self._counter(
            "request_success", "Choices that ended.", (*WHO, "finished_reason")
        )
        self._rejected = self._counter("rejections", "Requests refused.", ("reason",))
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to admission.")
        self._prefill = self._histogram("request_prefill_time_seconds", "Admission to first token.")
        self._decode = self._histogram("request_decode_time_seconds", "First token to last.")
        self._first = self._histogram("time_to_first_token_seconds", "Arrival to first token.")
        self._between = self._histogram("inter_token_latency_seconds", "Between two tokens.")
        self._whole = self._histogram("e2e_request_latency_seconds", "Arrival to last token.")
        self._step = self._histogram("engine_step_seconds", "What a step took.", STEP_SECONDS)
        self._tokens = self._histogram("iteration_tokens_total", "Tokens of a step.", STEP_TOKENS)
        model.driver.listen(self)

    def follow(self, model: ServedModel) -> None:
        """Add the gauges and counters of a loaded model."""
        self._engine.follow(model)
        model.driver.listen(self)

    def leave(self, driver: SharedDriver) -> None:
        """Remove the gauges and counters of an unloaded model."""
        self._engine.leave(driver)

    def stepped(self, seconds: float, tokens: int) -> None:
        """A step was computed."""
        self._step.observe(seconds)
        self._tokens.observe(tokens)

    def count_generated(self, tenant: Tenant) -> Callable[[int], None]:
        """A function that adds a number of generated tokens of a tenant."""
        return self._generated(tenant.name, CLASSES[tenant.qos]).inc

    def ended(self, generation: Generation, tenant: Tenant) -> None:
        """Count a generation that ended, for whatever reason. Times are counted for choices with a
        first token."""
        who = (tenant.name, CLASSES[tenant.qos])
        self._prompt(*who).inc(generation.prompt_tokens)
        for choice in generation.choices:
            self._success(*who, choice.finish or "cancelled").inc()
            facts, first, latest = generation.facts_of(choice), choice.first, choice.latest
            if facts.admitted is None or first is None or latest is None:
                continue
            self._queue.observe(facts.admitted - facts.submitted)
            self._prefill.observe(first - facts.admitted)
            self._decode.observe(latest - first)
            self._first.observe(first - generation.began)
            self._whole.observe(latest - generation.began)
            if choice.intervals:
                self._between.observe(*choice.intervals)

    def embedded(self, tenant: Tenant, tokens: int, reason: str) -> None:
        """Count a request that reads texts of ``tokens`` tokens and ended for ``reason``."""
        who = (tenant.name, tenant.qos.value)
        self._prompt(*who).inc(tokens)
        self._success(*who, reason).inc()

    def rejected(self, reason: str) -> None:
        """Count a refused request; ``reason`` is the code of its error."""
        self._rejected(reason).inc()

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, labels: Sequence[str]) -> Callable[..., Counter]:
        """A function from label values to their counter."""
        counters = Counters(NAMESPACE + name, text, labels)
        self._registry.register(counters)
        return counters.of

    def _histogram(self, name: str, text: str, bounds: Sequence[float] = SECONDS) -> Histogram:
        histogram = Histogram(NAMESPACE + name, text, bounds)
        self._registry.register(histogram)
        return histogram


TENANT_GAUGES = {
    "slots": "Slots a tenant's requests hold.",
    "pages": "KV pages a tenant's requests hold.",
    "live": "Requests of a tenant that wait or run.",
    "decode_tokens_per_s": "Tokens generated for a tenant, a second, over the last five.",
    "prefill_tokens_per_s": "Prompt tokens computed for a tenant, a second, over the last five.",
}
"""The metrics of every tenant, by the field of its usage."""


ANSWER_SECONDS = 1.0
"""How long to wait for an engine, whose step may be long."""


class _Usages:
    """What tenants use now; while the engine does not answer, what they used when it last did;
    nothing after the engines have ended. All engines share the tenants."""

    def __init__(self) -> None:
        self._known: list[tuple[Tenant, Usage]] = []
        self._asking = threading.Thread()

    def latest(self, driver: SharedDriver) -> list[tuple[Tenant, Usage]]:
        """The usage that is known after a short wait."""
        asking = self._asking
        if not asking.is_alive():
            asking = threading.Thread(target=self._ask, args=(driver,), name="usage", daemon=True)
            try:
                asking.start()
            except RuntimeError:  # The system refuses threads.
                return self._known
            self._asking = asking
        asking.join(ANSWER_SECONDS)
        return self._known

    def _ask(self, driver: SharedDriver) -> None:
        try:
            self._known = driver.call(_usages)
        except EngineStopped:
            if driver.silence is None:
                self._known = []


def _usages(engine: Engine) -> list[tuple[Tenant, Usage]]:
    return [(tenant, engine.tenants.usage(tenant.id)) for tenant in engine.tenants]


OF_MODEL = ("model_name",)
DRIVER_GAUGES: tuple[tuple[str, str, Callable[[SharedDriver], float]], ...] = (
    (
        "engine_answers",
        "1, or 0 for an engine that has ended or hangs: the rest of it is what was known last.",
        lambda driver: driver.failure is None and driver.silence is None,
    ),
)
GAUGES: tuple[tuple[str, str, Callable[[EngineStatistics], float]], ...] = (
    ("num_requests_running", "Requests that have a slot.", lambda now: now.running),
    ("num_requests_waiting", "Requests that wait.", lambda now: now.waiting),
    (
        "kv_cache_usage_perc",
        "Part of the KV pages in use, 1 is all.",
        lambda now: _used(now) / now.pages,
    ),
)
COUNTERS: tuple[tuple[str, str, Callable[[EngineStatistics], float]], ...] = (
    ("prefix_cache_queries", "Prompt tokens looked up.", lambda now: now.prefix.tokens_asked),
    ("prefix_cache_hits", "Prompt tokens found.", lambda now: now.prefix.tokens_hit),
    ("preemptions", "Requests that lost their slot.", lambda now: now.preempted),
    ("engine_steps", "Steps of the engine.", lambda now: now.steps),
)
"""The metrics of the engine of every model, each with its text and its value."""
DISK_COUNTERS: tuple[tuple[str, str, Callable[[DiskStatistics], float]], ...] = (
    ("disk_cache_hits", "Prompt tokens that came from disk.", lambda disk: disk.tokens),
    ("disk_cache_read_bytes", "Bytes read from disk.", lambda disk: disk.read_bytes),
    ("disk_cache_written_bytes", "Bytes written to disk.", lambda disk: disk.written_bytes),
    ("disk_cache_dropped", "Pages and states not written.", lambda disk: disk.dropped),
    ("disk_cache_ignored", "Files that were not valid.", lambda disk: disk.ignored),
)
"""The metrics of every model with a disk cache."""
MEMORY_GAUGES: tuple[tuple[str, str, Callable[[MemoryState], int]], ...] = (
    (
        "memory_given_back_bytes",
        "Device memory that the model does without, since other programs need it.",
        lambda memory: memory.given_back,
    ),
)
MEMORY_COUNTERS: tuple[tuple[str, str, Callable[[MemoryState], int]], ...] = (
    (
        "memory_changes",
        "How often device memory was given back or taken again.",
        lambda memory: memory.changes,
    ),
)
"""The metrics of every model on a device with memory of its own."""


def _used(now: EngineStatistics) -> int:
    return now.pages - now.free_pages - now.cached_pages


def _families(
    family: type[GaugeMetricFamily | CounterMetricFamily],
    metrics: Iterable[tuple[str, str, Callable[[Source], float]]],
    sources: Sequence[tuple[str, Source]],
) -> Iterator[Metric]:
    """``metrics`` of every model in ``sources``; none without sources."""
    for name, text, value in metrics if sources else ():
        metric = family(NAMESPACE + name, text, labels=OF_MODEL)
        for model, source in sources:
            metric.add_metric((model,), value(source))
        yield metric


class _EngineGauges(Collector):
    """Gauges of the engines, from the latest statistics of their drivers."""

    def __init__(self) -> None:
        self._models: tuple[ServedModel, ...] = ()
        self._usages = _Usages()

    def follow(self, model: ServedModel) -> None:
        """Add the gauges of one more model."""
        self._models = (*self._models, model)

    def leave(self, driver: SharedDriver) -> None:
        """Remove the gauges of a driver."""
        self._models = tuple(one for one in self._models if one.driver is not driver)

    def collect(self) -> Iterable[Metric]:
        now = [(model.name, model.driver.statistics) for model in self._models]
        states = [(model.name, model.driver.memory_state) for model in self._models]
        memories = [(model, state) for model, state in states if state is not None]
        disks = [(model, here.disk) for model, here in now if here.disk is not None]
        drivers = [(model.name, model.driver) for model in self._models]
        yield from _families(GaugeMetricFamily, DRIVER_GAUGES, drivers)
        yield from _families(GaugeMetricFamily, GAUGES, now)
        pages = GaugeMetricFamily(
            NAMESPACE + "kv_pages", "KV pages by state.", labels=(*OF_MODEL, "state")
        )
        for model, here in now:
            pages.add_metric((model, "used"), _used(here))
            pages.add_metric((model, "cached"), here.cached_pages)
            pages.add_metric((model, "free"), here.free_pages)
        yield pages
        taken = GaugeMetricFamily(
            NAMESPACE + "memory_bytes",
            "What a model takes in memory of each of its devices by part, and its budget.",
            labels=(*OF_MODEL, "part"),
        )
        where = GaugeMetricFamily(
            NAMESPACE + "model_device",
            "1 for the tier of a model and its device, or all its devices.",
            labels=(*OF_MODEL, "tier", "device"),
        )
        for one in self._models:
            for part, nbytes in one.memory().items():
                taken.add_metric((one.name, part.removesuffix("_bytes")), nbytes)
            where.add_metric((one.name, one.tier, one.device), 1)
        yield from (taken, where)
        yield from _families(CounterMetricFamily, COUNTERS, now)
        yield from _families(GaugeMetricFamily, MEMORY_GAUGES, memories)
        yield from _families(CounterMetricFamily, MEMORY_COUNTERS, memories)
        yield from _families(CounterMetricFamily, DISK_COUNTERS, disks)
        yield from self._of_tenants()

    def _of_tenants(self) -> Iterable[Metric]:
        """The usage of every tenant."""
        families = {
            part: GaugeMetricFamily(f"{NAMESPACE}tenant_{part}", text, labels=WHO)
            for part, text in TENANT_GAUGES.items()
        }
        for tenant, usage in self._usages.latest(self._models[0].driver):
            for part, family in families.items():
                family.add_metric((tenant.name, tenant.qos.value), getattr(usage, part))
        return families.values()


class Counter:
    """A number that grows. Cheaper than Prometheus's own: every token is counted."""

    def __init__(self) -> None:
        self.created = time.time()
        self.value = 0.0
        self._lock = threading.Lock()

    def inc(self, amount: float = 1.0) -> None:
        """Add ``amount``."""
        with self._lock:
            self.value += amount


class Counters(Collector):
    """Counters by the values of their ``labels``."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._counters: dict[tuple[str, ...], Counter] = {}

    def of(self, *values: str) -> Counter:
        """The counter of label values."""
        known = self._counters.get(values)
        return self._counters.setdefault(values, Counter()) if known is None else known

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, counter in self._counters.copy().items():
            family.add_metric(values, counter.value, created=counter.created)
        yield family


AT_ONCE = 1024
"""Values in a batch."""


class Histogram(Collector):
    """A histogram with upper ``bounds``. Cheaper than Prometheus's own: every step and token is
    counted."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = np.array([*bounds, float("inf")])
        self._lock = threading.Lock()
        self._counts = np.zeros(len(self._bounds), np.int64)
        self._sum = 0.0
        self._pending: list[float] = []

    def observe(self, *values: float) -> None:
        """Add values. They are counted in batches."""
        self._pending.extend(values)
        if len(self._pending) >= AT_ONCE:
            self._count()

    def collect(self) -> Iterable[Metric]:
        self._count()
        with self._lock:
            counts, total = np.cumsum(self._counts).tolist(), self._sum
        names = map(floatToGoString, self._bounds.tolist())
        buckets = list(zip(names, counts, strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=total)

    def _count(self) -> None:
        with self._lock:
            # Other threads only append meanwhile.
            values = self._pending[:]
            del self._pending[: len(values)]
            counts = np.bincount(np.searchsorted(self._bounds, values), minlength=len(self._bounds))
            self._counts += counts
            self._sum = sum(values, self._sum)
