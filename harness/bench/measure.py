"""Interleaved measurements of several engines, their medians, spreads and ratios."""

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from contract.dtypes import BY_NAME, DEFAULT_KV
from contract.errors import RequestError
from contract.ir.cost import graph_cost
from contract.shape_key import ShapeKey
from harness.bench.engines import PEER, Setup, peer_flash_choices, peer_version
from harness.bench.machine import busy_processes, machine_facts, stream_bandwidth
from harness.bench.worker import Worker
from reference.limits import Limits, pages_for
from reference.model.gguf.file import open_gguf
from reference.model.gguf.writer import write_gguf
from reference.model.open import open_model

FIRST_PROMPT = "Why is the sky blue?"
SHORT_TOKENS = 5
VOCABULARY_TOKENS = 262_144
VOCABULARY_MERGES = 514_906
"""Merges of the largest published vocabulary."""
PEER_TRIALS = 2
"""Runs of each configuration of the peer, in turn; the best run counts."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BenchmarkPlan:
    """The settings of a benchmark. ``engines`` are names for ``open_engine``; llama.cpp, if
    measured, is the last.

    ``beside`` is the number of other processes that keep a core busy meanwhile. With ``peer_gpu``,
    llama.cpp runs on a graphics card."""

    model: Path
    engines: tuple[str, ...]
    threads: int
    kv_dtype: str = DEFAULT_KV.name
    prompt_tokens: int = 512
    decode_tokens: int = 64
    repeat: int = 5
    beside: int = 0
    peer_gpu: bool = False
    device: str = ""

    @property
    def context(self) -> int:
        """The number of positions that the longest measurement needs."""
        return max(SHORT_TOKENS, self.prompt_tokens) + self.decode_tokens + 1

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that a report names."""
        names = ("threads", "kv_dtype", "prompt_tokens", "decode_tokens", "repeat", "beside")
        return {name: getattr(self, name) for name in names}

    @property
    def setup(self) -> Setup:
        """The settings with which engines are opened."""
        model = str(self.model.resolve())
        gpu, device = self.peer_gpu, self.device
        return Setup(model, self.threads, self.context, self.kv_dtype, peer_gpu=gpu, device=device)

    @property
    def peer_sequences(self) -> int:
        """Sequences that the peer decodes together."""
        return 1

    @property
    def peer_setups(self) -> list[Setup]:
        """The settings of each configuration of the peer, none if it takes no part."""
        if PEER not in self.engines:
            return []
        setup = replace(self.setup, sequences=self.peer_sequences)
        flash = peer_flash_choices(self.kv_dtype)
        return [replace(setup, flash_attention=choice) for choice in flash]


@dataclass(slots=True)
class Samples:
    """Measured values of one engine, one per repetition."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)

    def summaries(self) -> dict[str, Any]:
        """The summary of each metric."""
        return {metric: summary(values) for metric, values in self.values.items()}


def summary(values: Sequence[float]) -> dict[str, Any]:
    """The median and spread of repeated measurements."""
    return {
        "median": statistics.median(values),
        "minimum": min(values),
        "maximum": max(values),
        "samples": list(values),
    }


def ratio(values: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    """The summary of quotients of values measured in the same repetition."""
    return summary([a / b for a, b in zip(values, others, strict=True)])


def run_benchmark(plan: BenchmarkPlan, say: Say = lambda text: None) -> dict[str, Any]:
    """Everything the command reports, as plain JSON types. ``say`` receives lines about progress.
    Raises RequestError when the model's context is too short, ExecutionError for an engine that
    fails."""
    vocab, bytes_per_token, file_bytes = _model_facts(plan)
    samples = {name: Samples() for name in plan.engines}
    prompt = np.random.default_rng(0).integers(0, vocab, max(SHORT_TOKENS, plan.prompt_tokens))
    with busy_processes(plan.beside):
        setups = dict.fromkeys(plan.engines, plan.setup)
        peer = None
        with tempfile.TemporaryDirectory() as caches:
            for name in plan.engines:
                # The last one. A tier that cannot be opened was said by then.
                if name == PEER:
                    say(f"trying {PEER} with and without flash attention")
                    setups[PEER], peer = _best_of_peer(plan, prompt.tolist())
                say(f"first-ever start of {name}")
                taken = _start_seconds(name, setups, caches)
                samples[name].add("cold_start_seconds", taken)
            # Before the other starts, because all engines may have no room together.
            bandwidth = _measure_rates(plan, setups, prompt.tolist(), samples, say)
            for repetition in range(plan.repeat):
                say(f"start to first token, {repetition + 1} of {plan.repeat}")
                for name in in_turn(plan.engines, repetition):
                    taken = _start_seconds(name, setups, caches)
                    samples[name].add("first_token_seconds", taken)
    say("opening a large vocabulary")
    report = {
        "machine": machine_facts(),
        "model": {"file": plan.model.name, "bytes": file_bytes, "vocab": vocab},
        "settings": plan.settings,
        "peer": peer,
        "stream_bytes_per_second": summary(bandwidth),
        "bytes_per_token": bytes_per_token,
        "vocabulary_open_seconds": summary(vocabulary_open_seconds(plan.repeat)),
        "engines": {name: found.summaries() for name, found in samples.items()},
        "ratios": _ratios(samples),
    }
    report["roofline"] = _roofline(report)
    return report


def vocabulary_open_seconds(repeat: int, tokens: int = VOCABULARY_TOKENS) -> list[float]:
    """Seconds to open a file with a vocabulary of ``tokens``, measured ``repeat`` times."""
    metadata: dict[str, Any] = {
        "tokenizer.ggml.tokens": [b"token%d" % i for i in range(tokens)],
        "tokenizer.ggml.scores": np.zeros(tokens, np.float32),
        "tokenizer.ggml.token_type": np.ones(tokens, np.int32),
        "tokenizer.ggml.merges": [b"mer ge%d" % i for i in range(VOCABULARY_MERGES)],
    }
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        write_gguf(path, metadata, {})
        for _ in range(repeat):
            started = time.perf_counter()
            open_gguf(path).close()
            seconds.append(time.perf_counter() - started)
    return seconds


def _model_facts(plan: BenchmarkPlan) -> tuple[int, Mapping[str, int], int]:
    """The vocabulary size, the bytes a decode step moves by label, and the size of the file."""
    model = open_model(plan.model)
    try:
        if plan.context > model.config.context:
            raise RequestError(
                "prompt_tokens",
                f"{plan.context} positions are needed, the model has {model.config.context}",
            )
        limits = Limits(1, plan.context, pages_for(plan.context), BY_NAME[plan.kv_dtype])
        graph = model.graph(limits)
        moved = {
            label: graph_cost(graph, ShapeKey(1, 1), context).bytes_moved
            for label, context in _contexts(plan).items()
        }
        return model.config.vocab, moved, model.file.size
    finally:
        model.close()


def _contexts(plan: BenchmarkPlan) -> dict[str, int]:
    """The mean context of the two decode measurements."""
    half = plan.decode_tokens // 2
    return {"decode_short": SHORT_TOKENS + half, "decode_long": plan.prompt_tokens + half}


def in_turn(engines: Sequence[str], repetition: int) -> Sequence[str]:
    """The engines' order, reversed in every other repetition, so none always runs on a warmer
    machine."""
    return engines if repetition % 2 == 0 else engines[::-1]


def _best_of_peer(plan: BenchmarkPlan, prompt: Sequence[int]) -> tuple[Setup, dict[str, Any]]:
    """The peer's faster configuration for this model on this machine, and facts about it."""
    setups = plan.peer_setups
    seconds = dict.fromkeys(setups, float("inf"))
    with ExitStack() as stack:
        workers = {
            setup: stack.enter_context(Worker(PEER, setup, FIRST_PROMPT)) for setup in setups
        }
        for _ in range(PEER_TRIALS):
            for setup, worker in workers.items():
                taken = worker.generate(prompt[: plan.prompt_tokens], plan.decode_tokens)
                in_all = taken.prefill_seconds + taken.decode_seconds
                seconds[setup] = min(seconds[setup], in_all)
    best = min(setups, key=seconds.__getitem__)
    tried = {flash_name(setup.flash_attention): found for setup, found in seconds.items()}
    return best, {
        "version": peer_version(),
        "flash_attention": best.flash_attention,
        "gpu": best.peer_gpu,
        "tried_seconds": tried,
    }


