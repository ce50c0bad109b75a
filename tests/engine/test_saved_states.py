"""States saved in the middle of prompts, whatever becomes of the requests that saved them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from contract.dtypes import I12
from contract.types import QosClass, Request, Tenant
from harness.digest import RunningDigest
from reference.engine import Engine, EngineOptions
from reference.engine.engine import no_clock
from reference.limits import Limits
from reference.model.open import open_model
from reference.runner import ModelRunner
from reference.sched.tenants import Tenants
from tests.engine.agent_sessions import GREEDY, Reuse, ask
from tests.families_table import HYBRIDS
from tests.named_tiers import quick_tier

CONTEXT, INTERVAL = 256, 32
PROMPT = tuple(np.random.default_rng(3).integers(0, 256, 200).tolist())


@pytest.fixture(params=["qwen35", "lfm2", "granitehybrid", "kimi-linear-experts"])
def path(request, synthetic_model) -> Path:
    return synthetic_model(**HYBRIDS[request.param] | {"quant": "q8_0"})


@contextmanager
def opened(
    path: Path, *, slots: int = 2, pages: int = 32, cache: bool = True, states: int = 8
) -> Iterator[tuple[Engine, Reuse]]:
    model = open_model(path)
    limits = Limits(
        slots, CONTEXT, pages, I12, step_tokens=24 + slots, step_rows=24,
        saved_states=states, state_interval=INTERVAL,
    )  # fmt: skip
    both = [Tenant(0, "a", qos=QosClass.BATCH), Tenant(1, "b", qos=QosClass.INTERACTIVE)]
    tenants = Tenants(both, clock=no_clock)
    reuse = Reuse()
    with model.file, quick_tier() as tier, ModelRunner(model, tier, limits) as runner:
        options = EngineOptions(prefix_cache=cache)
        yield Engine(runner, options, tenants=tenants, observer=reuse), reuse


def cold_digest(path: Path, prompt: tuple[int, ...], most: int) -> str:
    with opened(path, cache=False) as (engine, _):
        return ask(engine, prompt, most, id=1)[1]


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 9, 11])
def test_a_request_cancelled_at_any_step_leaves_its_states(path, steps):
    """What it computed is found up to the last interval, and gives the bits of a cold run."""
    expected = cold_digest(path, PROMPT, 6)
    with opened(path) as (engine, reuse):
        engine.submit(Request(1, PROMPT, 6, GREEDY, turns=(150,)))
        for _ in range(steps):
            engine.step()
        computed = engine.progress(1)
        engine.cancel(1)
        engine.memory.check([])
        assert ask(engine, PROMPT, 6, id=2)[1] == expected
        assert reuse.reused[2] >= min(computed - INTERVAL, 192 - INTERVAL)
        engine.memory.check([])


@pytest.mark.parametrize("when", [2, 5, 10])
def test_a_preempted_prompt_goes_on_from_its_states(path, when):
    """Another tenant takes the only slot in the middle of the prompt."""
    expected = cold_digest(path, PROMPT, 6)
    with opened(path, slots=1, pages=32) as (engine, _):
        digest = RunningDigest()
        engine.submit(Request(1, PROMPT, 6, GREEDY, ignore_end=True), digest, len(PROMPT) - 1)
        for _ in range(when):
            engine.step()
        other = tuple(reversed(PROMPT[:40]))
        engine.submit(Request(2, other, 3, GREEDY, tenant=1, ignore_end=True))
        ended = [event for event in engine.run() if event.finish_reason is not None]
        assert [event.request_id for event in ended] == [2, 1]
        assert engine.statistics.preempted == 1
        assert digest.after(6) == expected
        engine.memory.check([])


@pytest.mark.parametrize("states", [1, 2, 3])
def test_with_hardly_any_room_for_states(path, states):
    """Many conversations, few states: slower, never wrong."""
    random = np.random.default_rng(states)
    with opened(path, states=states) as (engine, _), opened(path, cache=False) as (cold, _):
        for number in range(14):
            shared = int(random.integers(0, 190))
            rest = random.integers(0, 256, 1 + int(random.integers(0, 20))).tolist()
            prompt = (*PROMPT[:shared], *rest)
            turns = (shared,)
            warm = ask(engine, prompt, 5, id=number, turns=turns)[1]
            assert warm == ask(cold, prompt, 5, id=number)[1], number
            engine.memory.check([])
