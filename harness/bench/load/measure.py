"""Measures everything ``--server`` reports, as plain JSON types, and compares it with targets."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from harness.bench.engines import PEER, peer_version
from harness.bench.load.clients import RequestOutcome, ServerTarget, run_load
from harness.bench.load.overhead import STREAMS, Readers, engine_rate, http_seconds, server_here
from harness.bench.load.plan import LoadPlan, draw_load
from harness.bench.load.servers import ServerSetup, Started, own_server, peer_server, reached
from harness.bench.machine import machine_facts
from harness.bench.measure import Samples, Say, in_turn, ratio
from harness.bench.targets import Target
from harness.client import ServerClient

PERCENTILES = (50, 99)


def jain_index(shares: Sequence[float]) -> float:
    """Jain's fairness index (sum x)^2 / (n sum x^2): 1 for equal shares, 1 / n when one gets
    everything. R. Jain, D. Chiu and W. Hawe, A Quantitative Measure of Fairness, 1984."""
    values = np.asarray(shares, np.float64)
    squares = float((values**2).sum())
    return 1.0 if squares == 0 else float(values.sum()) ** 2 / (len(values) * squares)


def load_figures(answers: Sequence[RequestOutcome]) -> dict[str, float]:
    """The figures of one run, in seconds and tokens per second.

    ``rate``: generated tokens over the time from the first request to the last answer. ``first_*``:
    from when a request was due until its first text. ``interval_*``: between pieces of text of one
    answer. ``fairness``: Jain's index of the tenants' tokens per second of waiting, or the
    requests' with one tenant. Percentiles are present if any text arrived."""
    completed = [answer for answer in answers if answer.error is None]
    found = {
        "requests": float(len(answers)),
        "errors": float(len(answers) - len(completed)),
        "tokens": float(sum(answer.tokens for answer in completed)),
        "prompt_tokens": float(sum(answer.prompt_tokens for answer in completed)),
    }
    if not completed:
        return found
    seconds = max(answer.ended for answer in completed) - min(answer.due for answer in answers)
    found["seconds"] = seconds
    found["rate"] = found["tokens"] / seconds
    first = [answer.texts[0] - answer.due for answer in completed if answer.texts]
    between = [after - before for one in completed for before, after in pairwise(one.texts)]
    for name, values in (("first", first), ("interval", between)):
        if values:
            for percent, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True):
                found[f"{name}_p{percent}"] = float(value)
    found["fairness"] = jain_index(_rates(completed))
    return found


def error_counts(answers: Sequence[RequestOutcome]) -> dict[str, int]:
    """The number of failed requests by reason."""
    return dict(Counter(answer.error for answer in answers if answer.error is not None))


def _rates(answers: Sequence[RequestOutcome]) -> list[float]:
    """Tokens per second of waiting, by tenant; by request if there is one tenant."""
    tokens: defaultdict[int, float] = defaultdict(float)
    waited: defaultdict[int, float] = defaultdict(float)
    alone = len({answer.request.tenant for answer in answers}) == 1
    for answer in answers:
        who = answer.request.number if alone else answer.request.tenant
        tokens[who] += answer.tokens
        waited[who] += answer.ended - answer.due
    return [tokens[who] / waited[who] for who in tokens if waited[who] > 0]


OURS = "zinc-rt"
WARM_UP = LoadPlan(requests=4, clients=2, seed=1 << 20)
"""A first load that is not counted: it builds kernels and fills caches."""


TARGETS = (
    Target("rate", 1.3, least=True, of_peer=True, clients=8),
    Target("first_p99", 1.0, least=False, of_peer=True, clients=8),
    Target("http_1", 0.95, least=True),
    Target("http_16", 0.90, least=True),
    Target("ready_seconds", 3.0, least=False),
)
"""What this server should reach. ``http_N`` is the rate of N streams over HTTP divided by the
engine's rate without it."""


@dataclass(frozen=True, slots=True)
class ServerBench:
    """A measurement: a ``load``, ``repeat`` times, on the server at ``url``, or on one of this
    project started from ``setup``; with ``peer`` also on the peer's server, in turn; with
    ``overhead`` the cost of HTTP."""

    load: LoadPlan
    setup: ServerSetup | None
    url: str | None = None
    keys: tuple[str, ...] = ()
    peer: bool = False
    overhead: bool = False
    repeat: int = 3


