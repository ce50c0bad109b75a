"""Measures everything ``--serve`` reports, as plain JSON types, and compares it with targets."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from contract.errors import RequestError
from harness.bench.engines import PEER, peer_version
from harness.bench.machine import busy_processes, machine_facts
from harness.bench.measure import FIRST_PROMPT, Samples, Say, flash_name, in_turn, ratio, summary
from harness.bench.serving import alone, host
from harness.bench.serving.concurrent import decode_together, interactive_intervals
from harness.bench.serving.plan import (
    CONTEXT,
    SEQUENCES,
    ServingPlan,
    Tokens,
    random_prompts,
    serving_runner,
)
from harness.bench.targets import Target
from harness.bench.worker import Worker
from reference.model.open import open_model
from reference.runner import ModelRunner

Rate = Callable[[Sequence[Tokens], int], float]
"""Measures the tokens per second of an engine that continues each prompt by a given number of
tokens."""
HOST_MICROSECONDS = 1000.0
"""Most microseconds a step of the most slots may cost the host."""


TARGETS = (
    Target("decode_gain", 3.0),
    Target(f"decode_{SEQUENCES[-1]}", 1.3, of_peer=True),
    Target("interval_mixed_spread", 1.3, least=False),
    Target("chat_hits", 0.8),
    Target("first_token_gain", 0.3, least=False),
    Target("lookup_gain", 1.5),
)
"""What every tier should reach. A gain is a ratio of two figures of the same report: 16 sequences
over one, a cached prompt over an uncached one, drafts from the prompt over none."""


def run_serving(plan: ServingPlan, say: Say = lambda text: None) -> dict[str, Any]:
    """Measure everything; ``say`` receives lines about progress. Raises RequestError when the
    model's context is too short, ExecutionError for an engine that fails or when drafted tokens
    changed an answer."""
    model = open_model(plan.model)
    with model.file, busy_processes(plan.beside), ExitStack() as stack:
        if model.config.context < CONTEXT:
            problem = f"{CONTEXT} positions are needed, the model has {model.config.context}"
            raise RequestError("model", problem)
        samples = {name: Samples() for name in plan.tiers}
        runners = {}
        for name in plan.tiers:
            say(f"opening {name}")
            runners[name] = stack.enter_context(serving_runner(plan, model, name))
        peers = _measure_together(plan, runners, samples, model.config.vocab, say)
        prompt = alone.editing_prompt(model)
        for repetition in range(plan.repeat):
            say(f"one user and sixteen, {repetition + 1} of {plan.repeat}")
            for name in in_turn(plan.tiers, repetition):
                _measure_mixed(plan, runners[name], samples[name])
                _measure_alone(runners[name], samples[name], prompt, repetition)
        facts = {"file": plan.model.name, "bytes": model.file.size, "vocab": model.config.vocab}
    engines, peer_engines = (
        {name: found.summaries() for name, found in group.items()} for group in (samples, peers)
    )
    peer = {"version": peer_version(), "engines": peer_engines} if peers else None
    report: dict[str, Any] = {
        "machine": machine_facts(),
        "model": facts,
        "settings": plan.settings,
        "peer": peer,
        "engines": engines,
        "ratios": _ratios(samples, peers),
        "host": _measure_host(plan, say),
    }
    report["targets"] = target_verdicts(report)
    return report


def target_verdicts(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every target with the median measured for it, and whether it is met."""
    verdicts = []
    for name, found in report["engines"].items():
        for target in TARGETS:
            values = report["ratios"].get(name, {}) if target.of_peer else found
            if target.metric in values:
                verdicts.append(target.verdict(values[target.metric]["median"], name))
    slots = host.HOST_SLOTS[-1]
    for kind in ("steady", "churn") if report["host"] else ():
        target = Target(f"host_{kind}", HOST_MICROSECONDS, least=False)
        for context in host.HOST_CONTEXTS:
            value = report["host"][f"{kind}_{slots}_{context}"]["median"]
            verdicts.append(target.verdict(value, f"{slots} slots at {context:,}"))
    return verdicts