def flash_name(flash_attention: bool) -> str:
    """The name of a configuration of the peer."""
    return "with flash attention" if flash_attention else "without flash attention"


def _start_seconds(name: str, setups: Mapping[str, Setup], caches: str) -> float:
    """Seconds from the start of an engine's process to its first token. Its caches are in a folder
    of ``caches``, which its first start finds empty."""
    folder = Path(caches) / name.replace(":", "-")
    folder.mkdir(exist_ok=True)
    with Worker(name, setups[name], FIRST_PROMPT, folder) as worker:
        return worker.first_token_seconds


def _measure_rates(
    plan: BenchmarkPlan,
    setups: Mapping[str, Setup],
    prompt: Sequence[int],
    samples: Mapping[str, Samples],
    say: Say,
) -> list[float]:
    """Measure the rates and the memory of all engines, which take turns and so are open at the same
    time. Returns the memory bandwidth measured before each repetition."""
    bandwidth: list[float] = []
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(Worker(name, setups[name], FIRST_PROMPT))
            for name in plan.engines
        }
        for worker in workers.values():
            worker.generate(prompt[: plan.prompt_tokens], 1)
        for repetition in range(plan.repeat):
            say(f"repetition {repetition + 1} of {plan.repeat}")
            bandwidth.append(stream_bandwidth(plan.threads))
            for name in in_turn(plan.engines, repetition):
                _measure_once(plan, workers[name], prompt, samples[name])
        for name, worker in workers.items():
            samples[name].add("peak_resident_bytes", worker.peak_resident_bytes())
    return bandwidth


def _measure_once(
    plan: BenchmarkPlan, worker: Worker, prompt: Sequence[int], found: Samples
) -> None:
    short = worker.generate(prompt[:SHORT_TOKENS], plan.decode_tokens)
    found.add("decode_short", plan.decode_tokens / short.decode_seconds)
    long = worker.generate(prompt[: plan.prompt_tokens], plan.decode_tokens)
    found.add("prefill", plan.prompt_tokens / long.prefill_seconds)
    found.add("decode_long", plan.decode_tokens / long.decode_seconds)


def _ratios(samples: Mapping[str, Samples]) -> dict[str, dict[str, Any]]:
    """The ratio of every tier to the peer in each repetition."""
    if PEER not in samples:
        return {}
    peer = samples[PEER].values
    return {
        name: {metric: ratio(values, peer[metric]) for metric, values in found.values.items()}
        for name, found in samples.items()
        if name != PEER
    }


def _roofline(report: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The decode rate as a share of the rate at which memory could stream a step's bytes."""
    stream = report["stream_bytes_per_second"]["median"]
    return {
        name: {
            label: metrics[label]["median"] * nbytes / stream
            for label, nbytes in report["bytes_per_token"].items()
        }
        for name, metrics in report["engines"].items()
    }
