"""Measures sequences that decode together, and the delay of an interactive one among them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from contract.errors import ExecutionError
from contract.types import LOCAL_TENANT, FinishReason, QosClass, Request
from harness.bench.engines import GREEDY
from harness.bench.serving.plan import SLOTS, ServingPlan, Tokens, random_prompts
from reference.engine import Engine, EngineOptions
from reference.runner import ModelRunner
from reference.sched.tenants import Tenants

INTERACTIVE = replace(LOCAL_TENANT, id=1, name="interactive", qos=QosClass.INTERACTIVE)
BATCH = replace(LOCAL_TENANT, id=2, name="batch", qos=QosClass.BATCH)
HURRIED = 0
"""The interactive request's id; batch requests are numbered from 1."""
LEARNING_TOKENS = 256
"""Tokens of the interactive request that are not counted: meanwhile the engine tries step sizes to
learn their cost, and the batch requests spread out in time."""


def decode_together(runner: ModelRunner, prompts: Sequence[Tokens], decode_tokens: int) -> float:
    """Tokens per second of all sequences, from when each has its first token until one has its
    last."""
    engine = Engine(runner, EngineOptions(prefix_cache=False), clock=time.perf_counter)
    for number, prompt in enumerate(prompts):
        engine.submit(Request(number, prompt, decode_tokens + 1, GREEDY, ignore_end=True))
    started: set[int] = set()
    while len(started) < len(prompts):
        started |= {event.request_id for event in engine.step()}
    begun = time.perf_counter()
    tokens = 0
    ended = False
    while not ended:
        events = engine.step()
        tokens += len(events)
        ended = any(event.finish_reason is not None for event in events)
    return tokens / (time.perf_counter() - begun)


def interactive_intervals(
    runner: ModelRunner,
    plan: ServingPlan,
    *,
    batch: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds between the tokens of an interactive request, ``4 * decode_tokens`` intervals.

    With ``batch``, requests of a batch tenant always hold all other slots. Their prompts and
    answers are up to four times ``prompt_tokens`` and ``decode_tokens``; when one ends, the next
    starts."""
    tenants = Tenants((INTERACTIVE, BATCH), clock=clock)
    engine = Engine(runner, EngineOptions(prefix_cache=False), clock=clock, tenants=tenants)
    vocab = runner.model.config.vocab
    (prompt,) = random_prompts(HURRIED, vocab, 1, plan.prompt_tokens)
    requested = 4 * plan.decode_tokens
    tokens = LEARNING_TOKENS + requested + 1
    engine.submit(Request(HURRIED, prompt, tokens, GREEDY, tenant=INTERACTIVE.id, ignore_end=True))
    number = 0

    def submit_batch() -> None:
        nonlocal number
        number += 1
        length = plan.prompt_tokens * (1 + number % 4)
        (read,) = random_prompts(number, vocab, 1, length)
        decoded = plan.decode_tokens * (1 + number * 3 % 4)
        engine.submit(Request(number, read, decoded, GREEDY, tenant=BATCH.id, ignore_end=True))

    for _ in range(SLOTS - 1 if batch else 0):
        submit_batch()
    times: list[float] = []
    while len(times) < tokens:
        events = engine.step()
        now = clock()
        for event in events:
            if event.request_id == HURRIED:
                times.append(now)
                if event.finish_reason not in (None, FinishReason.LENGTH):
                    raise ExecutionError(f"the interactive request ended: {event.finish_reason}")
            elif event.finish_reason is not None:
                submit_batch()
    counted = times[LEARNING_TOKENS:]
    return [after - before for before, after in pairwise(counted)]