def _measure_together(
    plan: ServingPlan,
    runners: Mapping[str, ModelRunner],
    samples: Mapping[str, Samples],
    vocab: int,
    say: Say,
) -> dict[str, Samples]:
    """Measure the total decode rate of each number of sequences, with tiers and the peer's
    configurations in turn; returns the peer's samples by configuration."""
    peers: dict[str, Samples] = {}
    with ExitStack() as stack:
        measures: dict[str, Rate] = {
            name: partial(decode_together, runner) for name, runner in runners.items()
        }
        for setup in plan.peer_setups:
            where = "on its graphics card " if setup.peer_gpu else ""
            name = f"{PEER} {where}{flash_name(setup.flash_attention)}"
            say(f"opening {name}")
            worker = stack.enter_context(Worker(PEER, setup, FIRST_PROMPT))
            measures[name] = partial(_peer_rate, worker)
            peers[name] = Samples()
        found = {**samples, **peers}
        for prompts in _prompts(plan, vocab).values():
            for measure in measures.values():
                measure(prompts, 1)  # the first run builds programs and fills caches
        for repetition in range(plan.repeat):
            say(f"decoding together, {repetition + 1} of {plan.repeat}")
            for count, prompts in _prompts(plan, vocab).items():
                for name in in_turn(list(measures), repetition):
                    found[name].add(f"decode_{count}", measures[name](prompts, plan.decode_tokens))
    for engine in found.values():
        for first, last in zip(
            engine.values[f"decode_{SEQUENCES[0]}"],
            engine.values[f"decode_{SEQUENCES[-1]}"],
            strict=True,
        ):
            engine.add("decode_gain", last / first)
    return peers


def _prompts(plan: ServingPlan, vocab: int) -> dict[int, list[Tokens]]:
    return {count: random_prompts(count, vocab, count, plan.prompt_tokens) for count in SEQUENCES}


def _peer_rate(worker: Worker, prompts: Sequence[Tokens], decode_tokens: int) -> float:
    timing = worker.generate_together(prompts, decode_tokens)
    return len(prompts) * decode_tokens / timing.decode_seconds


def _measure_mixed(plan: ServingPlan, runner: ModelRunner, found: Samples) -> None:
    for name, batch in (("alone", False), ("mixed", True)):
        intervals = interactive_intervals(runner, plan, batch=batch)
        middle, late = np.percentile(intervals, (50, 99)).tolist()
        found.add(f"interval_{name}_p50", middle)
        found.add(f"interval_{name}_p99", late)
        found.add(f"interval_{name}_spread", late / middle)


def _measure_alone(runner: ModelRunner, found: Samples, prompt: Tokens, repetition: int) -> None:
    chat = alone.replay_chat(runner)
    found.add("chat_hits", chat.hit / chat.prompted)
    cold, hit = alone.first_token_seconds(runner, repetition)
    found.add("first_token_cold", cold)
    found.add("first_token_hit", hit)
    found.add("first_token_gain", hit / cold)
    plain, guessed = alone.edited_twice(
        lambda lookup: alone.edit_text(runner, prompt, lookup=lookup)
    )
    found.add("lookup_plain", plain.rate)
    found.add("lookup_guessed", guessed.rate)
    found.add("lookup_gain", guessed.rate / plain.rate)
    found.add("lookup_tokens_a_step", (len(guessed.tokens) - 1) / guessed.steps)


def _measure_host(plan: ServingPlan, say: Say) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if not plan.host_steps:
        return found
    with host.smallest_model() as model:
        for context in host.HOST_CONTEXTS:
            for slots in host.HOST_SLOTS:
                say(f"the host's part of a step, {slots} slots at {context:,} positions")
                with host.idle_runner(model, slots, context) as runner:
                    cost = host.measure_host(runner, plan.host_steps)
                found[f"steady_{slots}_{context}"] = summary(cost.steady)
                found[f"churn_{slots}_{context}"] = summary(cost.churn)
    return found


def _best(peers: Mapping[str, Samples], metric: str) -> str:
    return max(peers, key=lambda name: float(np.median(peers[name].values[metric])))


def _ratios(samples: Mapping[str, Samples], peers: Mapping[str, Samples]) -> dict[str, Any]:
    """The ratio of every tier to the peer's better configuration, for each number of sequences."""
    if not peers:
        return {}
    metrics = [f"decode_{count}" for count in SEQUENCES]
    best = {metric: peers[_best(peers, metric)].values[metric] for metric in metrics}
    return {
        name: {metric: ratio(ours.values[metric], theirs) for metric, theirs in best.items()}
        for name, ours in samples.items()
    }