def run_server_bench(bench: ServerBench, say: Say = lambda text: None) -> dict[str, Any]:
    """Measure everything; ``say`` receives lines about progress. Raises ServerError for a server
    that does not answer, ExecutionError for one that does not start."""
    samples: dict[str, Samples] = {OURS: Samples()}
    errors: dict[str, dict[str, int]] = {}
    facts: dict[str, Any] = {}
    if bench.overhead and bench.setup is not None:
        _measure_overhead(bench.setup, 2 * bench.repeat + 1, samples[OURS], say)
    with ExitStack() as stack:
        targets = _open_servers(bench, stack, samples, say)
        for name, target in targets.items():
            facts[name] = _model_facts(target)
            run_load(target, WARM_UP, draw_load(WARM_UP))
        for repetition in range(bench.repeat):
            load = draw_load(bench.load, repetition)
            for name in in_turn(list(targets), repetition):
                say(f"{name}, load {repetition + 1} of {bench.repeat}")
                answers = run_load(targets[name], bench.load, load)
                for metric, value in load_figures(answers).items():
                    samples[name].add(metric, value)
                for why, count in error_counts(answers).items():
                    errors.setdefault(name, {}).setdefault(why, 0)
                    errors[name][why] += count
    report: dict[str, Any] = {
        "machine": machine_facts(),
        "load": asdict(bench.load),
        "repeat": bench.repeat,
        "servers": facts,
        "peer": peer_version() if bench.peer else None,
        "engines": {name: found.summaries() for name, found in samples.items()},
        "errors": errors,
        "ratios": _ratios(samples),
    }
    report["targets"] = target_verdicts(report)
    return report


def target_verdicts(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every target with a measured value, and whether it is met."""
    verdicts = []
    for target in TARGETS:
        found = report["ratios"] if target.of_peer else report["engines"][OURS]
        fits = target.clients in (None, report["load"]["clients"])
        if target.metric not in found or not fits or (target.clients and report["load"]["rate"]):
            continue
        verdicts.append(target.verdict(found[target.metric]["median"]))
    return verdicts


def _open_servers(
    bench: ServerBench, stack: ExitStack, samples: dict[str, Samples], say: Say
) -> dict[str, ServerTarget]:
    """Open the servers; the start times of those started here are added to ``samples``."""
    targets = {}
    if bench.url is not None:
        targets[OURS] = reached(bench.url, bench.keys)
    else:
        assert bench.setup is not None
        say("starting the server")
        for _ in range(bench.repeat - 1):
            with own_server(bench.setup) as started:
                _add_ready(samples[OURS], started)
        started = stack.enter_context(own_server(bench.setup))
        _add_ready(samples[OURS], started)
        targets[OURS] = started.target
    if bench.peer:
        assert bench.setup is not None
        say(f"starting {PEER}'s server")
        started = stack.enter_context(peer_server(bench.setup))
        samples[PEER] = Samples()
        _add_ready(samples[PEER], started)
        targets[PEER] = started.target
    return targets


def _add_ready(found: Samples, started: Started) -> None:
    found.add("ready_seconds", started.ready_seconds)
    found.add("ready_processor_seconds", started.processor_seconds)


def _measure_overhead(setup: ServerSetup, pairs: int, found: Samples, say: Say) -> None:
    """Measure rate and processor time of the engine with HTTP over those without it.

    Both run in one process, in turn, ``pairs`` times, since the difference is small compared with a
    machine's noise. Other processes that take processor time change the rates more than the times.
    """
    with server_here(setup) as server, Readers(server.url) as readers:
        measures: dict[str, Callable[[int], float]] = {
            "engine": partial(engine_rate, server),
            "http": readers.rate,
        }
        for streams in STREAMS:
            for measure in measures.values():
                measure(streams)  # the first run is slow
            for repetition in range(pairs):
                say(f"with and without HTTP, {streams} streams, {repetition + 1} of {pairs}")
                rates, times = {}, {}
                for name in in_turn([*measures], repetition):
                    process_before, http_before = time.process_time(), http_seconds()
                    rates[name] = measures[name](streams)
                    times[name] = time.process_time() - process_before
                    found.add(f"{name}_rate_{streams}", rates[name])
                    if name == "http":
                        share = (http_seconds() - http_before) / times[name]
                        found.add(f"http_share_{streams}", share)
                found.add(f"http_{streams}", rates["http"] / rates["engine"])
                found.add(f"http_time_{streams}", times["http"] / times["engine"])


def _model_facts(target: ServerTarget) -> dict[str, Any]:
    """The server's description of its model."""
    models = ServerClient(target.url, target.keys[0]).get("/v1/models")["data"]
    described: Mapping[str, Any] = next(one for one in models if one["id"] == target.model)
    return {"model": target.model, **described.get("x_zinc", {})}


def _ratios(samples: Mapping[str, Samples]) -> dict[str, Any]:
    """This server's figures over the peer's in the same repetition."""
    if PEER not in samples:
        return {}
    ours, theirs = samples[OURS].values, samples[PEER].values
    return {
        metric: ratio(ours[metric], theirs[metric])
        for metric in ("rate", "first_p50", "first_p99", "interval_p50", "interval_p99")
        if metric in ours and metric in theirs and len(ours[metric]) == len(theirs[metric])
    }
